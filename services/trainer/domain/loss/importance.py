"""Corrections for tokens generated with other probabilities than those at the start of the step.

The difference comes from older weights (staleness) or from numerics of the inference engine (mismatch). The ratio
trainer / engine of a token or a completion either weights the loss, without a gradient, or decides whether tokens are
left out of it. The names are those of verl's `rollout_correction`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlboost.services.trainer.domain.loss.ratios import at_each_token
from rlboost.shared.job.algorithm import RejectionLevel, RejectionSpec

_MAX_LOG_RATIO = 20.0
"""Bound on log-ratios before `exp`, so that products over long completions stay finite."""


def engine_ratios(level: RejectionLevel, log_ratios: Tensor, lengths: tuple[int, ...]) -> Tensor:
    """Return trainer / engine at each token, [tokens].

    Args:
        level: `token`: the ratio of each token; else that of its completion, as the product over tokens (`sequence`) or
            their geometric mean (`geometric`).
        log_ratios: log p(trainer) - log p(engine) of each token, [tokens].
        lengths: tokens of each completion.

    """
    if level != "token":
        parts = torch.split(log_ratios, list(lengths))
        of_completions = torch.stack([part.sum() if level == "sequence" else part.mean() for part in parts])
        log_ratios = at_each_token(of_completions, lengths)
    return log_ratios.clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO).exp()


def truncated(weights: Tensor, cap: float) -> Tensor:
    """Return min(weight, cap): truncated importance sampling, as in AReaL's decoupled objective, arXiv 2505.24298."""
    return weights.clamp(max=cap)


def masked(weights: Tensor, cap: float) -> Tensor:
    """Return the weights from 1 / cap to cap, and 0 for the others: IcePop's mask, Ring-1T, arXiv 2510.18855."""
    return torch.where((weights >= 1.0 / cap) & (weights <= cap), weights, 0.0)


IMPORTANCE_RULES = {"truncate": truncated, "mask": masked}


def accepted(spec: RejectionSpec, log_ratios: Tensor, lengths: tuple[int, ...]) -> Tensor:
    """Return True for each token that stays in the loss, [tokens].

    As verl's `rollout_rs` and `rollout_token_veto_threshold`.
    """
    result = torch.ones_like(log_ratios, dtype=torch.bool)
    if spec.level is not None:
        ratio, (low, high) = engine_ratios(spec.level, log_ratios, lengths), spec.bounds
        result = (ratio >= low) & (ratio <= high)
    if spec.token_veto is not None:
        lowest = torch.stack([part.min() for part in torch.split(log_ratios, list(lengths))])
        result &= at_each_token(lowest.exp() >= spec.token_veto, lengths)
    return result
