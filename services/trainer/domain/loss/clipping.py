"""Clips of the ratio. Each returns objectives to maximize, one entry per token."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Clipped(NamedTuple):
    """The result of a clip; all columns are [tokens]."""

    objective: Tensor
    ratio: Tensor
    """The ratio after the clip."""
    low: Tensor
    """Whether the lower bound applies to the token."""
    high: Tensor


def ppo_clip(ratio: Tensor, advantages: Tensor, low: float, high: float) -> Clipped:
    """Return min(r A, clip(r, 1 - low, 1 + high) A): no gradient beyond the bound that A points to.

    PPO, arXiv 1707.06347, equation 7; with two bounds DAPO's clip-higher, arXiv 2503.14476, equation 10.
    """
    clipped = ratio.clamp(1.0 - low, 1.0 + high)
    return Clipped(
        torch.minimum(ratio * advantages, clipped * advantages),
        clipped,
        (ratio < 1.0 - low) & (advantages < 0),
        (ratio > 1.0 + high) & (advantages > 0),
    )


def cispo_clip(ratio: Tensor, logprobs: Tensor, advantages: Tensor, low: float, high: float) -> Clipped:
    """Return sg(clip(r, 1 - low, 1 + high)) A log pi: the ratio is a weight without gradient.

    CISPO, MiniMax-M1, arXiv 2506.13585, equation 4.
    """
    weight = ratio.detach().clamp(1.0 - low, 1.0 + high)
    return Clipped(weight * advantages * logprobs, weight, ratio < 1.0 - low, ratio > 1.0 + high)


def unclipped(ratio: Tensor, advantages: Tensor) -> Tensor:
    """Return r A, whose gradient at r = 1 is REINFORCE's: A times the gradient of log pi."""
    return ratio * advantages
