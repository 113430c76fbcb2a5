"""`rlboost ps`: local processes, jobs and workers at one look."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import typer

from rlboost.commands.common import DEFAULT_STATE, JsonOption, StateOption, connect, print_json, print_table
from rlboost.commands.worker import print_workers
from shared.errors import RLBoostError


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(ps)


def ps(state: StateOption = DEFAULT_STATE, as_json: JsonOption = False) -> None:
    """List local processes, jobs and workers.

    The processes are listed also while the manager is away, for then one wants to see them most.
    """
    from rlboost.client import ClientError  # noqa: PLC0415 - keeps --help quick
    from rlboost.local.state import StateDir  # noqa: PLC0415 - likewise

    folder = StateDir(state)
    processes = [asdict(record) for record in folder.processes()] if folder.running() else []
    jobs: list[dict[str, Any]] = []
    workers: list[dict[str, Any]] = []
    try:
        with connect(state, patience_s=0.0) as client:
            jobs, workers = client.jobs.list(), client.workers.list()
    except RLBoostError as error:
        answered = isinstance(error, ClientError) and error.status is not None
        if answered or not processes:
            raise
        typer.echo(f"rlboost: jobs and workers are not listed: {error}", err=True)
    if as_json:
        print_json({"processes": processes, "jobs": jobs, "workers": workers})
        return
    _print_processes(processes)
    _print_jobs(jobs)
    print_workers(workers)


def _print_processes(processes: list[dict[str, Any]]) -> None:
    rows = [
        (p["name"], p["role"], p["pid"] if p["alive"] else "-", p["started_at"], p["restarts"], p["note"])
        for p in processes
    ]
    print_table("processes", ("name", "role", "pid", "started", "restarts", "note"), rows)


def _print_jobs(jobs: list[dict[str, Any]]) -> None:
    rows = [
        (job["id"], job["state"], f"{job['step']}/{job['steps']}", job["created_at"], job["error"] or "")
        for job in jobs
    ]
    print_table("jobs", ("id", "state", "step", "created", "error"), rows)
