"""The report of a recorded demo: its job's page, and above it what the demo checked and used."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any

from rlboost.report.answers import clock
from rlboost.report.checks import checks
from rlboost.report.page import Report, Table, job_answers
from rlboost.report.record import Change, JobEvent, Record
from rlboost.shared.ids import worker_name

_NO_JOB = {"id": "none", "name": "no job", "state": "pending", "step": 0, "waiting": None, "warnings": [], "latest": {}}
_APPLIED = {"kill": "worker_killed", "join": "worker_started"}


def report_of(record: Record) -> Report:
    """Return the report; a run that ended early has one too."""
    times = {"started_at": None, "finished_at": None, "error": None, "steps": record.settings.steps}
    job = {**_NO_JOB, **times, **record.job}
    parts: dict[str, Any] = {"metrics": record.steps, "audit": record.audit or None}
    seen = [event.at for event in record.job_events] + [look.at for look in record.observations]
    return Report(
        at=record.job_ended_at or max(seen, default=record.began_at),
        job=job["id"],
        text=_text(record),
        answers=job_answers(job, cost=record.cost, spec=record.spec, **parts),
        events=[event.model_dump() for event in _events(record)],
        samples=record.samples,
        tables=[table for table in _tables(record) if table.rows],
    )


def _text(record: Record) -> str:
    settings = record.settings
    held = all(check.held for check in checks(record))
    preempted = record.applied("kill") + record.applied("notice")
    return (
        f"{'Every guarantee held' if held else 'Some guarantees were violated'}. "
        f"{settings.steps} steps of GRPO on {settings.reserved} reserved and {settings.workers} preemptible workers, "
        f"with {preempted} preemptions ({record.applied('kill')} by SIGKILL without notice) and "
        f"{record.applied('join')} joins. {clock(record.began_at)}, {record.machine.cores} cores."
    )


def _events(record: Record) -> list[JobEvent]:
    """Return the job's events and, as further ones, when workers were started and killed."""
    ids = {
        worker_name(event.fields["worker"]): event.fields["worker"]
        for event in record.job_events
        if "worker" in event.fields
    }
    ids |= {worker_name(one.id): one.id for look in record.observations for one in look.workers}
    applied = [_applied(change, ids) for change in record.changes if change.action in _APPLIED]
    return sorted(chain(record.job_events, applied), key=lambda event: event.at)


def _applied(change: Change, ids: Mapping[str, str]) -> JobEvent:
    worker = ids.get(change.worker, f"{change.worker}-")
    return JobEvent(at=change.at, kind=_APPLIED[change.action], source="demo", fields={"worker": worker})


def _tables(record: Record) -> Iterator[Table]:
    marks = {True: "✓ held", False: "✗ violated"}
    yield Table("Guarantees", [[marks[check.held], check.guarantee, check.detail] for check in checks(record)])
    total = sum(record.cpu_s.values())
    rows = [[kind, f"{seconds:.1f} s", f"{seconds / total:.0%}"] for kind, seconds in record.cpu_s.items()]
    if rows:
        rows += [["all", f"{total:.1f} s", ""], ["of it, before the job", f"{record.cpu_to_start_s:.1f} s", ""]]
    yield Table("Processor time", rows, "appendix")
    settings, machine = record.settings, record.machine
    rows = [
        ["workers at the start", f"{settings.reserved} reserved, {settings.workers} preemptible"],
        ["seed", str(settings.seed)],
        ["cores", str(machine.cores)],
        ["load before the start", f"{machine.load:.1f}"],
        ["system", f"{machine.platform}, Python {machine.python}"],
    ]
    yield Table("This run", rows, "appendix")
