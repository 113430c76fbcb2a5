"""The clipped policy-gradient loss (PPO, arXiv 1707.06347) with DAPO's clip-higher (arXiv 2503.14476), in torch.

Sums, never means: the engine divides by the token count of the whole update, which gives the exact token mean over
micro-batches and ranks.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Loss = tuple[Tensor, dict[str, float]]

SUMS = ("loss", "clipped_low", "clipped_high", "abs_log_ratio", "kl")
"""Summed over tokens: the loss, tokens beyond either clip, |log ratio|, and a KL estimate; `tokens` counts them."""


def clipped_loss(clip_low: float, clip_high: float) -> Callable[[Tensor, Tensor, Tensor], Loss]:
    """Return the loss function of one update.

    It takes three float32 columns with one entry a completion token: log-probabilities under the weights being trained,
    log-probabilities from the rollout, and advantages. It returns the summed loss and the sums `SUMS`.
    """

    def loss(logprobs: Tensor, rollout_logprobs: Tensor, advantages: Tensor) -> Loss:
        log_ratio = logprobs - rollout_logprobs
        ratio = log_ratio.exp()
        unclipped = ratio * advantages
        clipped = ratio.clamp(1.0 - clip_low, 1.0 + clip_high) * advantages
        total = -torch.minimum(unclipped, clipped).sum()
        with torch.no_grad():
            sums = torch.stack(
                [
                    total,
                    ((ratio < 1.0 - clip_low) & (advantages < 0)).sum(),
                    ((ratio > 1.0 + clip_high) & (advantages > 0)).sum(),
                    log_ratio.abs().sum(),
                    # k3 estimator of KL(rollout || trained): http://joschu.net/blog/kl-approx.html
                    (ratio - 1.0 - log_ratio).sum(),
                ]
            ).tolist()
        return total, {"tokens": float(logprobs.numel()), **dict(zip(SUMS, sums, strict=True))}

    return loss
