"""The fleet's history, folded from a record: what each worker was doing when, and where samples went on elsewhere."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, Literal

from rlboost.report.record import JobEvent, Record, process_of

State = Literal["joining", "pulling", "ready", "suspended", "draining", "silent"]
"""As the manager names them. `silent`: it is dead, and the manager does not know it yet."""

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
    """When the schedule brought it; None for those that were there from the beginning."""
    killed_at: float | None = None
    noticed_at: float | None = None


@dataclass(frozen=True)
class Migration:
    """Samples that went on at another worker."""

    at: float
    source: str
    """Process names."""
    target: str
    samples: int
    tokens: int
    """Made before, and taken along."""
    cause: str
    """Why they had to: `lost`, `left` or `suspended`."""


def rows(record: Record) -> list[Row]:
    """Return a row for every worker, the reserved ones first, then in the order in which they came."""
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
            row.spans.insert(0, Span(row.joined_at, known_at, "joining"))  # its process starts
    return sorted(found.values(), key=lambda row: (row.role != "reserved", row.joined_at or 0.0, row.name))


def migrations(record: Record) -> list[Migration]:
    """Return where samples went, in order.

    Samples that one worker lost at once and that another one took over bit by bit are one migration, at its begin. The
    events say from whom samples were taken, and to whom samples moved, but not which: they are matched in order, within
    the same step, as no sample outlives its step.
    """
    step_begins = _step_begins(record)
    taken: deque[_Taken] = deque()
    found: dict[tuple[_Taken, str], Migration] = {}
    for event in record.job_events:
        step = bisect_right(step_begins, event.at)
        if event.kind == "samples_taken":
            fields = event.fields
            taken.append(_Taken(step, process_of(fields["worker"]), fields["cause"], fields["samples"]))
        elif event.kind == "samples_moved":
            while taken and taken[0].step < step:
                taken.popleft()
            for source, move in _match(event, taken):
                before = found.get((source, move.target))
                found[source, move.target] = _joined(before, move) if before else move
    return sorted(found.values(), key=lambda move: move.at)


@dataclass(eq=False)
class _Taken:
    """Samples that one worker lost at once."""

    step: int
    source: str
    cause: str
    left: int
    """Those that have not moved yet."""


def _step_begins(record: Record) -> list[float]:
    """Return when each step but the first was first seen."""
    pairs = pairwise(record.observations)
    return [after.at for before, after in pairs if after.step > before.step]


def _joined(first: Migration, more: Migration) -> Migration:
    return replace(first, samples=first.samples + more.samples, tokens=first.tokens + more.tokens)


def _match(event: JobEvent, taken: deque[_Taken]) -> Iterator[tuple[_Taken, Migration]]:
    target, left = process_of(event.fields["worker"]), event.fields["samples"]
    tokens_each = event.fields["tokens"] / max(1, left)
    while left and taken:
        source = taken[0]
        n = min(left, source.left)
        left -= n
        source.left -= n
        if not source.left:
            taken.popleft()
        yield source, Migration(event.at, source.source, target, n, round(n * tokens_each), source.cause)


def _state_changes(record: Record) -> Iterator[tuple[float, str, str, Any]]:
    """Yield (at, process, role, state or "gone"), unsorted.

    Events are only told while there is a job, so what was there before is taken from the first time it was seen.
    """
    told: set[str] = set()
    roles: dict[str, str] = {}
    first: dict[str, State] = {}
    for event in record.job_events:
        worker = event.fields.get("worker", "")
        name = process_of(worker)
        match event.kind:
            case "worker_joined":
                told.add(worker)
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
        if worker.id not in told and worker.state not in ("lost", "left"):
            began_at = max(worker.joined_at, record.began_at)
            yield began_at, process_of(worker.id), worker.role, first.get(worker.id, worker.state)


def _close(row: Row, at: float) -> None:
    if row.spans and row.spans[-1].ended_at > at:
        last = row.spans[-1]
        row.spans[-1] = Span(last.began_at, at, last.state)


def _silence(row: Row, killed_at: float) -> None:
    """Cut at a death what the manager still believed, up to when it knew."""
    if not row.spans or row.spans[-1].ended_at <= killed_at:
        return
    known_at = row.spans[-1].ended_at
    row.spans = [Span(s.began_at, min(s.ended_at, killed_at), s.state) for s in row.spans if s.began_at < killed_at]
    row.spans.append(Span(killed_at, known_at, "silent"))
