"""Predicts how long the generation of a step takes with other numbers of workers.

A decode step takes a fixed time, in which the weights are read, and a time that grows with its batch. A sample of n
tokens takes n decode steps wherever it runs: the fixed time of the longest sample's steps is a latency that no number
of workers shortens. The rest is work, which the workers share. Workers count alike, whatever their kind.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

MIN_EFFICIENCY = 0.25
"""A worker is worth having if it shortens a step by at least this part of what it would without latency."""
MAX_WORKERS = 4096
"""Beyond it, `workers_worth_having` does not search."""


@dataclass(frozen=True, slots=True)
class Generation:
    """The generation of all samples of one step."""

    latency_s: float
    """Time that any number of workers needs."""
    work_s: float
    """Time that the workers share, in worker-seconds."""

    def duration_s(self, workers: float) -> float:
        """Return how long this number of workers takes; infinity for none."""
        return self.latency_s + self.work_s / workers if workers else math.inf

    def window_s(self, workers: float, reserved: float, train_s: float) -> float:
        """Return the seeding window after which the workers alone end the step's samples just when training ends.

        Without preemptible workers: until the reserved ones have generated everything.

        Args:
            workers: number of preemptible workers.
            reserved: number of reserved workers.
            train_s: training time of a step.

        """
        alone_s = self.duration_s(workers)
        if alone_s <= train_s:
            return 0.0
        return self.duration_s(workers + reserved) * (1.0 - train_s / alone_s)

    def step_s(self, workers: float, reserved: float, train_s: float) -> float:
        """Return how long window and training of a step take; infinity without any worker. Arguments: `window_s`."""
        return self.window_s(workers, reserved, train_s) + train_s

    def workers_worth_having(self, reserved: int, train_s: float) -> int:
        """Return N_prem of the paper: from this number of preemptible workers on, no window is needed.

        Fewer where the latency dominates: see `MIN_EFFICIENCY`.
        """
        for workers in range(MAX_WORKERS):
            present = workers + reserved
            before_s, after_s = (self.step_s(n, reserved, train_s) for n in (workers, workers + 1))
            if before_s == train_s or (present and (before_s / after_s - 1.0) * present < MIN_EFFICIENCY):
                return workers
        return MAX_WORKERS
