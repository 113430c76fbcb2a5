"""Check a job before it is submitted, and print the findings."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rlboost.commands.common import EXIT_CONFIG

if TYPE_CHECKING:
    from rlboost.jobs.check import Found
    from rlboost.local.layout import DeviceSummary

_SLOW_S = 1.0
"""A part of the check that takes longer is shown."""

NoCheckOption = Annotated[
    bool, typer.Option("--no-check", help="Check the job file's fields only, not the files and functions it names.")
]


def require_sound(job_file: str, job: dict[str, Any], state: Path) -> None:
    """Print a job's problems and refuse to submit it if there are any.

    A file or module missing here is only a warning if the trainer runs in another folder or on another machine.

    Raises:
        typer.Exit: the job has a problem.

    """
    from rlboost.jobs.check import check_job  # noqa: PLC0415 - keeps --help quick
    from rlboost.jobs.user_code_check import MissingHere  # noqa: PLC0415 - likewise

    with progress() as on_part:
        found = check_job(job, on_part, _devices(state))
    if not _is_trained_here(state):
        missing = [problem for problem in found.problems if isinstance(problem, MissingHere)]
        found = found._replace(problems=[one for one in found.problems if one not in missing], warnings=[])
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
    for notice in found.notices:
        typer.echo(f"rlboost: {job_file}: note: {notice}", err=True)
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
        example = ""
        if not folder.is_absolute() and ".." not in folder.parts:
            example = f", such as {folder}/train.jsonl and {'.'.join(folder.parts)}.reward:score"
        typer.echo(
            f"rlboost: {job_file}: names are relative to the folder in which the trainer runs, and are searched from "
            f"the current folder, {Path.cwd()}, not from {folder}: name them from here{example}; or run "
            f"'cd {folder}' first, where the system was started in that folder",
            err=True,
        )


@contextmanager
def progress() -> Iterator[Callable[[str], None]]:
    """Yield a function that announces the next part of the check; a slow part is shown on a terminal."""
    timer: threading.Timer | None = None

    def on_part(text: str) -> None:
        nonlocal timer
        if timer is not None:
            timer.cancel()
        if sys.stderr.isatty():
            timer = threading.Timer(_SLOW_S, typer.echo, [f"checking the job: {text} ..."], {"err": True})
            timer.daemon = True
            timer.start()

    try:
        yield on_part
    finally:
        if timer is not None:
            timer.cancel()


def _devices(state: Path) -> DeviceSummary | None:
    """Return the GPUs of the local system if the job is for it, None if it has none or they are unknown."""
    from rlboost.local.state import StateDir  # noqa: PLC0415 - keeps --help quick

    return StateDir(state).devices() if _is_local(state) else None


def _is_trained_here(state: Path) -> bool:
    """Return True if the trainer resolves files and modules from this folder."""
    from rlboost.local.state import StateDir  # noqa: PLC0415 - keeps --help quick

    folder = StateDir(state)
    if not folder.running():
        return not os.environ.get("RLBOOST_URL")
    return _is_local(state) and folder.started_in() == Path.cwd()


def _is_local(state: Path) -> bool:
    """Return True if commands address the running system of this folder."""
    from rlboost.local.state import StateDir  # noqa: PLC0415 - keeps --help quick

    folder, url = StateDir(state), os.environ.get("RLBOOST_URL")
    config = folder.config() if folder.running() else None
    return config is not None and (not url or config.url == url.rstrip("/"))
