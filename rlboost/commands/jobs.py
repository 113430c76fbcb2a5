"""`rlboost run`, `status`, `logs`, `pause`, `resume`, `cancel`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from rlboost.commands.checking import NoCheckOption, require_sound
from rlboost.commands.common import (
    DEFAULT_STATE,
    EXIT_FAILED,
    JobArgument,
    JsonOption,
    StateOption,
    connect,
    print_json,
    print_table,
)

_FOLLOW_PATIENCE_S = 120.0
"""Following a job survives a restart of the manager."""


def register(app: typer.Typer) -> None:
    """Add the commands."""
    for command in (run, status, logs, pause, resume, cancel):
        app.command()(command)


def run(
    job_file: Annotated[Path, typer.Argument(metavar="JOB.yaml", help="The job file: YAML, TOML or JSON.")],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[a.b=v ...]", help="Values that win.")] = None,
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
    from rlboost.shared.job import spec as job_spec  # noqa: PLC0415 - only this command needs it

    raw = job_spec.load(str(job_file), overrides)
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
        typer.echo(f"created {created['id']}: 'rlboost status {created['id']}' shows how it stands")
    if follow:
        _follow(created["id"], state, as_json=as_json)


def _follow(job_id: str, state: Path, *, as_json: bool) -> None:
    from rlboost.follow import follow, step_line, wait_line, warning_line  # noqa: PLC0415 - keeps --help quick

    job: Mapping[str, Any] = {}
    with connect(state, patience_s=_FOLLOW_PATIENCE_S) as client:
        for kind, news in follow(client, job_id):
            if kind == "job":
                job = news
            elif as_json:
                print_json({kind: news})
            elif kind == "warning":
                typer.echo(warning_line(job_id, news), err=True)
            else:
                typer.echo(step_line(news, job.get("steps", 0)) if kind == "step" else wait_line(news))
    if as_json:
        print_json({"job": job})
    if job["state"] != "completed":
        typer.echo(f"rlboost: {job_id} {job['state']}: {job['error'] or 'see its logs'}", err=True)
        raise typer.Exit(EXIT_FAILED)
    if not as_json:
        typer.echo(f"{job_id} completed: {job['step']} steps")


def status(job: JobArgument, state: StateOption = DEFAULT_STATE, as_json: JsonOption = False) -> None:
    """Show a job's state and what it waits for."""
    from rlboost.follow import wait_line  # noqa: PLC0415 - keeps --help quick

    with connect(state) as client:
        shown = client.jobs.show(job)
    if as_json:
        print_json(shown)
        return
    rows = [(key, shown[key]) for key in ("state", "created_at", "started_at", "finished_at", "error") if shown[key]]
    rows.insert(1, ("step", f"{shown['step']} of {shown['steps']}"))
    if shown["waiting"]:
        rows.append(("waiting", wait_line(shown["waiting"])))
    rows += [("warning", text) for text in shown.get("warnings", ())]
    rows += [(name, f"{value:.4g}") for name, value in sorted((shown["latest"] or {}).items())]
    print_table(shown["id"], ("", ""), rows)


def logs(
    job: JobArgument,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Wait for more.")] = False,
    state: StateOption = DEFAULT_STATE,
    as_json: JsonOption = False,
) -> None:
    """Print a job's log."""
    with connect(state) as client:
        for line in client.jobs.logs(job, follow=follow):
            if as_json:
                print_json({"line": line})
            else:
                typer.echo(line)


def pause(job: JobArgument, state: StateOption = DEFAULT_STATE, as_json: JsonOption = False) -> None:
    """Pause a job until it is resumed."""
    with connect(state) as client:
        _print_result(client.jobs.pause(job), "pauses", as_json=as_json)


def resume(job: JobArgument, state: StateOption = DEFAULT_STATE, as_json: JsonOption = False) -> None:
    """Resume a paused job."""
    with connect(state) as client:
        _print_result(client.jobs.resume(job), "resumes", as_json=as_json)


def cancel(job: JobArgument, state: StateOption = DEFAULT_STATE, as_json: JsonOption = False) -> None:
    """Cancel a job."""
    with connect(state) as client:
        _print_result(client.jobs.cancel(job), "is being cancelled", as_json=as_json)


def _print_result(answer: dict[str, Any], what: str, *, as_json: bool) -> None:
    if as_json:
        print_json(answer)
    else:
        typer.echo(f"{answer['id']} {what}")
