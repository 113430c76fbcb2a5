"""The fleet's history, computed from a record: worker states over time, and migrations."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, Literal

from rlboost.report.record import JobEvent, Record
from rlboost.shared.ids import worker_name

State = Literal["joining", "pulling", "ready", "suspended", "draining", "silent"]
"""The manager's states. `silent`: dead, but not detected by the manager yet."""

_GONE = ("worker_lost", "worker_left")


@dataclass(frozen=True)
class Span:
    """A worker in one state."""

    began_at: float
    ended_at: float
    state: State


@dataclass
class Row:
    """One worker process."""

    name: str
    role: str
    spans: list[Span] = field(default_factory=list)
    joined_at: float | None = None
    """Time of its scheduled join; None for initial workers."""
    killed_at: float | None = None
    noticed_at: float | None = None


@dataclass(frozen=True)
class Migration:
    """Samples that resumed on another worker."""

    at: float
    source: str
    """Process names."""
    target: str
    samples: int
    tokens: int
    """Tokens generated before the migration."""
    cause: str
    """Cause: `lost`, `left` or `suspended`."""


def rows(record: Record) -> list[Row]:
    """Return one row per worker: reserved ones first, then by time of joining."""
    found: dict[str, Row] = {}
    changes = sorted(_state_changes(record), key=lambda change: change[0])
    end = record.job_ended_at or max((change[0] for change in changes), default=record.began_at)
    for at, name, role, state in changes:
        row = found.setdefault(name, Row(name, role))
        _close(row, at)
        if state != "gone":
            row.spans.append(Span(at, end, state))
    for change in record.changes:
        row = found.setdefault(change.worker, Row(change.worker, "preemptible"))
        match change.action:
            case "join":
                row.joined_at = change.at
            case "notice":
                row.noticed_at = change.at
            case "kill":
                row.killed_at = change.at
                _silence(row, change.at)
    for row in found.values():
        row.spans = [span for span in row.spans if span.ended_at > span.began_at]
        if row.joined_at is not None and (not row.spans or row.spans[0].began_at > row.joined_at):
            known_at = row.spans[0].began_at if row.spans else end
            row.spans.insert(0, Span(row.joined_at, known_at, "joining"))  # process start
    return sorted(found.values(), key=lambda row: (row.role != "reserved", row.joined_at or 0.0, row.name))


def migrations(record: Record) -> list[Migration]:
    """Return all migrations, ordered by time.

    Samples unassigned from one worker at once and resumed by one other worker in several batches are one migration,
    dated at its start. Events name the source and the destination but not the samples: they are matched in order within
    a step, as no sample outlives its step.
    """
    step_begins = _step_begins(record)
    unassigned: deque[_Unassigned] = deque()
    found: dict[tuple[_Unassigned, str], Migration] = {}
    for event in record.job_events:
        step = bisect_right(step_begins, event.at)
        if event.kind == "samples_unassigned":
            fields = event.fields
            unassigned.append(_Unassigned(step, worker_name(fields["worker"]), fields["cause"], fields["samples"]))
        elif event.kind == "samples_migrated":
            while unassigned and unassigned[0].step < step:
                unassigned.popleft()
            for source, move in _match(event, unassigned):
                before = found.get((source, move.target))
                found[source, move.target] = _joined(before, move) if before else move
    return sorted(found.values(), key=lambda move: move.at)


@dataclass(eq=False)
class _Unassigned:
    """Samples unassigned from one worker at once."""

    step: int
    source: str
    cause: str
    left: int
    """Samples not resumed yet."""


def _step_begins(record: Record) -> list[float]:
    """Return the time when each step after the first was first seen."""
    pairs = pairwise(record.observations)
    return [after.at for before, after in pairs if after.step > before.step]


def _joined(first: Migration, more: Migration) -> Migration:
    return replace(first, samples=first.samples + more.samples, tokens=first.tokens + more.tokens)


def _match(event: JobEvent, unassigned: deque[_Unassigned]) -> Iterator[tuple[_Unassigned, Migration]]:
    target, left = worker_name(event.fields["worker"]), event.fields["samples"]
    tokens_each = event.fields["tokens"] / max(1, left)
    while left and unassigned:
        source = unassigned[0]
        n = min(left, source.left)
        left -= n
        source.left -= n
        if not source.left:
            unassigned.popleft()
        yield source, Migration(event.at, source.source, target, n, round(n * tokens_each), source.cause)


def _state_changes(record: Record) -> Iterator[tuple[float, str, str, Any]]:
    """Yield (at, process, role, state or "gone"), unsorted.

    Events exist only while a job runs, so earlier states are taken from the first observation.
    """
    known: set[str] = set()
    roles: dict[str, str] = {}
    first: dict[str, State] = {}
    for event in record.job_events:
        worker = event.fields.get("worker", "")
        name = worker_name(worker)
        match event.kind:
            case "worker_joined":
                known.add(worker)
                roles[name] = event.fields["role"]
                yield event.at, name, roles[name], "joining"
            case "worker_state":
                roles[name] = event.fields["role"]
                first.setdefault(worker, event.fields["before"])
                yield event.at, name, roles[name], event.fields["state"]
            case "worker_notice":
                yield event.at, name, roles.get(name, "preemptible"), "draining"
            case kind if kind in _GONE:
                yield event.at, name, roles.get(name, "preemptible"), "gone"
    for worker in record.observations[0].workers if record.observations else []:
        if worker.id not in known and worker.state not in ("lost", "left"):
            began_at = max(worker.joined_at, record.began_at)
            yield began_at, worker_name(worker.id), worker.role, first.get(worker.id, worker.state)


def _close(row: Row, at: float) -> None:
    if row.spans and row.spans[-1].ended_at > at:
        last = row.spans[-1]
        row.spans[-1] = Span(last.began_at, at, last.state)


def _silence(row: Row, killed_at: float) -> None:
    """Replace the manager's state between a death and its detection by `silent`."""
    if not row.spans or row.spans[-1].ended_at <= killed_at:
        return
    known_at = row.spans[-1].ended_at
    row.spans = [Span(s.began_at, min(s.ended_at, killed_at), s.state) for s in row.spans if s.began_at < killed_at]
    row.spans.append(Span(killed_at, known_at, "silent"))
