"""What losses are composed of: ratios, clips, KL estimators, importance corrections, and divisors of sums."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from rlboost.shared.job.algorithm import Aggregation, RejectionLevel, RejectionSpec

# --- Probability ratios between the current weights and those that generated the tokens -------------------------------


def token_ratios(log_ratios: Tensor, lengths: tuple[int, ...]) -> Tensor:
    """Return pi / pi_old of each token: PPO, arXiv 1707.06347, equation 6; GRPO and most others."""
    del lengths
    return log_ratios.exp()


def sequence_ratios(log_ratios: Tensor, lengths: tuple[int, ...]) -> Tensor:
    """Return (pi(y) / pi_old(y)) ** (1 / length) of each completion, at each of its tokens.

    GSPO, arXiv 2507.18071, equation 7. The gradient of one completion's ratio reaches all of its tokens.
    """
    means = torch.stack([part.mean() for part in torch.split(log_ratios, list(lengths))])
    return at_each_token(means.exp(), lengths)


def at_each_token(of_completions: Tensor, lengths: tuple[int, ...]) -> Tensor:
    """Return the value of each token's completion, [tokens].

    Args:
        of_completions: one value per completion, [completions].
        lengths: tokens of each completion.

    """
    repeats = torch.tensor(lengths, device=of_completions.device)
    return of_completions.repeat_interleave(repeats, output_size=sum(lengths))


# --- Estimators of KL(trained || reference) from tokens that the policy generated: http://joschu.net/blog/kl-approx.html


def k1(logprobs: Tensor, reference: Tensor) -> Tensor:
    """Return log pi - log ref: its mean is the KL, but as a loss its mean gradient on-policy is 0."""
    return logprobs - reference


def k2(logprobs: Tensor, reference: Tensor) -> Tensor:
    """Return (log pi - log ref)^2 / 2: never negative, biased; on-policy its gradient is the KL's on average.

    The one of REINFORCE++ with a baseline, arXiv 2501.03262.
    """
    return (logprobs - reference).square() / 2


def k3(logprobs: Tensor, reference: Tensor) -> Tensor:
    """Return ref / pi - 1 - log(ref / pi): never negative, and its mean is the KL. GRPO's, arXiv 2402.03300, eq. 4."""
    log_ratio = reference - logprobs
    return log_ratio.exp() - 1.0 - log_ratio


ESTIMATORS = {"k1": k1, "k2": k2, "k3": k3}


# --- Clips of the ratio. Each returns objectives to maximize, one entry per token -------------------------------------


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


# --- Corrections for tokens generated with other probabilities than those at the start of the step --------------------
# The difference comes from older weights (staleness) or from numerics of the inference engine (mismatch). The ratio
# trainer / engine of a token or a completion either weights the loss, without a gradient, or decides whether tokens are
# left out of it. The names are those of verl's `rollout_correction`.


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


# --- Aggregates the token losses of an update: a factor per token, and a divisor of the sum ---------------------------
# The factor of a token depends only on its completion, and the divisor is a count. So the sum over any micro-batches,
# divided once at the end, is the aggregate of the whole update.


def factor(kind: Aggregation, length: int, max_tokens: int) -> float:
    """Return the factor of each token of a completion of `length` tokens.

    Args:
        kind: `algorithm.aggregation`. `token_mean`: DAPO, arXiv 2503.14476, equation 8, over the whole update;
            `sequence_mean`: GRPO, arXiv 2402.03300, equation 3; `sequence_sum`: REINFORCE of whole completions as in
            RLOO, arXiv 2402.14740; `constant`: Dr. GRPO, arXiv 2503.20783, with the generation limit as the constant.
        length: number of tokens of the completion.
        max_tokens: `sampling.max_tokens`.

    """
    match kind:
        case "sequence_mean":
            return 1.0 / length
        case "constant":
            return 1.0 / max_tokens
        case "token_mean" | "sequence_sum":
            return 1.0


def divisor(kind: Aggregation, lengths: Sequence[int]) -> int:
    """Return the contribution of completions to the divisor: their tokens for `token_mean`, otherwise their number."""
    return sum(lengths) if kind == "token_mean" else len(lengths)
