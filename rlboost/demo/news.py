"""Select the notable events of a run and format them as lines."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from rlboost.report.record import JobEvent, ProcessEvent, Record, process_of

Tone = Literal["good", "bad", "warn", "plain"]


@dataclass(frozen=True)
class News:
    """One line; `at` is Unix seconds."""

    at: float
    tone: Tone
    text: str


class Newsroom:
    """Reads a growing record; returns each line once."""

    def __init__(self, record: Record) -> None:
        """Start with the record's beginning."""
        self._record = record
        self._process_events = self._job_events = 0

    def fresh(self) -> list[News]:
        """Return the new lines since the last call, ordered by time."""
        record = self._record
        lines = list(_of_processes(record.process_events[self._process_events :]))
        lines += _of_job(record.job_events[self._job_events :])
        self._process_events, self._job_events = len(record.process_events), len(record.job_events)
        return sorted(lines, key=lambda news: news.at)


def _of_processes(events: list[ProcessEvent]) -> Iterator[News]:
    for event in events:
        match event.kind:
            case "killed":
                yield News(event.at, "bad", f"✗ {event.name} is gone without notice (SIGKILL)")
            case "noticed":
                yield News(event.at, "warn", f"▼ {event.name} gets notice: its machine will be taken (SIGTERM)")
            case "joined":
                yield News(event.at, "good", f"▶ {event.name} joins: a new machine")
            case "died" | "refused" | "gave_up":
                yield News(event.at, "bad", f"✗ {event.name}: {event.detail}")


def _of_job(events: list[JobEvent]) -> Iterator[News]:
    for event in events:
        fields = event.fields
        match event.kind:
            case "worker_lost":
                yield News(event.at, "bad", f"  {process_of(fields['worker'])} is missed: {fields['reason']}")
            case "samples_unassigned" if fields["cause"] != "suspended":
                whose = f"{fields['samples']} unfinished samples of {process_of(fields['worker'])}"
                yield News(event.at, "plain", f"  {whose} migrate with their {fields['tokens']:,} tokens")
            case "seeding_reopened":
                yield News(event.at, "warn", "  no spot worker is left: the reserved engine generates again")
            case "checkpoint_saved":
                yield News(event.at, "plain", f"  checkpoint after step {fields['step']}")
            case "job_state":
                because = f": {_first_line(fields['error'])}" if fields["error"] else ""
                yield News(event.at, "plain", f"  the job is {fields['state']}{because}")
            case "group_dropped":
                why = f"{fields['reason']}: {_first_line(fields['detail'])}"
                yield News(event.at, "bad", f"  group {fields['group']} dropped: {why}")
            case "weights_unavailable":
                yield News(event.at, "bad", f"  weights {fields['version']} cannot be had: {fields['reason']}")


def _first_line(text: str) -> str:
    return text.partition("\n")[0]
