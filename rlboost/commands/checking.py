"""Checking a job before it is sent, and telling what was found."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rlboost.commands.common import EXIT_CONFIG

if TYPE_CHECKING:
    from rlboost.jobcheck import Found

NoCheckOption = Annotated[
    bool, typer.Option("--no-check", help="Look at its fields alone, not for the files and functions that it names.")
]


def require_sound(job_file: str, job: dict[str, Any], state: Path) -> None:
    """Tell what is wrong with a job, and refuse it, before it is sent.

    What is missing here is a warning if the trainer looks elsewhere.

    Raises:
        typer.Exit: something is wrong with it.

    """
    from rlboost.jobcheck import Found, check_job  # noqa: PLC0415 - keeps --help quick
    from rlboost.tried import NotHere  # noqa: PLC0415 - likewise

    found = check_job(job)
    if not _is_trained_here(state):
        missing = [problem for problem in found.problems if isinstance(problem, NotHere)]
        found = Found([problem for problem in found.problems if problem not in missing], [])
        for problem in missing:
            typer.echo(f"rlboost: {job_file}: warning: {problem}", err=True)
    tell(job_file, found)


def tell(job_file: str, found: Found) -> None:
    """Print what was found in a job file.

    Raises:
        typer.Exit: something is wrong with it.

    """
    for problem in found.problems:
        typer.echo(f"rlboost: {job_file}: {problem}", err=True)
    for warning in found.warnings:
        typer.echo(f"rlboost: {job_file}: warning: {warning}, if it is to be trained on this machine", err=True)
    if found.problems:
        raise typer.Exit(EXIT_CONFIG)


def _is_trained_here(state: Path) -> bool:
    """Tell whether the trainer looks for files and modules from this folder."""
    from rlboost.local.state import StateDir  # noqa: PLC0415 - keeps --help quick

    folder, url = StateDir(state), os.environ.get("RLBOOST_URL")
    if not folder.running():
        return not url
    config = folder.config()
    is_meant = not url or (config is not None and config.url == url.rstrip("/"))
    return is_meant and folder.started_in() == Path.cwd()
