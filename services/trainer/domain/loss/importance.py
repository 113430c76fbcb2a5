"""Importance weights for tokens generated with other probabilities than those at the start of the step.

The difference comes from older weights (staleness) or from numerics of the inference engine (mismatch). The weight of a
token is proximal / sampled, without a gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor


def truncated(weights: Tensor, cap: float) -> Tensor:
    """Return min(weight, cap): truncated importance sampling, as in AReaL's decoupled objective, arXiv 2505.24298."""
    return weights.clamp(max=cap)


def masked(weights: Tensor, cap: float) -> Tensor:
    """Return the weights from 1 / cap to cap, and 0 for the others: IcePop's mask, Ring-1T, arXiv 2510.18855."""
    return torch.where((weights >= 1.0 / cap) & (weights <= cap), weights, 0.0)


RULES = {"truncate": truncated, "mask": masked}
