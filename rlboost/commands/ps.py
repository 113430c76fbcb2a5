"""`rlboost ps`: local processes, jobs and workers."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import typer

from rlboost.commands.common import DEFAULT_STATE, JsonOption, StateOption, connect, print_json, print_table
from rlboost.commands.worker import print_workers
from rlboost.shared.errors import RLBoostError

if TYPE_CHECKING:
    from rlboost.local.state import StateDir

_RETRY_FOR_S = 10.0
"""Covers a restart of the manager."""


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(ps)


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
            f"{job['step']}/{job['steps']}",
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
