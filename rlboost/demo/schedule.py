"""The demo's spot market: which changes of the fleet are due at which step of the job.

By steps and not by the clock, so that all of them take place however fast the machine is.
"""

from __future__ import annotations

import math
import random

from rlboost.report.record import PlannedChange

STEPS_A_PREEMPTION = 10
FEWEST = 2
FIRST_AT, LAST_AT = 0.06, 0.84
"""Fractions of the job. After the last one there is time to notice it, which without notice takes a lease."""


def plan(steps: int, workers: int, seed: int) -> list[PlannedChange]:
    """Return the schedule in order: preemptions, every second one without notice, and a join for each.

    A long enough run has a storm, in which all workers go at nearly the same moment.

    Args:
        steps: of the job.
        workers: preemptible workers at the start; with none there is nothing to take.
        seed: gives the same schedule each time.

    """
    draw = random.Random(seed)  # noqa: S311 - a schedule, not a secret
    sizes = _sizes(max(min(FEWEST, workers), steps // STEPS_A_PREEMPTION) if workers else 0, workers)
    spacing = (LAST_AT - FIRST_AT) * steps / max(1, len(sizes))
    planned: list[PlannedChange] = []
    taken = 0
    for number, size in enumerate(sizes):
        at = FIRST_AT * steps + (number + draw.uniform(0, 0.6)) * spacing
        if spacing >= 1:
            at = math.floor(at) + draw.uniform(0.2, 0.5)  # in the middle of generating
        for _ in range(size):
            planned.append(PlannedChange(at_step=at, action="notice" if taken % 2 else "kill"))
            back_at = at + min(draw.uniform(1, 2), spacing / 4)
            planned.append(PlannedChange(at_step=back_at, action="join"))
            taken += 1
    return sorted(planned, key=lambda change: change.at_step)


def _sizes(preemptions: int, workers: int) -> list[int]:
    """Return how many workers go at each strike."""
    singles = preemptions - workers
    if workers < 2 or singles < 3:
        return [1] * preemptions
    sizes = [1] * singles
    sizes.insert(2 * len(sizes) // 3, workers)
    return sizes
