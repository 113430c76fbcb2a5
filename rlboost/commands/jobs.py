"""`rlboost run`, `status`, `logs`, `pause`, `resume`, `cancel`."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from rlboost.commands.checking import NoCheckOption, require_sound
from rlboost.commands.common import (
    DEFAULT_STATE,
    JobArgument,
    JobFileArgument,
    JsonOption,
    OverridesArgument,
    StateOption,
    command,
    connect,
    print_json,
    print_table,
)
from rlboost.commands.follow import cost_of, follow_job


def register(app: typer.Typer) -> None:
    """Add the commands."""
    for verb in (run, status, logs, pause, resume, cancel):
        app.command()(verb)


def run(
    job_file: JobFileArgument,
    overrides: OverridesArgument = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Show each step; fail if the job fails.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the resolved job and create nothing.")] = False,
    no_check: NoCheckOption = False,
    state: StateOption = DEFAULT_STATE,
    as_json: JsonOption = False,
) -> None:
    """Create a job unless 'rlboost config check' finds a problem. Ctrl-C stops following, not the job.

    A file or module missing here is only a warning if the system runs on another machine or in another folder.
    """
    from rlboost.jobs import file as jobfile  # noqa: PLC0415 - only this command needs it
    from rlboost.shared.job.file import load  # noqa: PLC0415 - only this command needs it

    raw = load(str(job_file), overrides)
    if not (dry_run or no_check):
        require_sound(str(job_file), raw, state)
    job = jobfile.resolved(str(job_file), raw)
    if dry_run:
        if as_json:
            print_json(job)
        else:
            typer.echo(jobfile.as_yaml(job), nl=False)
        return
    with connect(state) as client:
        created = client.jobs.create(job)
    if as_json:
        print_json(created)
    else:
        shows = command(f"{'status' if follow else 'follow'} {created['id']}", state)
        typer.echo(f"created {created['id']}: '{shows}' shows its progress")
    if follow:
        follow_job(created["id"], state, from_step=0, as_json=as_json)


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
    print_table(shown["id"], ("", ""), _status_rows(shown, recent, cost_of(shown["id"], state), time.time()))


def _status_rows(
    job: dict[str, Any], recent: list[dict[str, Any]], cost: Mapping[str, Any], now: float
) -> list[tuple[str, str]]:
    from rlboost.job_lines import activity_line, cost_line, moment, remaining  # noqa: PLC0415 - keeps --help quick

    rows = [("state", job["state"]), ("step", f"{job['step']} of {job['steps']}")]
    if left := remaining(job, recent):
        rows.append(("time", left))
    rows += [(name, moment(job[f"{name}_at"], now)) for name in ("created", "started", "finished") if job[f"{name}_at"]]
    rows += [("cost", spent)] if (spent := cost_line(cost)) else []
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
            if as_json:
                print_json({"line": line})
            else:
                typer.echo(line)


def pause(job: JobArgument, state: StateOption = DEFAULT_STATE, as_json: JsonOption = False) -> None:
    """Pause a job until it is resumed."""
    _act("pause", job, state, "pauses", "paused", as_json=as_json)


def resume(job: JobArgument, state: StateOption = DEFAULT_STATE, as_json: JsonOption = False) -> None:
    """Resume a paused job."""
    _act("resume", job, state, "resumes", "running", as_json=as_json)


def cancel(job: JobArgument, state: StateOption = DEFAULT_STATE, as_json: JsonOption = False) -> None:
    """Cancel a job."""
    _act("cancel", job, state, "is being cancelled", "cancelled", as_json=as_json)


def _act(
    action: Literal["pause", "resume", "cancel"], job: str, state: Path, effect: str, goal: str, *, as_json: bool
) -> None:
    """Request an action on a job, and print its effect, or that the job is in the goal state already."""
    with connect(state) as client:
        found = client.jobs.find(job)
        answer = getattr(client.jobs, action)(found["id"])
    if as_json:
        print_json(answer)
    else:
        typer.echo(f"{found['id']} is already {goal}" if found["state"] == goal else f"{found['id']} {effect}")
