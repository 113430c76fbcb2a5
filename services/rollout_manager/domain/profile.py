"""How fast a worker generates, learnt from beats.

One decoding step takes about `fixed_s + each_s * samples + token_s * tokens`: the weights are read once a step, each
sample costs something, and its KV cache is read besides. So throughput is nearly proportional to the batch at first and
flat at last. What lies between, the *batching plateau* (B in the paper's algorithm 2), is where a larger batch makes
each sample slower and the whole hardly faster.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import combinations

import numpy as np
import numpy.typing as npt

FORGET = 0.995
"""What an observation is worth one observation later."""
ENOUGH = 6
"""Observations below which nothing is believed."""
FIT_EVERY = 8
"""Observations between two fits, once there were enough."""
SPEED_STEP = 0.1
"""How far one observation moves a worker's own speed."""

_CHOICES = [list(chosen) for size in (3, 2, 1) for chosen in combinations(range(3), size)]


@dataclass(slots=True)
class Profile:
    """Seconds of a step against samples and tokens in the batch: least squares of relative errors, none negative."""

    fixed_s: float = 1.0
    """Of a step, whatever the batch; before anything is known, the unit of all comparisons."""
    each_s: float = 0.0
    """Of a step, for each sample in the batch."""
    token_s: float = 0.0
    """Of a step, for each token in the KV cache."""
    observed: int = 0
    _products: npt.NDArray[np.float64] = field(default_factory=lambda: np.zeros((3, 3)))
    _targets: npt.NDArray[np.float64] = field(default_factory=lambda: np.zeros(3))

    @property
    def known(self) -> bool:
        """Tell whether enough was observed."""
        return self.observed >= ENOUGH

    def observe(self, running: float, tokens: float, tokens_per_s: float) -> None:
        """Take one observation: so many samples with so many tokens ran, and made so many tokens a second together."""
        step_s = running / tokens_per_s
        row = np.array([1.0, running, tokens]) / step_s
        self._products = FORGET * self._products + np.outer(row, row)
        self._targets = FORGET * self._targets + row
        self.observed += 1
        if self.observed == ENOUGH or (self.known and self.observed % FIT_EVERY == 0):
            self._fit()

    def _fit(self) -> None:
        # Of the choices of parts that come out positive, the one that explains most; a relative error of 1 each means
        # that a choice explains nothing.
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
        self.fixed_s = max(fixed_s, 1e-9)  # no step is for nothing, whatever explains most of it

    def step_s(self, running: float, tokens: float) -> float:
        """Return the seconds of one step, which is also the time between two tokens of a sample."""
        return self.fixed_s + self.each_s * running + self.token_s * tokens

    def tokens_per_s(self, running: float, tokens: float) -> float:
        """Return the throughput."""
        return running / self.step_s(running, tokens) if running else 0.0

    def plateau(self, slots: int, share: float, tokens_each: float) -> int:
        """Return the smallest batch that reaches `share` of the throughput of all slots.

        Args:
            slots: the largest batch.
            share: of the throughput, below 1.
            tokens_each: how many tokens a sample has in the KV cache on average.

        """
        if not self.known:
            return slots
        each_s = self.each_s + self.token_s * tokens_each
        most = share * slots / (self.fixed_s + each_s * slots)
        return min(slots, max(1, round(most * self.fixed_s / (1.0 - most * each_s))))


def speed_after(speed: float, expected: float, tokens_per_s: float) -> float:
    """Return a worker's speed relative to its kind after one more observation."""
    return speed + SPEED_STEP * (min(max(tokens_per_s / expected, 0.05), 20.0) - speed)
