"""`rlboost simulate`: compare policies over a spot trace in virtual time."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from rlboost.commands.common import JsonOption, print_json, print_table
from rlboost.shared.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from rlboost.simulation import SimulationResult
    from rlboost.simulation.presets import Completions, Model
    from rlboost.simulation.summary import Summary
    from rlboost.simulation.traces import FleetTrace

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


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(simulate)


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
    pictures: Annotated[
        Path | None, typer.Option(help="Folder for pictures of throughput, fleet and steps (needs matplotlib).")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Compare policies over a spot trace, in virtual time.

    Policies: verl, verl-2x, disaggregated, polyrl, paper, rlboost, rlboost-stale, and rlboost without a part:
    no-seeding, no-memory, no-migration, no-balancing, no-order, no-notices, no-deltas. Decisions of rlboost are taken
    by the rollout manager's own code. Ratios are relative to the first policy; below 3 % they are "same".
    """
    from rlboost.simulation import simulate as run  # noqa: PLC0415 - keeps --help quick
    from rlboost.simulation.policies import ABLATIONS, POLICIES  # noqa: PLC0415 - likewise
    from rlboost.simulation.presets import LENGTHS, SHAPES, preset  # noqa: PLC0415 - likewise
    from rlboost.simulation.summary import summarize  # noqa: PLC0415 - likewise

    known = POLICIES | ABLATIONS
    names = policy or ["verl", "paper", "rlboost"]
    for name in names:
        _check("--policy", name, known)
    _check("--model", model, SHAPES)
    _check("--completions", completions, LENGTHS)
    chosen = cast("Model", model)
    job, machine = preset(chosen, cast("Completions", completions))
    limit = SHAPES[chosen].useful_instances if instances is None else instances
    fleet = _fleet(trace, sample, start, hours, limit)
    results = {name: [run(job, machine, fleet, known[name], seed=seed) for seed in range(seeds)] for name in names}
    try:
        summaries = [summarize(runs) for runs in results.values()]
    except ValueError as error:
        raise ConfigError(f"{error}: pass more --hours") from error
    if pictures is not None:
        _draw(pictures, results)
    if as_json:
        print_json({"trace_s": fleet.duration_s, "policies": [summary.public() for summary in summaries]})
    else:
        title = f"{model}, {completions} completions, {fleet.duration_s / 3600:g} hours, {seeds} seeds"
        print_table(title, _COLUMNS, _rows(summaries))


def _check(option: str, value: str, known: Iterable[str]) -> None:
    if value not in known:
        raise ConfigError(f"{option} {value} is unknown: choose one of {', '.join(known)}")


def _fleet(path: Path | None, sample: float, start_h: float, hours: float, limit: int) -> FleetTrace:
    from rlboost.simulation.traces import G4DN, generate_trace, read_trace  # noqa: PLC0415 - keeps --help quick

    whole = read_trace(path) if path else generate_trace(G4DN, seed=0)
    if start_h * 3600 >= whole.duration_s:
        raise ConfigError(f"--start {start_h:g}: the trace has {whole.duration_s / 3600:.1f} hours")
    part = whole.sampled(sample, seed=0).between(start_h * 3600, (start_h + hours) * 3600)
    return part.limited(limit)


def _rows(summaries: list[Summary]) -> Iterable[tuple[str, ...]]:
    from rlboost.simulation.summary import ratio_text  # noqa: PLC0415 - keeps --help quick

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


def _draw(folder: Path, results: Mapping[str, list[SimulationResult]]) -> None:
    from rlboost.simulation.pictures import draw  # noqa: PLC0415 - keeps --help quick

    for path in draw(folder, [runs[0] for runs in results.values()]):
        typer.echo(f"wrote {path}", err=True)
