"""The losses of one micro-batch in torch: the policy's, composed from an algorithm's options, and a critic's.

First the parts, each with its equation: ratios, clips, KL estimators, importance corrections, and divisors of sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from rlboost.services.trainer.domain.loss.function import MAX_PREFIX, MISMATCH, LossFn, TokenBatch, TokenLoss
from rlboost.shared.errors import Fatal
from rlboost.shared.job.algorithm import (
    Aggregation,
    Clip,
    Importance,
    ImportanceLevel,
    KlEstimator,
    RatioLevel,
    RejectionLevel,
    RejectionSpec,
)
from rlboost.shared.job.spec import GeneratingJob

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


# --- The policy loss of one micro-batch, composed from an algorithm's options, in torch -------------------------------
# Losses are sums, not means: the engine divides by the summed `divisor` of an update's micro-batches, which gives the
# exact mean over micro-batches and ranks.


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """A `LossFn`; the fields are options of `AlgorithmSpec`, documented there.

    It returns the sums `tokens` and `divisor`; `loss`; `abs_log_ratio` and `kl`, between the current weights and those
    that generated the tokens; `mismatch_kl`; `ratio` and `max_ratio` before the clip and, where there
    is one, `ratio_clipped` and `max_ratio_clipped` after it, `clipped_low` and `clipped_high`; `tis_capped`, with
    importance weights, the number of tokens whose weight was changed; `rejected`, with a rejection, the number of
    tokens left out; `reference_kl`, with a reference; `policy_entropy`, with entropies.
    """

    ratio: RatioLevel = "token"
    clip: Clip = "none"
    clip_low: float = 1.0
    clip_high: float = 1.0
    user_loss: TokenLoss | None = None
    """`algorithm.loss`: replaces ratio and clip."""
    aggregation: Aggregation = "token_mean"
    max_tokens: int = 1
    """`sampling.max_tokens`, for the aggregation `constant`."""
    decoupled: bool = False
    """Whether the ratio is to the weights at the start of the step, with an importance weight for older ones."""
    tis_cap: float | None = None
    """Cap of importance weights; None: no weights."""
    importance: Importance = "truncate"
    rollout_is: ImportanceLevel = "token"
    rollout_rs: RejectionSpec | None = None
    kl_coef: float = 0.0
    kl_estimator: KlEstimator = "k3"
    entropy_coef: float = 0.0

    def __call__(self, batch: TokenBatch) -> tuple[Tensor, dict[str, float]]:
        """Return the summed loss and the sums.

        Raises:
            Fatal: the function of `algorithm.loss` does not return one number per token, or has no gradient.

        """
        proximal = batch.logprobs.detach() if batch.proximal is None else batch.proximal
        since_sampled = proximal - batch.sampled
        log_ratio = batch.logprobs - (proximal if self.decoupled else batch.sampled)
        level = sequence_ratios if self.ratio == "sequence" else token_ratios
        ratio = level(log_ratio, batch.lengths)
        clipped = self._clipped(ratio, batch)
        losses = self._losses(ratio, clipped, batch)
        sums: dict[str, Tensor] = {}
        if self.decoupled and self.tis_cap is not None:
            raw = engine_ratios(self.rollout_is, since_sampled, batch.lengths)
            weights = IMPORTANCE_RULES[self.importance](raw, self.tis_cap)
            losses = weights * losses
            sums["tis_capped"] = (weights != raw).sum()
        if batch.reference is not None:
            kl = ESTIMATORS[self.kl_estimator](batch.logprobs, batch.reference)
            if self.kl_coef:
                losses = losses + self.kl_coef * kl
            sums["reference_kl"] = kl.detach().sum()
        if batch.entropies is not None:
            losses = losses - self.entropy_coef * batch.entropies
            sums["policy_entropy"] = batch.entropies.detach().sum()
        if self.rollout_rs is not None:
            stay = accepted(self.rollout_rs, since_sampled, batch.lengths)
            losses = torch.where(stay, losses, 0.0)
            sums["rejected"] = (~stay).sum()
        total = self._summed(losses, batch.lengths)
        with torch.no_grad():
            sums |= _sums(total, ratio, batch, proximal)
            if clipped is not None:
                sums |= _clip_sums(clipped)
            values = torch.stack(list(sums.values())).tolist()
        counts = {"tokens": sum(batch.lengths), "divisor": divisor(self.aggregation, batch.lengths)}
        return total, {**{name: float(n) for name, n in counts.items()}, **dict(zip(sums, values, strict=True))}

    def _clipped(self, ratio: Tensor, batch: TokenBatch) -> Clipped | None:
        if self.user_loss is not None or self.clip == "none":
            return None
        if self.clip == "cispo":
            return cispo_clip(ratio, batch.logprobs, batch.advantages, self.clip_low, self.clip_high)
        return ppo_clip(ratio, batch.advantages, self.clip_low, self.clip_high)

    def _losses(self, ratio: Tensor, clipped: Clipped | None, batch: TokenBatch) -> Tensor:
        if self.user_loss is None:
            return -(unclipped(ratio, batch.advantages) if clipped is None else clipped.objective)
        losses = self.user_loss(batch)
        if not isinstance(losses, Tensor) or losses.shape != batch.logprobs.shape:
            found = f"a tensor of shape {list(losses.shape)}" if isinstance(losses, Tensor) else type(losses).__name__
            raise Fatal(
                f"algorithm.loss returned {found}: return one number per token, shape [{batch.logprobs.numel()}]"
            )
        if batch.logprobs.requires_grad and not losses.requires_grad:
            raise Fatal("algorithm.loss returned a tensor without a gradient: compute it from batch.logprobs")
        return losses

    def _summed(self, losses: Tensor, lengths: tuple[int, ...]) -> Tensor:
        if self.aggregation in ("token_mean", "sequence_sum"):
            return losses.sum()
        factors = [factor(self.aggregation, length, self.max_tokens) for length in lengths]
        parts = [part.sum() for part in torch.split(losses, list(lengths))]
        return torch.stack([part * by for part, by in zip(parts, factors, strict=True)]).sum()


def weighted_likelihood(batch: TokenBatch) -> Tensor:
    """Return a loss of value 0 whose gradient is -A times that of log pi; `preference` computes the actual loss."""
    return -batch.advantages * (batch.logprobs - batch.logprobs.detach())


PAIR_LOSS = PolicyLoss(user_loss=weighted_likelihood, aggregation="sequence_sum")
"""The loss of preference pairs, whose rows have weights."""


def job_loss(spec: GeneratingJob, user_loss: TokenLoss | None = None) -> LossFn:
    """Return the loss of a job; `user_loss` is the function of `algorithm.loss`, if there is one."""
    algorithm = spec.algorithm
    if algorithm.preference is not None:
        return PAIR_LOSS
    return PolicyLoss(
        ratio=algorithm.ratio or "token",
        clip=algorithm.clip or "none",
        clip_low=algorithm.clip_low or 1.0,
        clip_high=algorithm.clip_high or 1.0,
        user_loss=user_loss,
        aggregation=algorithm.aggregation or "token_mean",
        max_tokens=spec.sampling.max_tokens,
        decoupled=algorithm.is_decoupled(spec.elastic.max_staleness),
        tis_cap=algorithm.tis_cap if isinstance(algorithm.tis_cap, float) else None,
        importance=algorithm.importance or "truncate",
        rollout_is=algorithm.rollout_is or "token",
        rollout_rs=algorithm.rollout_rs,
        # With a critic, the penalty is part of the rewards.
        kl_coef=algorithm.kl_coef if algorithm.critic is None else 0.0,
        kl_estimator=algorithm.kl_estimator or "k3",
        entropy_coef=algorithm.entropy_coef,
    )


def _sums(total: Tensor, ratio: Tensor, batch: TokenBatch, proximal: Tensor) -> dict[str, Tensor]:
    log_ratio = batch.logprobs - batch.sampled
    return {
        "loss": total,
        "abs_log_ratio": log_ratio.abs().sum(),
        "kl": k3(batch.sampled, batch.logprobs).sum(),
        MISMATCH: k3(batch.sampled, proximal).sum(),
        "ratio": ratio.sum(),
        f"{MAX_PREFIX}ratio": ratio.max(),
    }


def _clip_sums(clipped: Clipped) -> dict[str, Tensor]:
    return {
        "ratio_clipped": clipped.ratio.sum(),
        f"{MAX_PREFIX}ratio_clipped": clipped.ratio.max(),
        "clipped_low": clipped.low.sum(),
        "clipped_high": clipped.high.sum(),
    }


# --- The loss of a critic, in torch -----------------------------------------------------------------------------------


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
