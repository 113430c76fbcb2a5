"""The loss of a critic, in torch."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class ValueLoss(NamedTuple):
    """Columns with one entry a token."""

    losses: Tensor
    clipped: Tensor
    """Whether the clip holds the token: its value has gone too far, and has no gradient."""


def value_loss(values: Tensor, before: Tensor, returns: Tensor, clip: float | None) -> ValueLoss:
    """Return max((v - R)^2, (clip(v, v_before - clip, v_before + clip) - R)^2) / 2: PPO's, as it is implemented.

    See arXiv 2005.12729, section 3; the paper of PPO has no clip of values.

    Args:
        values: the critic's, with a gradient, [tokens].
        before: what it said when the step began, [tokens].
        returns: what it should say, [tokens].
        clip: how far a value may move in a step; None is no bound.

    """
    losses = (values - returns).square() / 2
    if clip is None:
        return ValueLoss(losses, torch.zeros_like(losses, dtype=torch.bool))
    held = (before + (values - before).clamp(-clip, clip) - returns).square() / 2
    return ValueLoss(torch.maximum(losses, held), held > losses)
