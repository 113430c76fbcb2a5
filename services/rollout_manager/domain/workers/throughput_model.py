"""Models the throughput of a kind of worker, learned from heartbeats.

One decode step takes about `fixed_s + each_s * samples + token_s * tokens`: the weights are read once a step, each
sample has a cost, and its KV cache is read. So throughput is nearly proportional to small batches and flat for large
ones. In between, at the *batching plateau* (B in the paper's algorithm 2), a larger batch makes each sample slower and
the whole hardly faster.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import combinations

import numpy as np
import numpy.typing as npt

MIN_STEP_S, MAX_STEP_S = 1e-6, 1e4
"""No engine's decode step takes less or more: such a report is wrong."""
OBSERVATION_DECAY = 0.995
"""Factor by which each new observation lowers the weight of earlier ones."""
MIN_OBSERVATIONS = 6
"""Observations before the model is used."""
FIT_EVERY = 8
"""Observations between two fits after that."""
SPEED_STEP = 0.1
"""Weight of one observation in a worker's speed."""

_CHOICES = [list(chosen) for size in (3, 2, 1) for chosen in combinations(range(3), size)]


@dataclass(slots=True)
class Profile:
    """Seconds of a step against samples and tokens in the batch: weighted least squares, no coefficient negative.

    Observations last about equally long, so each is weighted by its number of steps: where the speed varies, as on a
    shared machine, the fit then has the mean throughput. Least squares of relative errors would follow the fast ones.
    """

    fixed_s: float = 1.0
    """Seconds per step, independent of the batch; before the first fit, the unit of all comparisons."""
    each_s: float = 0.0
    """Seconds per step and sample in the batch."""
    token_s: float = 0.0
    """Seconds per step and token in the KV cache."""
    observed: int = 0
    _products: npt.NDArray[np.float64] = field(default_factory=lambda: np.zeros((3, 3)))
    _targets: npt.NDArray[np.float64] = field(default_factory=lambda: np.zeros(3))

    @property
    def known(self) -> bool:
        """Return True if there were enough observations."""
        return self.observed >= MIN_OBSERVATIONS

    def observe(self, running: float, tokens: float, tokens_per_s: float) -> None:
        """Take one observation: the samples in the batch, their tokens in the KV cache, and their joint throughput."""
        step_s = running / tokens_per_s
        row = np.array([1.0, running, tokens])
        self._products = OBSERVATION_DECAY * self._products + np.outer(row, row) / step_s
        self._targets = OBSERVATION_DECAY * self._targets + row
        self.observed += 1
        if self.observed == MIN_OBSERVATIONS or (self.known and self.observed % FIT_EVERY == 0):
            self._fit()

    def _fit(self) -> None:
        # Of all subsets of the terms with positive coefficients, take the one that explains most.
        scale = np.sqrt(np.diag(self._products)) + 1e-12
        products, targets = self._products / np.outer(scale, scale), self._targets / scale
        best, explained = np.zeros(3), 0.0
        for chosen in _CHOICES:
            part = products[np.ix_(chosen, chosen)] + 1e-9 * np.eye(len(chosen))
            found = np.linalg.solve(part, targets[chosen])
            if (found > 0).all() and float(found @ targets[chosen]) > explained * 1.0001:
                best, explained = np.zeros(3), float(found @ targets[chosen])
                best[chosen] = found
        fixed_s, self.each_s, self.token_s = (float(value) for value in best / scale)
        self.fixed_s = max(fixed_s, 1e-9)  # a step always takes time

    def step_s(self, running: float, tokens: float) -> float:
        """Return the seconds of one step, which is also the time between two tokens of a sample."""
        return self.fixed_s + self.each_s * running + self.token_s * tokens

    def token_interval_s(self, load: int, batch_cap: int, tokens: float) -> float:
        """Return the seconds between two tokens of one of `load` samples; those beyond the batch cap take turns."""
        return self.step_s(min(load, batch_cap), tokens) * max(1.0, load / batch_cap)

    def tokens_per_s(self, running: float, tokens: float) -> float:
        """Return the throughput."""
        return running / self.step_s(running, tokens) if running else 0.0

    def plateau(self, slots: int, share: float, tokens_each: float) -> int:
        """Return the smallest batch that reaches `share` of the throughput of all slots.

        Args:
            slots: the largest batch.
            share: fraction of the throughput, below 1.
            tokens_each: mean number of tokens of a sample in the KV cache.

        """
        if not self.known:
            return slots
        each_s = self.each_s + self.token_s * tokens_each
        most = share * slots / (self.fixed_s + each_s * slots)
        return min(slots, max(1, round(most * self.fixed_s / (1.0 - most * each_s))))


def is_possible(batch: float, step_s: float, slots: int) -> bool:
    """Return True if an engine with this many slots can report this mean batch and time of a decode step."""
    return 1.0 <= batch <= slots and MIN_STEP_S < step_s < MAX_STEP_S


def speed_after(speed: float, expected: float, tokens_per_s: float) -> float:
    """Return a worker's speed relative to its kind after one more observation."""
    return speed + SPEED_STEP * (min(max(tokens_per_s / expected, 0.05), 20.0) - speed)
