"""`rlboost demo`: the Countdown job on workers that join and are preempted."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from rlboost.commands.common import EXIT_FAILED, EXIT_INTERRUPTED, JsonOption, print_json
from rlboost.commands.system import SERVICE_PACKAGES, require_packages
from rlboost.shared.errors import ConfigError
from rlboost.shared.process.modules import EngineName, require_engine
from rlboost.terminal import console, echo

_STATE = Path(".rlboost/demo")


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(demo)


def demo(  # noqa: PLR0913, PLR0917 - the options of a command
    steps: Annotated[int | None, typer.Option(min=3, help="Training steps; the job file's 60 if not given.")] = None,
    workers: Annotated[
        int | None, typer.Option(min=0, help="Spot workers at the start, with --trace at most; default 3.")
    ] = None,
    autoscale: Annotated[
        int,
        typer.Option(min=0, help="Autoscale spot workers up to this number: add one only if it shortens steps."),
    ] = 0,
    engine: Annotated[EngineName, typer.Option(help="Inference engine.")] = "torch",
    state: Annotated[Path, typer.Option(help="Folder for the run; data of an earlier demo in it is deleted.")] = _STATE,
    out: Annotated[
        Path | None, typer.Option(help="Folder for the report; 'report' in the state folder if not given.")
    ] = None,
    chaos: Annotated[bool, typer.Option("--chaos/--no-chaos", help="Preempt workers and add others.")] = True,
    trace: Annotated[
        Path | None,
        typer.Option(help="Recorded spot trace: workers join and are killed as its instances were, hours in minutes."),
    ] = None,
    start: Annotated[float, typer.Option(min=0.0, help="With --trace: its hour at which the demo begins.")] = 0.0,
    hours: Annotated[float, typer.Option(min=0.1, help="With --trace: its hours that the demo replays.")] = 2.0,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the job and of the preemption schedule.")] = 0,
    as_json: JsonOption = False,
) -> None:
    """Train a small model on this machine while spot workers are killed, and account for every sample.

    Fails if the job fails, if accuracy does not rise, or if the audit does not balance. With --json it prints the
    result as JSON, and progress on standard error.
    """
    from rlboost.demo.run import DemoOptions, record_file, run  # noqa: PLC0415 - keeps --help quick
    from rlboost.demo.summary import summary  # noqa: PLC0415 - likewise
    from rlboost.local.spec_file import initial_workers  # noqa: PLC0415 - likewise
    from rlboost.report import checks, report_of, write  # noqa: PLC0415 - likewise
    from rlboost.simulation.traces import trace_segment  # noqa: PLC0415 - likewise

    require_packages(*SERVICE_PACKAGES)
    require_engine(engine)
    screen = console(stderr=as_json)
    first_workers = initial_workers(workers, autoscale)
    replayed = None
    if trace:
        if autoscale or not chaos:
            raise ConfigError("--trace says when workers join and are killed: leave --autoscale and --no-chaos out")
        replayed = trace_segment(trace, sample=1.0, start_h=start, hours=hours, limit=first_workers)
    record = run(DemoOptions(state, steps, first_workers, chaos, seed, engine, autoscale, replayed), screen)
    if record is None:
        echo("rlboost: the demo was stopped; nothing of it runs any more", err=True)
        raise typer.Exit(EXIT_INTERRUPTED)
    screen.print(summary(record))
    page, found = write(report_of(record), out or state / "report"), checks(record)
    files = {"report": str(page.absolute()), "record": str(record_file(state).absolute())}
    if as_json:
        guarantees = [asdict(check) for check in found]
        print_json({"job": record.job, "guarantees": guarantees, "audit": record.audit, "cost": record.cost, **files})
    else:
        echo("\n" + "\n".join(f"{name}: {path}" for name, path in files.items()))
    if not all(check.held for check in found):
        echo(f"rlboost: a guarantee was violated; the logs are in {state / 'logs'}", err=True)
        raise typer.Exit(EXIT_FAILED)
