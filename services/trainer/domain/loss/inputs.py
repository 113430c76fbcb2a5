"""The input of a loss function: one micro-batch, as columns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """Concatenated completions; every column is float32, [tokens], with one entry per loss token."""

    logprobs: Tensor
    """Log-probabilities under the weights being trained; with `entropies` the only column with a gradient."""
    sampled: Tensor
    """Log-probabilities of the same tokens, reported by the inference engine that generated them."""
    advantages: Tensor
    """Advantage of each token; equal for all tokens of a completion, unless the job has a critic."""
    lengths: tuple[int, ...]
    """Number of tokens of each completion, above 0; their sum is the length of the columns."""
    proximal: Tensor | None = None
    """Log-probabilities under the weights at the start of the step; None if not needed, or if these are the current
    weights."""
    reference: Tensor | None = None
    """Log-probabilities under the job's initial weights; None if not needed."""
    entropies: Tensor | None = None
    """Entropy of the whole distribution that each token is from, under the weights being trained, in nats; None if not
    needed."""


LossFn = Callable[[TokenBatch], tuple["Tensor", dict[str, float]]]
"""A micro-batch -> its summed loss, and sums that `sums.add` adds up. One of these, `divisor`, divides the accumulated
gradients of an update."""

TokenLoss = Callable[[TokenBatch], "Tensor"]
"""`algorithm.loss`: a micro-batch -> the loss of each token, before weights and aggregation."""
