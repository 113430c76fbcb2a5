"""Compares an engine's log-probabilities with the trainer's: the last check before loaded weights are served.

Digests show that the engine has the published bytes. They cannot show that it computes the same with them as the
trainer: that an output layer is tied, that no tensor is used transposed, that a kernel is correct.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from rlboost.shared.model.parity_reference import Dtype, ParityReference

Precision = Literal[Dtype, "quantized"]
"""The precision in which an engine computes."""
FLOAT32_TOLERANCE = 0.005
"""Allowed mean difference in nats, whatever the model: float32 kernels differ by about 1e-5."""
RELATIVE_TOLERANCE: dict[Precision, float] = {"float32": 0.0, "bfloat16": 0.1, "quantized": 0.4}
"""Allowed mean difference as a fraction of the spread (standard deviation) of the reference's log-probabilities, by the
coarser of the two precisions. Rounding and wrong weights both change logits in proportion to their size, so the
fraction separates them in confident and in untrained models. See docs/engines.md for the measurements."""
MIXTURE_TOLERANCE = 0.2
"""The smallest fraction for a mixture of experts below float32, where that of its precision is smaller: if two experts
score nearly the same, rounding selects the other one."""
MAX_PER_MEAN = 10.0
"""Allowed difference of one token, as a multiple of the mean's tolerance: single unlikely tokens differ most."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The differences between an engine and the trainer."""

    mean: float
    """Mean of the absolute differences, in nats at temperature 1."""
    worst: float
    """The largest of them."""
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
    reference: ParityReference,
    scored: Sequence[Sequence[float]],
    *,
    precision: Precision,
    has_experts: bool = False,
    tolerance: float = 0.0,
) -> Verdict:
    """Compare an engine's log-probabilities with the trainer's.

    Args:
        reference: canary prompts with the trainer's log-probabilities.
        scored: the engine's log-probability of each completion token, at the reference's temperature.
        precision: the precision in which the engine computes.
        has_experts: True for a mixture of experts.
        tolerance: tolerated mean difference in nats; 0 derives it from precision and model.

    """
    # Compare at temperature 1: a lower one magnifies differences of logits.
    differences = [
        abs(ours - theirs) * reference.temperature
        for row, answer in zip(reference.rows, scored, strict=True)
        for theirs, ours in zip(row.logprobs, answer, strict=True)
    ]
    broken = not all(map(math.isfinite, differences))
    mean = math.inf if broken else sum(differences) / len(differences)
    allowed = tolerance or _tolerance(reference, precision, has_experts=has_experts)
    return Verdict(mean, math.inf if broken else max(differences), allowed, MAX_PER_MEAN * allowed)


def _tolerance(reference: ParityReference, precision: Precision, *, has_experts: bool) -> float:
    fraction = max(RELATIVE_TOLERANCE[precision], RELATIVE_TOLERANCE[reference.dtype])
    if has_experts and fraction:
        fraction = max(fraction, MIXTURE_TOLERANCE)
    spread = statistics.pstdev(value for row in reference.rows for value in row.logprobs) * reference.temperature
    return max(FLOAT32_TOLERANCE, fraction * spread)
