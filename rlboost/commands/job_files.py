"""Commands of job files: `rlboost config`, `rlboost init`, and the check before a job is submitted."""

from __future__ import annotations

import os
import shlex
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rlboost.commands.common import (
    DEFAULT_STATE,
    EXIT_CONFIG,
    JobFileArgument,
    JsonOption,
    OverridesArgument,
    new_app,
    print_json,
)
from rlboost.terminal import echo

if TYPE_CHECKING:
    from rlboost.jobs.check import Found
    from rlboost.local.layout import DeviceSummary


# --- Check a job before it is submitted, and print the findings -------------------------------------------------------


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
    from rlboost.jobs.model_check import MissingHere  # noqa: PLC0415 - likewise

    with progress() as on_part:
        found = check_job(job, on_part, _devices(state))
    if not _is_trained_here(state):
        missing = [problem for problem in found.problems if isinstance(problem, MissingHere)]
        found = found._replace(problems=[one for one in found.problems if one not in missing], warnings=[])
        for problem in missing:
            echo(f"rlboost: {job_file}: warning: {problem}", err=True)
        _print_searched_folder(job_file, missing)
    print_findings(job_file, found)


def print_findings(job_file: str, found: Found) -> None:
    """Print the findings for a job file.

    Raises:
        typer.Exit: the job has a problem.

    """
    for problem in found.problems:
        echo(f"rlboost: {job_file}: {problem}", err=True)
    for notice in found.notices:
        echo(f"rlboost: {job_file}: note: {notice}", err=True)
    for warning in found.warnings:
        echo(f"rlboost: {job_file}: warning: {warning} (matters only if this machine trains the job)", err=True)
    for advice in found.advice:
        echo(f"rlboost: {job_file}: warning: {advice}", err=True)
    _print_searched_folder(job_file, found.problems)
    if found.problems:
        raise typer.Exit(EXIT_CONFIG)


def _print_searched_folder(job_file: str, problems: Sequence[str]) -> None:
    """Say where files and modules are searched, if some are missing and the job file is in another folder."""
    from rlboost.jobs.model_check import MissingHere  # noqa: PLC0415 - keeps --help quick

    folder = Path(job_file).parent
    if folder.absolute() != Path.cwd() and any(isinstance(problem, MissingHere) for problem in problems):
        example = ""
        if not folder.is_absolute() and ".." not in folder.parts:
            example = f", such as {folder}/train.jsonl and {'.'.join(folder.parts)}.reward:score"
        echo(
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
            timer = threading.Timer(_SLOW_S, echo, [f"checking the job: {text} ..."], {"err": True})
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


# --- `rlboost config check` -------------------------------------------------------------------------------------------


config_app = new_app("Job files.")


@config_app.callback()
def _group() -> None:
    """Keep `check` a subcommand although it is the only one."""


@config_app.command()
def check(
    job_file: JobFileArgument,
    overrides: OverridesArgument = None,
    cluster: Annotated[
        Path | None, typer.Option(help="File of 'rlboost up': also check that the job fits on this machine's GPUs.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Check a job file: its fields, the model and data, and the functions it names.

    The functions are the reward, environment, loss and curriculum. Missing libraries that training needs are warnings.
    Prints the first prompt with its special tokens, and for kinds sft, dpo and reward what follows it.
    """
    from rlboost.jobs import check as jobcheck  # noqa: PLC0415 - only this command needs it

    devices = _config_devices(cluster) if cluster else None
    with progress() as on_part:
        found = jobcheck.check(job_file, overrides or [], on_part, devices)
    if as_json:
        print_json({"ok": not found.problems, **found._asdict()})
    print_findings(str(job_file), found)
    if not as_json:
        if found.example:
            echo(found.example)
        echo(f"{job_file}: no problem found")


def _config_devices(cluster: Path) -> DeviceSummary | None:
    from rlboost.local import spec_file  # noqa: PLC0415 - only this command needs it
    from rlboost.local.spec_file import local_options  # noqa: PLC0415 - likewise

    return local_options(spec_file.load(spec_file.SystemSpec, cluster, {}), DEFAULT_STATE).layout.summary()


# --- `rlboost init`: a job folder that runs ---------------------------------------------------------------------------


def init(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="New, or empty.")] = Path(),
    model: Annotated[
        str | None, typer.Option("--model", help="Hugging Face id or folder; a model of 0.2 M parameters if not given.")
    ] = None,
    recipe: Annotated[
        str | None, typer.Option("--recipe", help="A recipe, such as gsm8k or tools; sums of two numbers if not given.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Make a job folder to start from: by default data, a reward, a warm-up and an RL job, on sums of two numbers.

    A recipe is a folder of the page Recipes; its README.md says what it trains and how to make its data.
    """
    from rlboost.jobs import new_folder  # noqa: PLC0415 - only this command needs it

    created = new_folder.make(folder, model, recipe)
    if as_json:
        print_json({"folder": str(folder.absolute()), "made": created})
        return
    echo(f"created {', '.join(created)} in {folder.absolute()}\nnext:")
    if folder != Path():
        echo(f"  cd {shlex.quote(str(folder))}")
    if "prepare.py" in created:
        echo("  python prepare.py  # writes the data")
    elif recipe is not None:
        echo("  cat README.md  # its data, and what to watch")
    echo(f"  {new_folder.start_command(folder)}\n  rlboost run job.yaml --follow")


# --- Registration -----------------------------------------------------------------------------------------------------


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command()(init)
    app.add_typer(config_app, name="config")
