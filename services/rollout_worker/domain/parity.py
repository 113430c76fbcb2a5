"""Compares an engine's log-probabilities with the trainer's: the last check before loaded weights are served.

Digests show that the engine has the published bytes. They cannot show that it computes the same with them as the
trainer: that an output layer is tied, that no tensor is used transposed, that a kernel is correct.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rlboost.shared.model.parity import Dtype, ParityReference

MEAN_TOLERANCE: dict[Dtype, float] = {"float32": 0.005, "bfloat16": 0.5}
"""Allowed mean difference in nats, by the coarser of the two dtypes. float32 kernels differ by about 1e-5. bfloat16
kernels differ more, the deeper and the more confident the model: the largest difference measured with correct weights
is 0.22. Wrong weights differ by whole nats in a confident model. See docs/engines.md for the measurements."""
MAX_PER_MEAN = 10.0
"""Allowed difference of one token, as a multiple of the mean's tolerance: single unlikely tokens differ most."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The differences between an engine and the trainer."""

    mean: float
    """Of the absolute differences, in nats at temperature 1."""
    worst: float
    mean_tolerance: float
    max_tolerance: float

    @property
    def agrees(self) -> bool:
        """Return True if both are within their tolerance; NaN and infinity are not."""
        return self.mean <= self.mean_tolerance and self.worst <= self.max_tolerance

    def __str__(self) -> str:
        return (
            f"its log-probabilities of {self.mean:.3g} nats mean and {self.worst:.3g} nats maximal difference from the "
            f"trainer's exceed the tolerance of {self.mean_tolerance:.3g} and {self.max_tolerance:.3g}"
        )


def judge(
    reference: ParityReference, scored: Sequence[Sequence[float]], *, dtype: Dtype, tolerance: float = 0.0
) -> Verdict:
    """Compare an engine's log-probabilities with the trainer's.

    Args:
        reference: canary prompts with the trainer's log-probabilities.
        scored: the engine's log-probability of each completion token, at the reference's temperature.
        dtype: what the engine computes in.
        tolerance: of the mean difference, in nats; 0 = by dtype.

    """
    # Compare at temperature 1: a lower one magnifies differences of logits.
    differences = [
        abs(ours - theirs) * reference.temperature
        for row, answer in zip(reference.rows, scored, strict=True)
        for theirs, ours in zip(row.logprobs, answer, strict=True)
    ]
    broken = not all(map(math.isfinite, differences))
    mean = math.inf if broken else sum(differences) / len(differences)
    allowed = tolerance or max(MEAN_TOLERANCE[dtype], MEAN_TOLERANCE[reference.dtype])
    return Verdict(mean, math.inf if broken else max(differences), allowed, MAX_PER_MEAN * allowed)
