"""Losses of preference pairs, and of a reward model over pairs or labelled conversations, computed in advance.

A pair's loss depends on both completions, which may be in different micro-batches. So the loss is computed in advance
from log-probabilities, or scores, under the current weights. Its derivative with respect to the margin is a number, and
that number times the gradient of each completion's log-probability, or score, is exactly the gradient of the loss.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np

from rlboost.services.trainer.domain.advantages import all_equal, is_equal
from rlboost.services.trainer.domain.plan import TrainingRow, constant
from rlboost.shared.job.algorithm import PreferenceSpec
from rlboost.shared.wire import F32, unpack

Array = np.ndarray[Any, np.dtype[np.float64]]

PER_PAIR = 2
"""Completions per pair: corrects sums that the engine divides by the number of completions."""
_PAIR_MEANS = {
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
    return {name: sums[key] / sums["pairs"] for name, key in _PAIR_MEANS.items()} if sums.get("pairs") else {}


def _difference(of_pairs: Array) -> Array:
    return np.asarray(of_pairs[:, 0] - of_pairs[:, 1])


def _sigmoid(values: Array) -> Array:
    return np.exp(-np.logaddexp(0.0, -values))


# --- A reward model: pairs of conversations, which differ in the completion, or labelled ones -------------------------

_SCORE_MEANS = {"accuracy": "scores_right", "margin": "score_margins", "mean_reward": "score_means"}
"""Metric, as TRL names it -> the sum that it is the mean of, over pairs, or labelled conversations without a margin."""
_EXTREMES = ("min_reward", "max_reward")


def weighted_labels(
    rows: Sequence[TrainingRow], scores: Sequence[bytes], labels: Sequence[float]
) -> tuple[list[TrainingRow], dict[str, float]]:
    """Return the rows with the weight of each score, and the sums.

    The loss of a conversation is the cross entropy of its label, 1.0 or 0.0, and sigma(r), of an outcome-supervised
    reward model (arXiv 2110.14168).

    Args:
        rows: labelled conversations.
        scores: float32 column per row, of one number: its score r under the current weights.
        labels: of each row.

    """
    found: Array = np.array([unpack(score, F32)[0] for score in scores], np.float64)
    targets: Array = np.asarray(labels, np.float64)
    losses = np.logaddexp(0.0, found) - targets * found
    weights = targets - _sigmoid(found)
    return _with_weights(rows, weights), {
        "loss": float(losses.sum()),
        "scored": float(len(found)),
        "scores_right": float(((found > 0) == (targets > 0)).sum()),
        "score_means": float(found.sum()),
        **_extremes(found),
    }


def _with_weights(rows: Sequence[TrainingRow], weights: Array) -> list[TrainingRow]:
    columns = zip(rows, weights.ravel().tolist(), strict=True)
    return [replace(row, advantages=constant(weight, row)) for row, weight in columns]


def _extremes(scores: Array) -> dict[str, float]:
    return {"min_reward": float(scores.min()), "max_reward": float(scores.max())}


def weighted_scores(
    rows: Sequence[TrainingRow], scores: Sequence[bytes], margins: Sequence[float], center: float
) -> tuple[list[TrainingRow], dict[str, float]]:
    """Return the rows with the weight of each score, and the pairs' sums; `loss` counts each pair's once per row.

    The loss of a pair is -log sigma(r_chosen - r_rejected - m) (Llama 2, arXiv 2307.09288, equation 2), plus
    c (r_chosen + r_rejected)^2 (arXiv 2312.09244), which keeps scores around 0.

    Args:
        rows: the better and the worse conversation of a pair, then of the next.
        scores: float32 column per row, of one number: its score under the current weights.
        margins: m of each pair.
        center: c.

    """
    found: Array = np.array([unpack(score, F32)[0] for score in scores], np.float64).reshape(-1, 2)
    totals, differences = found.sum(1), found[:, 0] - found[:, 1]
    beyond = differences - np.asarray(margins)
    losses = np.logaddexp(0.0, -beyond) + center * np.square(totals)
    slopes = -_sigmoid(-beyond)
    pulls = 2.0 * center * totals
    # The mean over rows of weight x score has minus the gradient of the mean loss over pairs.
    weights = -PER_PAIR * np.stack([slopes + pulls, pulls - slopes], axis=1)
    return _with_weights(rows, weights), {
        "loss": PER_PAIR * float(losses.sum()),
        "scored": float(len(found)),
        "scores_right": float((differences > 0).sum()),
        "score_margins": float(differences.sum()),
        "score_means": float(totals.sum()) / 2,
        **_extremes(found),
    }


def score_metrics(sums: Mapping[str, float]) -> dict[str, float]:
    """Return means over pairs or labelled conversations and the extremes of their scores, none without scores."""
    if not (n_scored := sums.get("scored")):
        return {}
    means = {name: sums[key] / n_scored for name, key in _SCORE_MEANS.items() if key in sums}
    return means | {name: sums[name] for name in _EXTREMES}
