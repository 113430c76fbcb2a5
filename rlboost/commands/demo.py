"""`rlboost demo`: the Countdown job on workers that join and are preempted."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rlboost.commands.common import EXIT_FAILED, EXIT_INTERRUPTED
from rlboost.commands.up import SERVICE_PACKAGES, Engine, require_packages

_STATE = Path(".rlboost/demo")


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(demo)


def demo(
    steps: Annotated[int | None, typer.Option(min=3, help="Training steps; the job file's 60 if not given.")] = None,
    workers: Annotated[int | None, typer.Option(min=0, help="Preemptible workers at the start; default 3.")] = None,
    autoscale: Annotated[
        int,
        typer.Option(min=0, help="Autoscale preemptible workers up to this number: add one only if it shortens steps."),
    ] = 0,
    engine: Annotated[Engine, typer.Option(help="Inference engine.")] = Engine.TORCH,
    state: Annotated[Path, typer.Option(help="Folder for the run; data of an earlier demo in it is deleted.")] = _STATE,
    out: Annotated[
        Path | None, typer.Option(help="Folder for the report; 'report' in the state folder if not given.")
    ] = None,
    chaos: Annotated[bool, typer.Option("--chaos/--no-chaos", help="Preempt workers and add others.")] = True,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the job and of the preemption schedule.")] = 0,
) -> None:
    """Train a small model on this machine while spot workers are killed, and account for every sample.

    Fails if the job fails, if accuracy does not rise, or if the audit does not balance.
    """
    from rich.console import Console  # noqa: PLC0415 - keeps --help quick

    from rlboost.demo.run import DemoOptions, record_file, run  # noqa: PLC0415 - likewise
    from rlboost.demo.summary import summary  # noqa: PLC0415 - likewise
    from rlboost.local.spec_file import require_engine  # noqa: PLC0415 - likewise
    from rlboost.local.system_layout import initial_workers  # noqa: PLC0415 - likewise
    from rlboost.report.checks import checks  # noqa: PLC0415 - likewise
    from rlboost.report.page import write  # noqa: PLC0415 - likewise
    from rlboost.report.run_report import report_of  # noqa: PLC0415 - likewise

    require_packages(*SERVICE_PACKAGES)
    require_engine(engine.value)
    console = Console()
    first_workers = initial_workers(workers, autoscale)
    record = run(DemoOptions(state, steps, first_workers, chaos, seed, engine.value, autoscale), console)
    if record is None:
        typer.echo("rlboost: the demo was stopped; nothing of it runs any more", err=True)
        raise typer.Exit(EXIT_INTERRUPTED)
    console.print(summary(record))
    page = write(report_of(record), out or state / "report")
    typer.echo(f"\nreport: {page.absolute()}\nrecord: {record_file(state).absolute()}")
    if not all(check.held for check in checks(record)):
        typer.echo(f"rlboost: a guarantee was violated; the logs are in {state / 'logs'}", err=True)
        raise typer.Exit(EXIT_FAILED)
