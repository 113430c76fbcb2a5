"""The demo's simulated spot market: changes of the fleet by step of the job.

Steps instead of seconds, so that every change happens on fast and slow machines.
"""

from __future__ import annotations

import math
import random

from rlboost.report.record import PlannedChange

STEPS_A_PREEMPTION = 10
FEWEST = 2
FIRST_AT, LAST_AT = 0.06, 0.84
"""Fractions of the job. After the last one there is time to detect it, which without notice takes a lease."""


def plan(steps: int, workers: int, seed: int) -> list[PlannedChange]:
    """Return the ordered schedule: preemptions, every second one without notice, and a join for each.

    A long enough run has a storm that preempts all workers at nearly the same time.

    Args:
        steps: steps of the job.
        workers: initial spot workers; with none the schedule is empty.
        seed: makes the schedule reproducible.

    """
    draw = random.Random(seed)  # noqa: S311 - a schedule, not a secret
    sizes = _sizes(max(min(FEWEST, workers), steps // STEPS_A_PREEMPTION) if workers else 0, workers)
    spacing = (LAST_AT - FIRST_AT) * steps / max(1, len(sizes))
    planned: list[PlannedChange] = []
    taken = 0
    for number, size in enumerate(sizes):
        at = FIRST_AT * steps + (number + draw.uniform(0, 0.6)) * spacing
        if spacing >= 1:
            at = math.floor(at) + draw.uniform(0.2, 0.5)  # during generation
        for _ in range(size):
            planned.append(PlannedChange(at_step=at, action="notice" if taken % 2 else "kill"))
            back_at = at + min(draw.uniform(1, 2), spacing / 4)
            planned.append(PlannedChange(at_step=back_at, action="join"))
            taken += 1
    return sorted(planned, key=lambda change: change.at_step)


def _sizes(preemptions: int, workers: int) -> list[int]:
    """Return the number of workers preempted at each time."""
    singles = preemptions - workers
    if workers < 2 or singles < 3:
        return [1] * preemptions
    sizes = [1] * singles
    sizes.insert(2 * len(sizes) // 3, workers)
    return sizes
