"""Commands of jobs: `rlboost run`, `status`, `logs`, `follow`, `ps`, `pause`, `resume`, `cancel`, `profile`."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from datetime import datetime, timedelta
from datetime import time as time_of
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from rlboost.commands.common import (
    DEFAULT_STATE,
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    JobArgument,
    JobFileArgument,
    JsonOption,
    OverridesArgument,
    StateOption,
    command,
    connect,
    output_width,
    print_answer,
    print_json,
    print_table,
)
from rlboost.commands.job_files import NoCheckOption, require_sound
from rlboost.commands.machines import print_workers
from rlboost.shared.errors import ConfigError, RLBoostError
from rlboost.terminal import echo

if TYPE_CHECKING:
    from rlboost.client import Client
    from rlboost.follow import Change
    from rlboost.local.state import StateDir


# --- `rlboost follow`, and the view that it shares with `rlboost run --follow` ----------------------------------------


_READ_TIMEOUT_S = 10.0
"""A manager that does not answer a poll for this time counts as lost."""


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
        echo(begin_line(found))
    follow_job(found["id"], state, from_step=None if from_step is None else from_step - 1, as_json=as_json)


def connect_to_follow(state: Path) -> Client:
    """Return a client for `rlboost.follow.follow`, which retries by itself."""
    return connect(state, retry_for_s=0.0, read_timeout_s=_READ_TIMEOUT_S)


def cost_of(job_id: str, state: Path) -> Mapping[str, Any]:
    """Return what a job has cost; empty if the manager does not answer."""
    return _answer(state, lambda client: client.jobs.cost(job_id))


def fleet_of(state: Path) -> Mapping[str, Any]:
    """Return the document of `GET /v1/fleet`; empty if the manager does not answer."""
    return _answer(state, lambda client: client.fleet())


def _answer(state: Path, ask: Callable[[Client], Mapping[str, Any]]) -> Mapping[str, Any]:
    from rlboost.client import ClientError  # noqa: PLC0415 - keeps --help quick

    try:
        with connect_to_follow(state) as client:
            return ask(client)
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
        echo(f"\n{job_id} is still running\n  follow it again: {again}\n  stop it: {stop}", err=True)
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
        echo(fitted("cost: " + spent.replace("\n", "\n    "), output_width()))
    end = end_line(job, command(f"logs {job['id']}", state))
    if job["state"] != "completed":
        echo(f"rlboost: {end}", err=True)
        raise typer.Exit(EXIT_FAILED)
    if not as_json:
        echo(end)


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
    echo(text, err=all_err or kind in {"warning", "lost", "back"})


# --- `rlboost run`, `status`, `logs`, `pause`, `resume`, `cancel` -----------------------------------------------------


def run(
    job_file: JobFileArgument,
    overrides: OverridesArgument = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Show each step; fail if the job fails.")] = False,
    by: Annotated[
        str | None,
        typer.Option("--by", metavar="TIME", help="Deadline, elastic.finish_by: 18:00, or a date and time."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the resolved job and create nothing.")] = False,
    no_check: NoCheckOption = False,
    state: StateOption = DEFAULT_STATE,
    as_json: JsonOption = False,
) -> None:
    """Create a job unless 'rlboost config check' finds a problem. Ctrl-C stops following, not the job.

    A file or module missing here is only a warning if the system runs on another machine or in another folder.
    """
    from rlboost.jobs import file as jobfile  # noqa: PLC0415 - only this command needs it
    from rlboost.shared.job.base import TRACKERS  # noqa: PLC0415 - likewise
    from rlboost.shared.job.file import load  # noqa: PLC0415 - only this command needs it

    if by is not None:
        overrides = [*(overrides or []), f"elastic.finish_by='{deadline(by, datetime.now().astimezone()).isoformat()}'"]
    raw = load(str(job_file), overrides)
    if not (dry_run or no_check):
        require_sound(str(job_file), raw, state)
    job = jobfile.resolved(str(job_file), raw)
    if dry_run:
        if as_json:
            print_json(job)
        else:
            echo(jobfile.as_yaml(job), nl=False)
        return
    here = [name for tracker in TRACKERS if job["log"][tracker] for name in TRACKERS[tracker].environment]
    if here := [name for name in here if name in os.environ]:
        echo(
            f"rlboost: note: {' and '.join(here)} of this shell do not reach the trainer, which reads the environment "
            "of 'rlboost up' or of its service",
            err=True,
        )
    with connect(state) as client:
        created = client.jobs.create(job)
    shows = command(f"{'status' if follow else 'follow'} {created['id']}", state)
    print_answer(created, f"created {created['id']}: '{shows}' shows its progress", as_json=as_json)
    if follow:
        follow_job(created["id"], state, from_step=0, as_json=as_json)


def deadline(text: str, now: datetime) -> datetime:
    """Return the time that `--by` names, in the local zone unless it names one; `18:00` is the next one.

    Args:
        text: as given.
        now: the local time, whose offset from UTC may be another one at the deadline.

    Raises:
        ConfigError: it is no time, or it is over.

    """
    try:
        given = _date_and_time(text, now.replace(tzinfo=None))
    except ValueError as error:
        raise ConfigError(
            f"--by {text}: write 18:00, or 2026-12-01T18:00 with a zone such as +01:00 if needed"
        ) from error
    given = given if given.tzinfo else given.astimezone()
    if given <= now:
        raise ConfigError(f"--by {text}: it is over: give a later time")
    return given


def _date_and_time(text: str, now: datetime) -> datetime:
    try:
        return datetime.fromisoformat(text)
    except ValueError:
        at = time_of.fromisoformat(text)
    there = now.astimezone(at.tzinfo) if at.tzinfo else now
    given = datetime.combine(there.date(), at)
    return given if given > there else given + timedelta(days=1)


def status(job: JobArgument, state: StateOption = DEFAULT_STATE, as_json: JsonOption = False) -> None:
    """Show a job's state, how long it will take, what it does and waits for, and the metrics of its last step."""
    from rlboost.job_lines import RECENT_STEPS  # noqa: PLC0415 - keeps --help quick

    with connect(state) as client:
        shown = client.jobs.find(job)
        is_running = shown["state"] == "running" and not as_json
        recent = client.jobs.metrics(shown["id"], max(0, shown["step"] - RECENT_STEPS)) if is_running else []
    if as_json:
        print_json(shown)
        return
    fleet = fleet_of(state) if is_running else {}
    print_table(shown["id"], ("", ""), _status_rows(shown, recent, cost_of(shown["id"], state), fleet, time.time()))


def _status_rows(
    job: dict[str, Any],
    recent: list[dict[str, Any]],
    cost: Mapping[str, Any],
    fleet: Mapping[str, Any],
    now: float,
) -> list[tuple[str, str]]:
    from rlboost.job_lines import (  # noqa: PLC0415 - keeps --help quick
        activity_line,
        cost_line,
        mix_text,
        moment,
        remaining,
    )

    rows = [("state", job["state"]), ("step", f"{job['step']} of {job['steps']}" if job["steps"] else str(job["step"]))]
    if left := remaining(job, recent):
        rows.append(("time", left))
    rows += [(name, moment(job[f"{name}_at"], now)) for name in ("created", "started", "finished") if job[f"{name}_at"]]
    rows += [("cost", spent)] if (spent := cost_line(cost)) else []
    rows += [("fleet", why)] if fleet and (why := mix_text(fleet["autoscaling"])) else []
    if job.get("finishes_at"):
        rows.append(("deadline", f"cannot be met: with all workers within the limits it ends at {job['finishes_at']}"))
    rows += [("error", job["error"])] if job["error"] else []
    rows += [("now", doing)] if (doing := activity_line(job, now)) else []
    rows += [("warning", text) for text in job.get("warnings", ())]
    if job["latest"]:
        rows += [("", ""), (f"step {job['step']}", "")]
    return rows + [(f"  {name}", f"{value:.4g}") for name, value in sorted((job["latest"] or {}).items())]


def logs(
    job: JobArgument,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Continue until the job ends.")] = False,
    state: StateOption = DEFAULT_STATE,
    as_json: JsonOption = False,
) -> None:
    """Print a job's events, and what all processes log about it, on every machine."""
    with connect(state) as client:
        for line in client.jobs.logs(client.jobs.find(job)["id"], follow=follow):
            print_answer({"line": line}, line, as_json=as_json)


def pause(job: JobArgument, state: StateOption = DEFAULT_STATE, as_json: JsonOption = False) -> None:
    """Pause a job until it is resumed."""
    _act("pause", job, state, "pauses", "paused", as_json=as_json)


def resume(job: JobArgument, state: StateOption = DEFAULT_STATE, as_json: JsonOption = False) -> None:
    """Resume a paused job."""
    _act("resume", job, state, "resumes", "running", as_json=as_json)


def cancel(job: JobArgument, state: StateOption = DEFAULT_STATE, as_json: JsonOption = False) -> None:
    """Cancel a job."""
    _act("cancel", job, state, "is being cancelled", "cancelled", as_json=as_json)


def profile(
    job: JobArgument,
    steps: Annotated[int, typer.Option(min=1, max=10, help="Number of steps.")] = 1,
    state: StateOption = DEFAULT_STATE,
    as_json: JsonOption = False,
) -> None:
    """Have a job's trainer record traces of its next steps with torch.profiler, one file for each rank.

    They are Chrome traces in the job's folder profile/, on the trainer's machine, for https://ui.perfetto.dev. The
    event profile_written says when they are there. Steps take longer while they are recorded.
    """
    with connect(state) as client:
        found = client.jobs.find(job)
        answer = client.jobs.profile(found["id"], steps)
    logs = command(f"logs {found['id']}", state)
    text = f"{found['id']} will record its next {steps} step{'s' * (steps > 1)}: '{logs}' shows where"
    print_answer(answer, text, as_json=as_json)


def _act(
    action: Literal["pause", "resume", "cancel"], job: str, state: Path, effect: str, goal: str, *, as_json: bool
) -> None:
    """Request an action on a job, and print its effect, or that the job stays in the goal state.

    It stays so, also if the opposite action was requested and has not been carried out.
    """
    with connect(state) as client:
        found = client.jobs.find(job)
        answer = getattr(client.jobs, action)(found["id"])
    result = f"is {goal} and stays so" if found["state"] == goal else effect
    print_answer(answer, f"{found['id']} {result}", as_json=as_json)


# --- `rlboost ps`: local processes, jobs and workers ------------------------------------------------------------------


_RETRY_FOR_S = 10.0
"""Covers a restart of the manager."""


def ps(state: StateOption = DEFAULT_STATE, as_json: JsonOption = False) -> None:
    """List local processes, jobs and workers.

    If the manager is unavailable, it lists the processes and exits non-zero.
    """
    from rlboost.local.state import StateDir  # noqa: PLC0415 - keeps --help quick

    folder = StateDir(state)
    if not as_json and (shown := _processes(folder)):
        _print_processes(shown)
    try:
        with connect(state, retry_for_s=_RETRY_FOR_S) as client:
            jobs, workers = client.jobs.list(), client.workers.list()
    except RLBoostError:
        if as_json and (shown := _processes(folder)):
            print_json({"processes": shown, "jobs": [], "workers": []})
        raise
    if as_json:
        print_json({"processes": _processes(folder), "jobs": jobs, "workers": workers})
        return
    _print_jobs(jobs)
    print_workers(workers)


def _processes(folder: StateDir) -> list[dict[str, Any]]:
    return [asdict(record) for record in folder.processes()] if folder.running() else []


def _print_processes(processes: list[dict[str, Any]]) -> None:
    rows = [
        (p["name"], p["role"], p["gpus"], p["pid"] if p["alive"] else "-", p["started_at"], p["restarts"], p["note"])
        for p in processes
    ]
    print_table("processes", ("name", "role", "gpus", "pid", "started", "restarts", "note"), rows)


def _print_jobs(jobs: list[dict[str, Any]]) -> None:
    rows = [
        (
            job["id"],
            job["state"],
            f"{job['step']}/{job['steps'] or '-'}",
            job["created_at"],
            (job["error"] or _activity(job)).partition("\n")[0],
        )
        for job in jobs
    ]
    print_table("jobs", ("id", "state", "step", "created", "note"), rows)


def _activity(job: dict[str, Any]) -> str:
    from rlboost.job_lines import phase_name  # noqa: PLC0415 - keeps --help quick

    if job.get("waiting"):
        return f"waiting for {job['waiting']['for']}"
    return phase_name(job["phase"]) if job.get("phase") else ""


# --- Registration -----------------------------------------------------------------------------------------------------


def register(app: typer.Typer) -> None:
    """Add the commands."""
    for verb in (run, status, logs, follow, ps, pause, resume, cancel, profile):
        app.command()(verb)
