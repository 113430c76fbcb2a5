"""The clipped policy-gradient loss (PPO, arXiv 1707.06347) with DAPO's clip-higher (arXiv 2503.14476), in torch.

Sums, never means: the engine divides by the token count of the whole update, which gives the exact token mean over
micro-batches and ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

Loss = tuple[Tensor, dict[str, float]]
LossFn = Callable[[Tensor, Tensor, Tensor, Tensor | None], Loss]

SUMS = ("loss", "clipped_low", "clipped_high", "abs_log_ratio", "kl")
"""Summed over tokens: the loss, tokens beyond either clip, |log ratio|, and a KL estimate; `tokens` counts them. The
last two compare what is trained with what generated, however old that is."""
TIS_CAPPED = "tis_capped"
"""Sum of `decoupled_loss` alone: tokens whose importance weight is cut."""


def clipped_loss(clip_low: float, clip_high: float) -> LossFn:
    """Return the loss function of one update on tokens of the very weights that the step began with.

    It takes three float32 columns with one entry a completion token: log-probabilities under the weights being trained,
    log-probabilities from the rollout, and advantages; and a fourth that it has no use for. It returns the summed loss
    and the sums `SUMS`.
    """

    def loss(logprobs: Tensor, rollout_logprobs: Tensor, advantages: Tensor, _proximal: Tensor | None = None) -> Loss:
        log_ratio = logprobs - rollout_logprobs
        ratio = log_ratio.exp()
        total = -_objective(ratio, advantages, clip_low, clip_high).sum()
        with torch.no_grad():
            sums = _sums(total, ratio, advantages, clip_low, clip_high, log_ratio)
        return total, _named(logprobs, SUMS, sums)

    return loss


def decoupled_loss(clip_low: float, clip_high: float, tis_cap: float | None) -> LossFn:
    """Return the loss function of one update on tokens of older weights: the decoupled objective of AReaL.

    See arXiv 2505.24298, and arXiv 2110.00641 where it comes from. The ratio that is clipped is to the *proximal*
    policy, the weights that the step began with: it says how far this step may go. How far the weights had gone before,
    since a token was drawn, is corrected by an importance weight, min(proximal / rollout, `tis_cap`), which has no
    gradient.

    Args:
        clip_low: the ratio is clipped at 1 - this.
        clip_high: and at 1 + this.
        tis_cap: importance weights are cut here; None leaves the tokens unweighted.

    Returns:
        A function like `clipped_loss`'s. Its fourth column is the log-probabilities under the proximal policy; None
        where that is still the one being trained. Its sums have `TIS_CAPPED` too.

    """
    cap = math.inf if tis_cap is None else tis_cap

    def loss(logprobs: Tensor, rollout_logprobs: Tensor, advantages: Tensor, proximal: Tensor | None = None) -> Loss:
        proximal = logprobs.detach() if proximal is None else proximal
        weight = torch.ones_like(proximal) if tis_cap is None else (proximal - rollout_logprobs).exp()
        ratio = (logprobs - proximal).exp()
        total = -(weight.clamp(max=cap) * _objective(ratio, advantages, clip_low, clip_high)).sum()
        with torch.no_grad():
            sums = _sums(total, ratio, advantages, clip_low, clip_high, logprobs - rollout_logprobs)
            sums.append((weight > cap).sum())
        return total, _named(logprobs, (*SUMS, TIS_CAPPED), sums)

    return loss


def _objective(ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float) -> Tensor:
    return torch.minimum(ratio * advantages, ratio.clamp(1.0 - clip_low, 1.0 + clip_high) * advantages)


def _sums(
    total: Tensor, ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float, log_ratio: Tensor
) -> list[Tensor]:
    """Return `SUMS`; `ratio` is the clipped one, `log_ratio` that of what is trained to what generated."""
    return [
        total,
        ((ratio < 1.0 - clip_low) & (advantages < 0)).sum(),
        ((ratio > 1.0 + clip_high) & (advantages > 0)).sum(),
        log_ratio.abs().sum(),
        # k3 estimator of KL(rollout || trained): http://joschu.net/blog/kl-approx.html
        (log_ratio.exp() - 1.0 - log_ratio).sum(),
    ]


def _named(logprobs: Tensor, names: tuple[str, ...], sums: list[Tensor]) -> dict[str, float]:
    return {"tokens": float(logprobs.numel()), **dict(zip(names, torch.stack(sums).tolist(), strict=True))}
