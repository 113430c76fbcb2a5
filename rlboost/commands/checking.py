"""Check a job before it is submitted, and print the findings."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rlboost.commands.common import EXIT_CONFIG

if TYPE_CHECKING:
    from rlboost.jobs.check import Found

NoCheckOption = Annotated[
    bool, typer.Option("--no-check", help="Check the job file's fields only, not the files and functions it names.")
]


def require_sound(job_file: str, job: dict[str, Any], state: Path) -> None:
    """Print a job's problems and refuse to submit it if there are any.

    A file or module missing here is only a warning if the trainer runs in another folder or on another machine.

    Raises:
        typer.Exit: the job has a problem.

    """
    from rlboost.jobs.check import Found, check_job  # noqa: PLC0415 - keeps --help quick
    from rlboost.jobs.user_code_check import MissingHere  # noqa: PLC0415 - likewise

    found = check_job(job)
    if not _is_trained_here(state):
        missing = [problem for problem in found.problems if isinstance(problem, MissingHere)]
        found = Found([problem for problem in found.problems if problem not in missing], [], found.advice)
        for problem in missing:
            typer.echo(f"rlboost: {job_file}: warning: {problem}", err=True)
        _print_searched_folder(job_file, missing)
    print_findings(job_file, found)


def print_findings(job_file: str, found: Found) -> None:
    """Print the findings for a job file.

    Raises:
        typer.Exit: the job has a problem.

    """
    for problem in found.problems:
        typer.echo(f"rlboost: {job_file}: {problem}", err=True)
    for warning in found.warnings:
        typer.echo(f"rlboost: {job_file}: warning: {warning} (matters only if this machine trains the job)", err=True)
    for advice in found.advice:
        typer.echo(f"rlboost: {job_file}: warning: {advice}", err=True)
    _print_searched_folder(job_file, found.problems)
    if found.problems:
        raise typer.Exit(EXIT_CONFIG)


def _print_searched_folder(job_file: str, problems: Sequence[str]) -> None:
    """Say where files and modules are searched, if some are missing and the job file is in another folder."""
    from rlboost.jobs.user_code_check import MissingHere  # noqa: PLC0415 - keeps --help quick

    folder = Path(job_file).parent
    if folder.absolute() != Path.cwd() and any(isinstance(problem, MissingHere) for problem in problems):
        typer.echo(
            f"rlboost: {job_file}: paths and modules are searched from the current folder, {Path.cwd()}, not from "
            f"{folder}: if they are there, run 'cd {folder}' first, and start the system there",
            err=True,
        )


def _is_trained_here(state: Path) -> bool:
    """Return True if the trainer resolves files and modules from this folder."""
    from rlboost.local.state import StateDir  # noqa: PLC0415 - keeps --help quick

    folder, url = StateDir(state), os.environ.get("RLBOOST_URL")
    if not folder.running():
        return not url
    config = folder.config()
    is_meant = not url or (config is not None and config.url == url.rstrip("/"))
    return is_meant and folder.started_in() == Path.cwd()
