"""`rlboost plan`: predict time and dollars of a job on spot fleets of several sizes."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlboost.commands.common import JobFileArgument, JsonOption, OverridesArgument, print_json, print_table
from rlboost.shared.errors import ConfigError

if TYPE_CHECKING:
    from rlboost.planning.fleets import Plan, Spread


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(plan)


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
    from rlboost.planning.fleets import best, plans  # noqa: PLC0415 - keeps --help quick
    from rlboost.planning.simulated_run import read_profile  # noqa: PLC0415 - likewise
    from rlboost.shared.job import spec as job_spec  # noqa: PLC0415 - likewise
    from rlboost.shared.job.file import load  # noqa: PLC0415 - likewise
    from rlboost.shared.prices import Prices, read_prices  # noqa: PLC0415 - likewise
    from rlboost.simulation.traces import G4DN, generate_trace, read_trace  # noqa: PLC0415 - likewise

    spec = job_spec.parse(load(str(job_file), overrides))
    if not isinstance(spec, job_spec.RlJob):
        raise ConfigError(f"{job_file}: a job of kind {spec.kind} uses no spot fleet for long: plan jobs of kind rl")
    run = read_profile(profile)
    if unknown := sorted(run.model_extra or ()):
        typer.echo(f"rlboost: {profile}: warning: written by a newer release; ignored: {', '.join(unknown)}", err=True)
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
