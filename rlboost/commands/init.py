"""`rlboost init`: a job folder that runs."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from rlboost.commands.common import JsonOption, print_json


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(init)


def init(
    folder: Annotated[Path, typer.Argument(metavar="[DIR]", help="New, or empty.")] = Path(),
    model: Annotated[
        str | None, typer.Option("--model", help="Hugging Face id or folder; a model of 0.2 M parameters if not given.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Make a job folder to start from: data, a reward and its test, a warm-up and an RL job, on sums of two numbers."""
    from rlboost.jobs import new_folder  # noqa: PLC0415 - only this command needs it

    created = new_folder.make(folder, model)
    if as_json:
        print_json({"folder": str(folder.absolute()), "made": created})
        return
    typer.echo(f"created {', '.join(created)} in {folder.absolute()}\nnext:")
    if folder != Path():
        typer.echo(f"  cd {shlex.quote(str(folder))}")
    typer.echo("  rlboost up --detach\n  rlboost run job.yaml --follow")
