"""`rlboost follow`, and the view that it shares with `rlboost run --follow`."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rlboost.commands.common import (
    DEFAULT_STATE,
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    JobArgument,
    JsonOption,
    StateOption,
    command,
    connect,
    output_width,
    print_json,
)
from rlboost.shared.errors import ConfigError

if TYPE_CHECKING:
    from rlboost.client import Client
    from rlboost.follow import Change

_READ_TIMEOUT_S = 10.0
"""A manager that does not answer a poll for this time counts as lost."""


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(follow)


def follow(
    job: JobArgument,
    from_step: Annotated[
        int | None,
        typer.Option(
            "--from-step", min=1, help="First step to show, from 1 as in the output; the last few if not given."
        ),
    ] = None,
    state: StateOption = DEFAULT_STATE,
    as_json: JsonOption = False,
) -> None:
    """Show a job's steps as they finish, what it does and waits for, and its warnings, until it ends.

    It fails if the job fails. Also shows the steps and the result of a job that has ended. Ctrl-C stops following, not
    the job. While the manager does not answer, for example between 'rlboost down' and 'up', it tries again for 10
    minutes.
    """
    from rlboost.job_lines import begin_line  # noqa: PLC0415 - keeps --help quick

    with connect(state) as client:
        found = client.jobs.find(job)
    if not as_json:
        typer.echo(begin_line(found))
    follow_job(found["id"], state, from_step=None if from_step is None else from_step - 1, as_json=as_json)


def connect_to_follow(state: Path) -> Client:
    """Return a client for `rlboost.follow.follow`, which retries by itself."""
    return connect(state, retry_for_s=0.0, read_timeout_s=_READ_TIMEOUT_S)


def cost_of(job_id: str, state: Path) -> Mapping[str, Any]:
    """Return what a job has cost; empty if the manager does not answer, or the job is quarantined."""
    from rlboost.client import ClientError  # noqa: PLC0415 - keeps --help quick

    try:
        with connect_to_follow(state) as client:
            return client.jobs.cost(job_id)
    except (ClientError, ConfigError):
        return {}


def follow_job(job_id: str, state: Path, *, from_step: int | None, as_json: bool) -> None:
    """Print a job's changes until it ends; `from_step` counts from 0, None shows the last few.

    Raises:
        typer.Exit: the job did not complete, the connection was lost for good, or Ctrl-C.

    """
    from rlboost.client import ClientError  # noqa: PLC0415 - keeps --help quick
    from rlboost.follow import follow as changes_of  # noqa: PLC0415 - likewise

    job: Mapping[str, Any] = {}
    again = command(f"follow {job_id}", state)
    try:
        for kind, news in changes_of(lambda: connect_to_follow(state), job_id, from_step=from_step):
            if kind == "job":
                job = news
            elif as_json:
                print_json({kind: news})
            else:
                print_change(job_id, job.get("steps", 0), (kind, news))
    except KeyboardInterrupt:
        stop = command(f"cancel {job_id}", state)
        typer.echo(f"\n{job_id} is still running\n  follow it again: {again}\n  stop it: {stop}", err=True)
        raise typer.Exit(EXIT_INTERRUPTED) from None
    except ClientError as error:
        raise ClientError(error.title, f"{error.detail}; '{again}' follows the job again", error.status) from error
    _print_end(job, state, as_json=as_json)


def _print_end(job: Mapping[str, Any], state: Path, *, as_json: bool) -> None:
    from rlboost.job_lines import cost_line, end_line, fitted  # noqa: PLC0415 - keeps --help quick

    cost = cost_of(job["id"], state)
    if as_json:
        if cost:
            print_json({"cost": cost})
        print_json({"job": job})
    elif spent := cost_line(cost):
        typer.echo(fitted("cost: " + spent.replace("\n", "\n    "), output_width()))
    end = end_line(job, command(f"logs {job['id']}", state))
    if job["state"] != "completed":
        typer.echo(f"rlboost: {end}", err=True)
        raise typer.Exit(EXIT_FAILED)
    if not as_json:
        typer.echo(end)


def print_change(job_id: str, steps: int, change: Change, *, all_err: bool = False) -> None:
    """Print a change other than `job`: warnings and outages to standard error, the rest only if `all_err`."""
    from rlboost.job_lines import (  # noqa: PLC0415 - keeps --help quick
        back_line,
        fitted,
        lost_line,
        phase_line,
        step_line,
        wait_line,
        warning_lines,
    )

    kind, news = change
    width = output_width()
    match kind:
        case "step":
            text = step_line(news, steps, width)
        case "wait":
            text = fitted(wait_line(news, time.time()), width)
        case "phase":
            text = fitted(phase_line(news, time.time()), width)
        case "state":
            text = f"{job_id} is {news}"
        case "warning":
            text = fitted(warning_lines(job_id, news), width)
        case "lost":
            text = fitted(f"rlboost: {lost_line(news)}", width)
        case "back":
            text = f"rlboost: {back_line(news)}"
        case _:
            raise AssertionError(kind)
    typer.echo(text, err=all_err or kind in {"warning", "lost", "back"})
