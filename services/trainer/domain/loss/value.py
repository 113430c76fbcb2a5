"""The loss of a critic, in torch."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class ValueLoss(NamedTuple):
    """Columns, [tokens]."""

    losses: Tensor
    clipped: Tensor
    """Whether the clip applies to the token, whose value then has no gradient."""


def value_loss(values: Tensor, before: Tensor, returns: Tensor, clip: float | None) -> ValueLoss:
    """Return max((v - R)^2, (clip(v, v_before - clip, v_before + clip) - R)^2) / 2: as in PPO implementations.

    See arXiv 2005.12729, section 3; the paper of PPO has no clip of values.

    Args:
        values: the critic's, with a gradient, [tokens].
        before: the values at the start of the step, [tokens].
        returns: the targets, [tokens].
        clip: maximal change of a value in a step; None: unlimited.

    """
    losses = (values - returns).square() / 2
    if clip is None:
        return ValueLoss(losses, torch.zeros_like(losses, dtype=torch.bool))
    # Bounds of the value, not of its change: within them a value keeps every bit, and does not count as clipped.
    held = (values.clamp(before - clip, before + clip) - returns).square() / 2
    return ValueLoss(torch.maximum(losses, held), held > losses)
