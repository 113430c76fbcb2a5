"""`rlboost report`: generate the report of a job, or of a recorded demo."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rlboost.commands.common import DEFAULT_STATE, StateOption, connect


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(report)


def report(
    source: Annotated[
        str,
        typer.Argument(metavar="JOB|RECORD.json", help="A job's id or name, or the record that 'rlboost demo' wrote."),
    ],
    out: Annotated[Path, typer.Option(help="Folder for the page.")] = Path("report"),
    state: StateOption = DEFAULT_STATE,
) -> None:
    """Generate a report: the job's web page with all that it shows in it, as one file.

    A job may be running: its report shows what there is so far.
    """
    from rlboost.report.page import write  # noqa: PLC0415 - keeps --help quick

    if Path(source).suffix == ".json":
        from rlboost.report.record import load  # noqa: PLC0415 - keeps --help quick
        from rlboost.report.run_report import report_of  # noqa: PLC0415 - likewise

        found = report_of(load(Path(source)))
    else:
        from rlboost.report.answers import read  # noqa: PLC0415 - keeps --help quick

        with connect(state) as client:
            found = read(client, client.jobs.find(source))
    typer.echo(write(found, out).absolute())
