"""`rlboost report`: generate the report of a job, or of a recorded demo."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlboost.commands.common import DEFAULT_STATE, StateOption, connect

if TYPE_CHECKING:
    from rlboost.client import Client
    from rlboost.report.history import History


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(report)


def report(
    source: Annotated[
        str,
        typer.Argument(metavar="JOB|RECORD.json", help="A job's id or name, or the record that 'rlboost demo' wrote."),
    ],
    out: Annotated[Path, typer.Option(help="Folder for the page and the pictures.")] = Path("report"),
    state: StateOption = DEFAULT_STATE,
) -> None:
    """Generate a report: one self-contained HTML page, and its figures as PNG files.

    A job may be running: its report shows what there is so far.
    """
    from rlboost.commands.up import require_packages  # noqa: PLC0415 - keeps --help quick

    require_packages("matplotlib")
    if Path(source).suffix == ".json":
        from rlboost.report.page import write  # noqa: PLC0415 - needs matplotlib
        from rlboost.report.record import load  # noqa: PLC0415 - keeps --help quick

        page = write(load(Path(source)), out)
    else:
        from rlboost.report import job_page  # noqa: PLC0415 - needs matplotlib

        with connect(state) as client:
            history = _history(client, source)
        page = job_page.write(history, out)
    typer.echo(page.absolute())


def _history(client: Client, given: str) -> History:
    from rlboost.client import ClientError  # noqa: PLC0415 - keeps --help quick
    from rlboost.jobs.file import as_yaml  # noqa: PLC0415 - likewise
    from rlboost.report.history import History  # noqa: PLC0415 - likewise
    from rlboost.report.record import JobEvent  # noqa: PLC0415 - likewise

    job = client.jobs.find(given)
    try:
        spec, audit = client.jobs.spec(job["id"]), client.jobs.audit(job["id"])
    except ClientError as error:
        if error.status is None:
            raise
        spec, audit = {}, {}  # a quarantined job has neither
    events = [
        JobEvent(at=event.data["at"], kind=event.kind, source=event.data["source"], fields=event.data["fields"])
        for event in client.jobs.events(job["id"], follow=False)
    ]
    return History(job, as_yaml(spec), client.jobs.metrics(job["id"]), events, audit, time.time())
