"""Decides which changes of the demo's schedule are due, and which worker each preemption hits. Pure."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rlboost.report.record import PlannedChange, SeenWorker
from rlboost.shared.ids import worker_name

_FIRST_STEP_S = 4.0
"""Estimated duration of a step until the first one has completed."""


class JobProgressEstimate:
    """Estimates the progress of a job in steps, with fractions. The caller passes the clock."""

    def __init__(self) -> None:
        """Start before the first step."""
        self._step = 0
        self._since: float | None = None
        self._step_s = _FIRST_STEP_S

    def at(self, step: int, now: float) -> float:
        """Return the progress, given how many steps are done.

        The fraction is relative to the duration of the last step, and stays below one.
        """
        if self._since is None:
            self._since = now
        elif step != self._step:
            self._step_s = (now - self._since) / (step - self._step)
            self._step, self._since = step, now
        return step + min(0.95, (now - self._since) / max(self._step_s, 1e-3))


@dataclass(frozen=True)
class DueChange:
    """A change to apply now; `process` is empty for a join."""

    planned: PlannedChange
    process: str


class PreemptionSchedule:
    """Decides which changes are due. A preemption hits a random worker that is generating."""

    def __init__(self, schedule: Sequence[PlannedChange], seed: int) -> None:
        """Start before the first change; the seed selects the preempted workers."""
        self._preemptions = [change for change in schedule if change.action != "join"]
        self._joins = [change for change in schedule if change.action == "join"]
        self._preempted: set[str] = set()
        self._draw = random.Random(seed)  # noqa: S311 - not a secret

    def due(self, progress: float, workers: Iterable[SeenWorker]) -> list[DueChange]:
        """Return the changes that are due; each is returned once.

        A preemption waits until a worker is generating; joins do not wait.
        """
        victims = sorted(
            {
                worker_name(worker.id)
                for worker in workers
                if worker.role == "preemptible" and worker.state == "ready" and worker.running
            }
            - self._preempted
        )
        changes = []
        while victims and self._preemptions and self._preemptions[0].at_step <= progress:
            victim = victims.pop(self._draw.randrange(len(victims)))
            self._preempted.add(victim)
            changes.append(DueChange(self._preemptions.pop(0), victim))
        while self._joins and self._joins[0].at_step <= progress:
            changes.append(DueChange(self._joins.pop(0), ""))
        return changes
