"""Select the notable events of a run and format them as lines."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from rlboost.report.record import JobEvent, ProcessEvent, Record
from rlboost.shared.ids import worker_name

Tone = Literal["good", "bad", "warn", "plain"]


@dataclass(frozen=True)
class EventLine:
    """One line; `at` is Unix seconds."""

    at: float
    tone: Tone
    text: str


class EventLines:
    """Reads a growing record; returns each line once."""

    def __init__(self, record: Record) -> None:
        """Start with the record's beginning."""
        self._record = record
        self._process_events = self._job_events = 0

    def new_lines(self) -> list[EventLine]:
        """Return the new lines since the last call, ordered by time."""
        record = self._record
        lines = list(_of_processes(record.process_events[self._process_events :]))
        lines += _of_job(record.job_events[self._job_events :])
        self._process_events, self._job_events = len(record.process_events), len(record.job_events)
        return sorted(lines, key=lambda line: line.at)


def _of_processes(events: list[ProcessEvent]) -> Iterator[EventLine]:
    for event in events:
        match event.kind:
            case "killed":
                yield EventLine(event.at, "bad", f"✗ {event.name} is gone without notice (SIGKILL)")
            case "noticed":
                yield EventLine(
                    event.at, "warn", f"▼ {event.name} gets notice: its machine will be reclaimed (SIGTERM)"
                )
            case "joined":
                yield EventLine(event.at, "good", f"▶ {event.name} joins: a new machine")
            case "died" | "refused" | "gave_up":
                yield EventLine(event.at, "bad", f"✗ {event.name}: {event.detail}")


def _of_job(events: list[JobEvent]) -> Iterator[EventLine]:
    for event in events:
        fields = event.fields
        match event.kind:
            case "worker_lost":
                yield EventLine(
                    event.at, "bad", f"  {worker_name(fields['worker'])} was declared lost: {fields['reason']}"
                )
            case "samples_unassigned" if fields["cause"] != "suspended":
                whose = f"{fields['samples']} unfinished samples of {worker_name(fields['worker'])}"
                yield EventLine(event.at, "plain", f"  {whose} migrate with their {fields['tokens']:,} tokens")
            case "seeding_reopened":
                yield EventLine(event.at, "warn", "  no spot worker is left: the reserved engine generates again")
            case "checkpoint_saved":
                yield EventLine(event.at, "plain", f"  checkpoint after step {fields['step']}")
            case "job_state_changed":
                because = f": {_first_line(fields['error'])}" if fields["error"] else ""
                yield EventLine(event.at, "plain", f"  the job is {fields['state']}{because}")
            case "group_dropped":
                why = f"{fields['reason']}: {_first_line(fields['detail'])}"
                yield EventLine(event.at, "bad", f"  group {fields['group']} dropped: {why}")
            case "weights_unavailable":
                yield EventLine(event.at, "bad", f"  weights {fields['version']} are unavailable: {fields['reason']}")


def _first_line(text: str) -> str:
    return text.partition("\n")[0]
