"""`rlboost config check`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rlboost.commands.checking import tell
from rlboost.commands.common import JsonOption, new_app, print_json

app = new_app("Job files.")


@app.callback()
def _group() -> None:
    """Keep `check` a command of its own although it is the only one."""


@app.command()
def check(
    job_file: Annotated[Path, typer.Argument(metavar="JOB.yaml", help="The job file: YAML, TOML or JSON.")],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[a.b=v ...]", help="Values that win.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Tell what is wrong with a job file: its fields, the model and data, and the functions that it names.

    Those are the reward, the environment, the loss and the curriculum. Libraries that it needs to be trained and that
    are missing here are warned of.
    """
    from rlboost import jobcheck  # noqa: PLC0415 - keeps --help quick

    found = jobcheck.check(job_file, overrides or [])
    if as_json:
        print_json({"ok": not found.problems, "problems": found.problems, "warnings": found.warnings})
    tell(str(job_file), found)
    if not as_json:
        typer.echo(f"{job_file}: no problem found")
