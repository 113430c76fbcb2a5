"""The Bradley-Terry loss of a reward model over pairs of conversations, which differ in the completion.

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
"""Metric, as TRL names it -> the sum that it is the mean of, over pairs."""
_EXTREMES = ("min_reward", "max_reward")


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
    weighted_rows = [
        replace(row, advantages=constant(weight, row))
        for row, weight in zip(rows, weights.ravel().tolist(), strict=True)
    ]
    return weighted_rows, {
        "loss": PER_PAIR * float(losses.sum()),
        "scored_pairs": float(len(found)),
        "scores_right": float((differences > 0).sum()),
        "score_margins": float(differences.sum()),
        "score_means": float(totals.sum()) / 2,
        "min_reward": float(found.min()),
        "max_reward": float(found.max()),
    }


def score_metrics(sums: Mapping[str, float]) -> dict[str, float]:
    """Return means over pairs and the extremes of their scores, none without scored pairs."""
    if not (n_pairs := sums.get("scored_pairs")):
        return {}
    return {name: sums[key] / n_pairs for name, key in _MEANS.items()} | {name: sums[name] for name in _EXTREMES}
