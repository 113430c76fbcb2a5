"""What a loss function is given: one micro-batch, as columns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """Whole completions, one after the other; every column is float32 with one entry a completion token."""

    logprobs: Tensor
    """Log-probabilities under the weights being trained; the only column with a gradient."""
    sampled: Tensor
    """Log-probabilities of the same tokens, as the engine told them when it drew them."""
    advantages: Tensor
    """The advantage of the token's completion."""
    lengths: tuple[int, ...]
    """How many tokens each completion has; they add up to the columns' length, and none is 0."""
    proximal: Tensor | None = None
    """Log-probabilities under the weights that the step began with; None where nobody asked, or these are still the
    ones being trained."""
    reference: Tensor | None = None
    """Log-probabilities under the weights that the job began with; None where these are not asked."""


LossFn = Callable[[TokenBatch], tuple["Tensor", dict[str, float]]]
"""A micro-batch -> its loss, not yet divided by anything, and numbers that `sums.add` adds up; one of them,
`divisor`, is what the gradients of an update are divided by once they are added up."""

TokenLoss = Callable[[TokenBatch], "Tensor"]
"""`algorithm.loss`: a micro-batch -> the loss of each token, before it is weighted and added up."""
