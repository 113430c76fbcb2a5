"""The losses of a reward model: over pairs of conversations, which differ in the completion, or over labelled ones.

As with `preference`, the two conversations of a pair may be in different micro-batches: the loss is computed in advance
from the scores under the current weights, and its derivative with respect to each score is the weight of that score.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from rlboost.services.trainer.domain.batches import TrainingRow, constant
from rlboost.services.trainer.domain.loss.preference import PER_PAIR, Array
from rlboost.shared.wire import F32, unpack

_MEANS = {"accuracy": "scores_right", "margin": "score_margins", "mean_reward": "score_means"}
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
    weights = targets - np.exp(-np.logaddexp(0.0, -found))
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


def weighted(
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
    slopes = -np.exp(-np.logaddexp(0.0, beyond))
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
    means = {name: sums[key] / n_scored for name, key in _MEANS.items() if key in sums}
    return means | {name: sums[name] for name in _EXTREMES}
