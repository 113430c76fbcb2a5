"""Commands that predict: `rlboost plan`, `prices`, `memory`, `simulate`."""

from __future__ import annotations

from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from rlboost.commands.common import JobFileArgument, JsonOption, OverridesArgument, print_json, print_table
from rlboost.shared.errors import ConfigError
from rlboost.terminal import echo

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rlboost.planning import Plan, Spread
    from rlboost.simulation.result import Summary
    from rlboost.simulation.scenario import Completions, Model


# --- `rlboost plan`: predict time and dollars of a job on spot fleets of several sizes --------------------------------


def plan(  # noqa: PLR0913, PLR0917 - the options of a command
    job_file: JobFileArgument,
    profile: Annotated[Path, typer.Option(metavar="FILE", help="The profile.json in the folder of an earlier run.")],
    overrides: OverridesArgument = None,
    trace: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Recorded availability of spot instances; generated if not given."),
    ] = None,
    prices: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Dollars per hour; those of the run's workers if not given.")
    ] = None,
    max_workers: Annotated[int, typer.Option(min=1, help="Largest fleet of spot workers.")] = 6,
    seeds: Annotated[int, typer.Option(min=1, help="Simulations of each fleet.")] = 3,
    startup_s: Annotated[float, typer.Option(min=0, help="Seconds from an instance's request to its join.")] = 120.0,
    max_dollars: Annotated[float | None, typer.Option(min=0, help="Budget: choose the fastest fleet in it.")] = None,
    max_hours: Annotated[float | None, typer.Option(min=0, help="Deadline: choose the cheapest fleet in it.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Predict how long a job takes and what it costs on fleets of several sizes, and choose one.

    Every fleet is simulated with the rollout manager's own code. Fails if no fleet is within the limits.
    """
    from rlboost.planning import (  # noqa: PLC0415 - keeps --help quick
        best,
        plans,
        read_profile,
    )
    from rlboost.shared.job import spec as job_spec  # noqa: PLC0415 - likewise
    from rlboost.shared.job.file import load  # noqa: PLC0415 - likewise
    from rlboost.shared.prices import Prices, read_prices  # noqa: PLC0415 - likewise
    from rlboost.simulation.traces import G4DN, generate_trace, read_trace  # noqa: PLC0415 - likewise

    spec = job_spec.parse(load(str(job_file), overrides))
    if not isinstance(spec, job_spec.RlJob):
        raise ConfigError(f"{job_file}: a job of kind {spec.kind} uses no spot fleet for long: plan jobs of kind rl")
    run = read_profile(profile)
    if unknown := sorted(run.model_extra or ()):
        echo(f"rlboost: {profile}: warning: written by a newer release; ignored: {', '.join(unknown)}", err=True)
    recorded = read_trace(trace) if trace else None
    found = list(
        plans(
            spec,
            run,
            read_prices(prices) if prices else Prices(),
            lambda seed: recorded or generate_trace(G4DN, seed),
            max_workers=max_workers,
            seeds=seeds,
            startup_s=startup_s,
        )
    )
    chosen = best(found, max_dollars=max_dollars, max_hours=max_hours)
    if as_json:
        print_json([asdict(one) | {"chosen": one is chosen} for one in found])
    else:
        _print(found, chosen, f"{spec.steps} steps, {seeds} seeds: mean (lowest to highest)")
    if chosen is None:
        raise ConfigError("no fleet is within the limits in every simulation: raise --max-dollars or --max-hours")


def _print(found: list[Plan], chosen: Plan | None, title: str) -> None:
    columns = ("kind", "workers up to", "workers used", "hours", "dollars", "tokens/s", "")
    rows = [
        (
            one.kind,
            one.max_workers,
            _text(one.workers, ".1f"),
            _text(one.hours, ".2f"),
            _text(one.dollars, ".2f"),
            _text(one.tokens_per_s, ".0f"),
            "chosen" if one is chosen else "",
        )
        for one in found
    ]
    print_table(title, columns, rows)


def _text(spread: Spread, form: str) -> str:
    return f"{spread.mean:{form}} ({spread.lowest:{form}} to {spread.highest:{form}})"


# --- `rlboost prices`: look up list prices of clouds' machines --------------------------------------------------------


_LIMIT_S = 30.0


def prices(
    worker: Annotated[
        list[str] | None,
        typer.Option(metavar="KIND=MACHINE[/N]", help="A kind of spot worker, N of them on a machine; repeatable."),
    ] = None,
    reserved: Annotated[
        list[str] | None,
        typer.Option(metavar="MACHINE", help="A machine of the reserved cluster, at its on-demand price; repeatable."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The file to write or replace; printed if not given.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Look up list prices of machines and write them as a price file for the manager and 'rlboost plan --prices'.

    A MACHINE is CLOUD/REGION/TYPE, such as aws/us-east-1/p5.48xlarge; on Google Cloud it names its GPUs too:
    gcp/us-central1/a3-highgpu-8g+H100:8. A zone may stand for the region, whose cheapest zone counts.
    """
    import yaml  # noqa: PLC0415 - keeps --help quick

    from rlboost.planning import ListPrices, MachineType, SpotKind  # noqa: PLC0415 - likewise
    from rlboost.shared.http.clients import http_client  # noqa: PLC0415 - likewise
    from rlboost.shared.proxies import external  # noqa: PLC0415 - likewise

    if not worker and not reserved:
        raise ConfigError("prices of what? Name machines with --worker h100=aws/us-east-1/p5.48xlarge/8 or --reserved")
    spot = [SpotKind.parse(text) for text in worker or ()]
    machines = [MachineType.parse(text) for text in reserved or ()]
    with http_client(external, timeout=_LIMIT_S) as http:
        found = ListPrices(http).prices(machines, spot, datetime.now(UTC).date())
    text = "# Dollars per hour, by 'rlboost prices': list prices, without taxes, discounts, disks and traffic.\n"
    text += yaml.safe_dump(found.model_dump(exclude_none=True), sort_keys=False, width=1000)
    if as_json:
        print_json(found.model_dump(exclude_none=True))
    if out is None:
        if not as_json:
            echo(text, nl=False)
        return
    try:
        out.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--out {out} cannot be written: {error.strerror}") from error


# --- `rlboost simulate`: compare policies over a spot trace in virtual time -------------------------------------------


_COLUMNS = (
    "policy",
    "tokens/s",
    "min-max",
    "throughput",
    "$/million tokens",
    "tokens/$",
    "instances",
    "step s",
    "seeding s",
    "trainer waits s",
    "migrations/step",
)


def simulate(  # noqa: PLR0913, PLR0917 - the options of a command
    policy: Annotated[
        list[str] | None, typer.Option(help="Compare this policy; repeat the option. The first one is the reference.")
    ] = None,
    model: Annotated[str, typer.Option(help="Preset of job and machines: 8b, 14b or 32b.")] = "8b",
    completions: Annotated[str, typer.Option(help="Calibration of the preset: short or long completions.")] = "short",
    trace: Annotated[
        Path | None, typer.Option(help="Recorded spot trace; without it one is generated from published statistics.")
    ] = None,
    sample: Annotated[
        float, typer.Option(min=0.01, max=1.0, help="Share of the trace's instances that is used.")
    ] = 0.5,
    start: Annotated[float, typer.Option(min=0.0, help="Hour of the trace at which the simulation starts.")] = 0.0,
    hours: Annotated[float, typer.Option(min=0.1, help="Simulated hours.")] = 2.0,
    instances: Annotated[
        int | None,
        typer.Option(min=0, help="Maximum number of instances in use; by default as many as the model can use."),
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each policy, with different lengths.")] = 2,
    as_json: JsonOption = False,
) -> None:
    """Compare policies over a spot trace, in virtual time.

    Policies: verl, verl-2x, disaggregated, polyrl, paper, rlboost, rlboost-speculation, rlboost-stale, and rlboost
    without a part: no-seeding, no-memory, no-migration, no-balancing, no-notices, no-deltas. Decisions of
    rlboost are taken by the rollout manager's own code. Ratios are relative to the first policy; below 3 % they are
    "same".
    """
    from rlboost.simulation import simulate as run  # noqa: PLC0415 - keeps --help quick
    from rlboost.simulation.policies import ABLATIONS, POLICIES  # noqa: PLC0415 - likewise
    from rlboost.simulation.result import summarize  # noqa: PLC0415 - likewise
    from rlboost.simulation.scenario import LENGTHS, SHAPES, preset  # noqa: PLC0415 - likewise
    from rlboost.simulation.traces import trace_segment  # noqa: PLC0415 - likewise

    known = POLICIES | ABLATIONS
    names = policy or ["verl", "paper", "rlboost"]
    for name in names:
        _check("--policy", name, known)
    _check("--model", model, SHAPES)
    _check("--completions", completions, LENGTHS)
    chosen = cast("Model", model)
    job, machine = preset(chosen, cast("Completions", completions))
    limit = SHAPES[chosen].useful_instances if instances is None else instances
    fleet = trace_segment(trace, sample=sample, start_h=start, hours=hours, limit=limit)
    results = {name: [run(job, machine, fleet, known[name], seed=seed) for seed in range(seeds)] for name in names}
    try:
        summaries = [summarize(runs) for runs in results.values()]
    except ValueError as error:
        raise ConfigError(f"{error}: pass more --hours") from error
    if as_json:
        print_json({"trace_s": fleet.duration_s, "policies": [summary.public() for summary in summaries]})
    else:
        title = f"{model}, {completions} completions, {fleet.duration_s / 3600:g} hours, {seeds} seeds"
        print_table(title, _COLUMNS, _rows(summaries))


def _check(option: str, value: str, known: Iterable[str]) -> None:
    if value not in known:
        raise ConfigError(f"{option} {value} is unknown: choose one of {', '.join(known)}")


def _rows(summaries: list[Summary]) -> Iterable[tuple[str, ...]]:
    from rlboost.simulation.result import ratio_text  # noqa: PLC0415 - keeps --help quick

    first = summaries[0]
    for summary in summaries:
        cost_ratio = first.dollars_per_million_tokens / summary.dollars_per_million_tokens
        yield (
            summary.policy,
            f"{summary.tokens_per_s:,.0f}",
            f"{summary.min_tokens_per_s:,.0f}-{summary.max_tokens_per_s:,.0f}",
            ratio_text(summary.tokens_per_s / first.tokens_per_s),
            f"{summary.dollars_per_million_tokens:.2f}",
            ratio_text(cost_ratio),
            f"{summary.instances:.1f}",
            f"{summary.step_s:.0f}",
            f"{summary.seeding_s:.0f}",
            f"{summary.train_wait_s:.1f}",
            f"{summary.migrations_per_step:.0f}",
        )


# --- `rlboost memory` -------------------------------------------------------------------------------------------------


_GIB = 1 << 30
_TOKENS = 4096
"""Of the longest sample, if nothing says how long it is."""


def memory(
    job_file: Annotated[Path | None, typer.Argument(metavar="JOB.yaml", help="The job file; or give --model.")] = None,
    overrides: OverridesArgument = None,
    model: Annotated[
        str | None, typer.Option(help="Folder or Hugging Face id of a model: what fits with common settings.")
    ] = None,
    tokens: Annotated[
        int,
        typer.Option(
            min=0,
            help="Tokens of the longest sample and its prompt; 0: sampling.max_tokens, or the micro-batch's (no rl), "
            "or 4096 with --model.",
        ),
    ] = 0,
    image_tokens: Annotated[
        int | None,
        typer.Option(
            min=0, help="Tokens of images among those of a micro-batch; by default all, if the model sees images."
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Compute the GPU memory of a job's training from its model's config.json, before anything loads.

    With LoRA and with megatron only weights, gradients and optimizer are computed. A CUDA context, libraries'
    workspaces and fragmentation come on top. With --model instead of a job file it shows which GPUs train the model
    with common settings, and how many samples a worker generates at a time.
    """
    if (job_file is None) == (model is None):
        raise ConfigError("give a job file, or --model FOLDER or --model OWNER/NAME")
    if model is not None:
        _show_fit(model, tokens or _TOKENS, image_tokens, as_json=as_json)
        return
    from rlboost.jobs.memory import estimate  # noqa: PLC0415 - keeps --help quick
    from rlboost.shared.job.file import load  # noqa: PLC0415 - likewise
    from rlboost.shared.job.spec import parse  # noqa: PLC0415 - likewise

    spec = parse(load(str(job_file), overrides or []))
    found = estimate(spec, tokens, image_tokens)
    if as_json:
        print_json(found._asdict())
        return
    echo(
        f"{spec.model}: {found.parameters / 1e9:.2f} billion parameters, {found.active_parameters / 1e9:.2f} per token"
    )
    of_images = f", {found.image_tokens} of them of images," if found.image_tokens else ""
    echo(f"on each of {found.gpus} GPUs, with {found.tokens} tokens{of_images} in a micro-batch:")
    for name, n_bytes in found.bytes.items():
        echo(f"  {name.replace('_', ' '):<28}{n_bytes / _GIB:>8.1f} GiB")


def _show_fit(model: str, tokens: int, image_tokens: int | None, *, as_json: bool) -> None:
    from rlboost.jobs.hub import config_of  # noqa: PLC0415 - likewise
    from rlboost.jobs.memory import fit_of  # noqa: PLC0415 - keeps --help quick

    found = fit_of(config_of(model), tokens, image_tokens)
    if as_json:
        print_json({**found._asdict(), "variants": [variant._asdict() for variant in found.variants]})
        return
    echo(f"{model}: {found.parameters / 1e9:.2f} billion parameters, {found.active_parameters / 1e9:.2f} per token")
    echo(f"trainer, GiB on each GPU, computed: bfloat16, AdamW, activation checkpointing, {tokens:,} tokens at a time")
    if found.image_tokens:
        echo(f"({found.image_tokens:,} of them of images: see --image-tokens)")
    echo("(the last columns: what stays there while a reserved worker generates, by trainer.offload)")
    columns = ("", "update", "smallest GPU", *(f"offload {name}" for name in found.variants[0].generating_gib))
    rows = [
        (one.name, f"{one.gib:.1f}", one.gpu, *(f"{gib:.1f}" for gib in one.generating_gib.values()))
        for one in found.variants
    ]
    print_table("", columns, rows)
    echo(f"worker with vLLM, samples of {tokens:,} tokens at a time:")
    held = [
        (gpu, *(f"{n:,}" if n else "-" for n in (found.samples[gpu], found.samples_fp8[gpu]))) for gpu in found.samples
    ]
    print_table("", ("", "bfloat16", "fp8"), held)


# --- Registration -----------------------------------------------------------------------------------------------------


def register(app: typer.Typer) -> None:
    """Add the commands."""
    for verb in (plan, prices, memory, simulate):
        app.command()(verb)
