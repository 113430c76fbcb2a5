"""`rlboost report`: generate the report of a recorded run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(report)


def report(
    record: Annotated[Path, typer.Argument(metavar="RECORD.json", help="The record that 'rlboost demo' wrote.")],
    out: Annotated[Path, typer.Option(help="Folder for the page and the pictures.")] = Path("report"),
) -> None:
    """Generate a run's report: one self-contained HTML page, and its figures as PNG files."""
    from rlboost.commands.up import require_packages  # noqa: PLC0415 - keeps --help quick
    from rlboost.report.page import write  # noqa: PLC0415 - needs matplotlib
    from rlboost.report.record import load  # noqa: PLC0415 - keeps --help quick

    require_packages("matplotlib")
    typer.echo(write(load(record), out).absolute())
