"""Whether an engine says of the probe what the trainer says: the last thing between loaded weights and samples.

Digests say that the bytes in the engine are those that were published. They cannot say that it computes with them what
the trainer does: that an output layer is tied, that a tensor is not used transposed, that a kernel is right.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from shared.canary import Canary, Dtype

MEAN_TOLERANCE: dict[Dtype, float] = {"float32": 0.005, "bfloat16": 0.5}
"""Nats, by the coarser of the two dtypes. Kernels of float32 differ by some 1e-5. Those of bfloat16 differ by more the
deeper the model and the surer it is: the most that was seen is 0.22, and an honest worker must pass. Wrong weights make
whole nats of difference in a model that is sure of anything. docs/engines.md has the figures."""
MAX_PER_MEAN = 10.0
"""How many times the mean's tolerance one token may be off: a single unlikely token is far off before the mean is."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """How far an engine is from the trainer."""

    mean: float
    """Of the absolute differences, in nats at temperature 1."""
    worst: float
    mean_tolerance: float
    max_tolerance: float

    @property
    def agrees(self) -> bool:
        """Tell whether both are within their tolerance; what is no number is not."""
        return self.mean <= self.mean_tolerance and self.worst <= self.max_tolerance

    def __str__(self) -> str:
        return (
            f"its log-probabilities of {self.mean:.3g} nats mean and {self.worst:.3g} nats maximal difference from the "
            f"trainer's exceed the tolerance of {self.mean_tolerance:.3g} and {self.max_tolerance:.3g}"
        )


def judge(canary: Canary, scored: Sequence[Sequence[float]], *, dtype: Dtype, tolerance: float = 0.0) -> Verdict:
    """Compare an engine's answer with the trainer's.

    Args:
        canary: the probe and the trainer's answer.
        scored: the engine's log-probability of each completion token, at the canary's temperature.
        dtype: what the engine computes in.
        tolerance: of the mean difference, in nats; 0 = by dtype.

    """
    # A low temperature magnifies differences of logits: what counts is these.
    differences = [
        abs(ours - theirs) * canary.temperature
        for row, answer in zip(canary.rows, scored, strict=True)
        for theirs, ours in zip(row.logprobs, answer, strict=True)
    ]
    broken = not all(map(math.isfinite, differences))
    mean = math.inf if broken else sum(differences) / len(differences)
    allowed = tolerance or max(MEAN_TOLERANCE[dtype], MEAN_TOLERANCE[canary.dtype])
    return Verdict(mean, math.inf if broken else max(differences), allowed, MAX_PER_MEAN * allowed)
