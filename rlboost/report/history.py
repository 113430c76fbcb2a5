"""What the REST API retains of a job: the input of a job's report. Times are Unix seconds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlboost.job_lines import unix_s
from rlboost.report.record import JobEvent

_GONE = frozenset({"worker_lost", "worker_left"})
_PRESENT = frozenset({"worker_joined", "worker_state"})


@dataclass(frozen=True)
class History:
    """A job, running or ended."""

    job: Mapping[str, Any]
    """`GET /v1/jobs/{id}`."""
    job_file: str
    """The resolved job file as text."""
    rows: Sequence[Mapping[str, float]]
    """One row of metrics per step; the one after the last step has an evaluation only."""
    events: Sequence[JobEvent]
    """Those retained, oldest first."""
    audit: Mapping[str, Any]
    """`GET /v1/jobs/{id}/audit`, empty if there is none."""
    seen_at: float

    @property
    def training_rows(self) -> list[Mapping[str, float]]:
        """Return the rows of training steps."""
        return [row for row in self.rows if row["step"] < self.job["steps"]]

    @property
    def began_at(self) -> float | None:
        """Return when the job began to run, None before."""
        at = self.job["started_at"]
        return None if at is None else unix_s(at)

    @property
    def ended_at(self) -> float:
        """Return when the job ended, or when its history was read."""
        at = self.job["finished_at"]
        return self.seen_at if at is None else unix_s(at)

    def column(self, name: str) -> tuple[list[float], list[float]]:
        """Return the completed steps and the values of one metric, where it is reported."""
        rows = [row for row in self.rows if name in row]
        return [row["step"] for row in rows], [row[name] for row in rows]


def workers_over_time(events: Sequence[JobEvent]) -> list[tuple[float, int, int]]:
    """Return (time, reserved workers, preemptible workers) at each change.

    A worker whose first event is not that it joined was there when the events begin.
    """
    changes: list[tuple[float, str, int]] = []
    roles: dict[str, str] = {}
    for event in events:
        worker = event.fields.get("worker", "")
        if event.kind in _PRESENT and worker not in roles:
            roles[worker] = event.fields["role"]
            changes.append((event.at if event.kind == "worker_joined" else events[0].at, roles[worker], 1))
        elif event.kind in _GONE and worker in roles:
            changes.append((event.at, roles.pop(worker), -1))
    counts = {"reserved": 0, "preemptible": 0}
    found: dict[float, tuple[float, int, int]] = {}
    for at, role, change in sorted(changes):
        counts[role] += change
        found[at] = (at, counts["reserved"], counts["preemptible"])
    return list(found.values())
