"""Preference losses over pairs of completions: the best of a group and its worst, or those of a row of the data.

A pair's loss depends on both completions, which may be in different micro-batches. So the loss is computed in advance
from log-probabilities under the current weights. Its derivative with respect to the margin is a number, and that number
times the gradient of each completion's log-probability is exactly the gradient of the loss.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np

from rlboost.services.trainer.domain.batches import TrainingRow, constant
from rlboost.services.trainer.domain.rewards import all_equal, is_equal
from rlboost.shared.job.algorithm import PreferenceSpec
from rlboost.shared.wire import F32, unpack

Array = np.ndarray[Any, np.dtype[np.float64]]

PER_PAIR = 2
"""Completions per pair: corrects sums that the engine divides by the number of completions."""
_MEANS = {
    "rewards/chosen": "pair_rewards_chosen",
    "rewards/rejected": "pair_rewards_rejected",
    "rewards/margins": "pair_margins",
    "rewards/accuracies": "pairs_right",
    "logps/chosen": "pair_logps_chosen",
    "logps/rejected": "pair_logps_rejected",
}
"""Metric, as TRL names it -> the sum that it is the mean of, over pairs."""


@dataclass(frozen=True, slots=True)
class PairLogprobs:
    """Log-probabilities of completions: arrays [pairs, 2], of each pair the better one first."""

    trained: Array
    """Under the current weights, summed over a completion's tokens."""
    reference: Array
    """Under the job's initial weights."""
    lengths: Array
    """Number of tokens."""

    @classmethod
    def of(cls, trained: Sequence[bytes], reference: Sequence[bytes]) -> Self:
        """Sum float32 columns: two for each pair, one entry per token."""
        columns = [[unpack(column, F32).astype(np.float64) for column in columns] for columns in (trained, reference)]
        trained_sums, reference_sums = (np.array([column.sum() for column in one]).reshape(-1, 2) for one in columns)
        return cls(trained_sums, reference_sums, np.array([float(len(one)) for one in columns[0]]).reshape(-1, 2))


@dataclass(frozen=True, slots=True)
class PairLosses:
    """Losses, [pairs], and gradient weights, [pairs, 2]."""

    losses: Array
    weights: Array
    """Weight of each completion's log-likelihood. The mean over completions of the weighted log-likelihoods has minus
    the gradient of the mean loss over pairs."""


def best_and_worst(rewards: Sequence[float]) -> tuple[int, int] | None:
    """Return the indices of the first highest and the first lowest reward; None if all are equal.

    Online preferences from the policy's own completions: arXiv 2402.04792, with a reward instead of an annotator.
    """
    if all_equal(rewards):
        return None
    best, worst = max(rewards), min(rewards)
    return (
        next(place for place, reward in enumerate(rewards) if is_equal(reward, best)),
        next(place for place, reward in enumerate(rewards) if is_equal(reward, worst)),
    )


def pair_losses(logprobs: PairLogprobs, spec: PreferenceSpec) -> PairLosses:
    """Return the loss of each pair and the weights that give its gradient.

    h is the margin: the log ratio of the better one's probability under the current and the initial weights, minus that
    of the worse one.

    `sigmoid`: DPO, arXiv 2305.18290, equation 7, -log sigma(beta h); with label smoothing e, after the note on
    conservative DPO of its author, -(1 - e) log sigma(beta h) - e log sigma(-beta h). `robust`: arXiv 2403.00409,
    equation 3, (-(1 - e) log sigma(beta h) + e log sigma(-beta h)) / (1 - 2 e). `ipo`: arXiv 2310.12036,
    equation 17, (h - 1 / (2 beta))^2, with log ratios divided by their number of tokens, as the paper's authors did
    according to TRL.
    """
    scale = 1.0 / logprobs.lengths if spec.variant == "ipo" else np.ones_like(logprobs.lengths)
    margins = _difference(scale * (logprobs.trained - logprobs.reference))
    if spec.variant == "ipo":
        beyond = margins - 1.0 / (2.0 * spec.beta)
        losses, slopes = np.square(beyond), 2.0 * beyond
    else:
        scaled, wrong = spec.beta * margins, spec.label_smoothing
        if spec.variant == "robust":
            right, wrong = (1.0 - wrong) / (1.0 - 2.0 * wrong), -wrong / (1.0 - 2.0 * wrong)
        else:
            right = 1.0 - wrong
        losses = right * np.logaddexp(0.0, -scaled) + wrong * np.logaddexp(0.0, scaled)
        slopes = spec.beta * (wrong * _sigmoid(scaled) - right * _sigmoid(-scaled))
    return PairLosses(losses, scale * (slopes[:, np.newaxis] * [-PER_PAIR, PER_PAIR]))


def weighted(
    rows: Sequence[TrainingRow], trained: Sequence[bytes], reference: Sequence[bytes], spec: PreferenceSpec
) -> tuple[list[TrainingRow], dict[str, float]]:
    """Return the rows of pairs with their weights and reference, and the pairs' sums.

    Args:
        rows: the better and the worse completion of a pair, then of the next.
        trained: float32 column per row: log-probabilities under the current weights.
        reference: under the initial weights.
        spec: the loss.

    """
    logprobs = PairLogprobs.of(trained, reference)
    found = pair_losses(logprobs, spec)
    columns = zip(rows, found.weights.ravel().tolist(), reference, strict=True)
    weighted_rows = [replace(row, advantages=constant(weight, row), reference=start) for row, weight, start in columns]
    return weighted_rows, pair_sums(logprobs, found, spec)


def pair_sums(logprobs: PairLogprobs, judged: PairLosses, spec: PreferenceSpec) -> dict[str, float]:
    """Return the sums of these pairs for `add_sums`; `loss` counts each pair's loss once per completion."""
    rewards = spec.beta * (logprobs.trained - logprobs.reference)
    margins = _difference(rewards)
    return {
        "loss": PER_PAIR * float(judged.losses.sum()),
        "pairs": float(len(margins)),
        "pair_rewards_chosen": float(rewards[:, 0].sum()),
        "pair_rewards_rejected": float(rewards[:, 1].sum()),
        "pair_margins": float(margins.sum()),
        "pairs_right": float((margins > 0).sum()),
        "pair_logps_chosen": float(logprobs.trained[:, 0].sum()),
        "pair_logps_rejected": float(logprobs.trained[:, 1].sum()),
    }


def pair_metrics(sums: Mapping[str, float]) -> dict[str, float]:
    """Return means over pairs, none without pairs."""
    return {name: sums[key] / sums["pairs"] for name, key in _MEANS.items()} if sums.get("pairs") else {}


def _difference(of_pairs: Array) -> Array:
    return np.asarray(of_pairs[:, 0] - of_pairs[:, 1])


def _sigmoid(values: Array) -> Array:
    return np.exp(-np.logaddexp(0.0, -values))
