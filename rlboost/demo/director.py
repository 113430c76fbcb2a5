"""Acts the schedule out: pure bookkeeping of how far the job is, what is due, and whom it strikes."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rlboost.report.record import PlannedChange, SeenWorker, process_of

_FIRST_STEP_S = 4.0
"""A guess, until the first step has told how long they take."""


class Progress:
    """How far a job is, in steps and fractions of one. The clock is the caller's."""

    def __init__(self) -> None:
        """Begin with no step begun."""
        self._step = 0
        self._since: float | None = None
        self._step_s = _FIRST_STEP_S

    def at(self, step: int, now: float) -> float:
        """Return the progress, given how many steps are done.

        The fraction is by how long the last step took, and stays below one however long this one takes.
        """
        if self._since is None:
            self._since = now
        elif step != self._step:
            self._step_s = (now - self._since) / (step - self._step)
            self._step, self._since = step, now
        return step + min(0.95, (now - self._since) / max(self._step_s, 1e-3))


@dataclass(frozen=True)
class Act:
    """One change to make now; `process` is empty for a join."""

    planned: PlannedChange
    process: str


class Director:
    """Tells what to do next. Preemptions strike workers that generate, one of them at random."""

    def __init__(self, schedule: Sequence[PlannedChange], seed: int) -> None:
        """Start before the first change; the seed decides who is struck."""
        self._preemptions = [change for change in schedule if change.action != "join"]
        self._joins = [change for change in schedule if change.action == "join"]
        self._struck: set[str] = set()
        self._draw = random.Random(seed)  # noqa: S311 - not a secret

    def due(self, progress: float, workers: Iterable[SeenWorker]) -> list[Act]:
        """Return what is due now; each change is returned once.

        A preemption that finds nobody at work waits for somebody; joins wait for nothing.
        """
        victims = sorted(
            {
                process_of(worker.id)
                for worker in workers
                if worker.role == "preemptible" and worker.state == "ready" and worker.running
            }
            - self._struck
        )
        acts = []
        while victims and self._preemptions and self._preemptions[0].at_step <= progress:
            victim = victims.pop(self._draw.randrange(len(victims)))
            self._struck.add(victim)
            acts.append(Act(self._preemptions.pop(0), victim))
        while self._joins and self._joins[0].at_step <= progress:
            acts.append(Act(self._joins.pop(0), ""))
        return acts
