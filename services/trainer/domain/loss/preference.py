"""The best of a group against its worst: losses of pairs, and what they make of each completion's gradient.

A pair's loss depends on both completions, which micro-batches may part. So the loss of a pair is taken from
log-probabilities that were obtained before, under the weights being trained; its derivative with respect to the margin
is a number, and that number times the gradient of each completion's log-probability is the loss's gradient, exactly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from shared.algorithm import PreferenceSpec

Array = np.ndarray[Any, np.dtype[np.float64]]

_PER_PAIR = 2
"""Completions: what is divided by their number must be as many times as large."""


@dataclass(frozen=True, slots=True)
class Judged:
    """What a loss says of some pairs; columns have one entry a pair."""

    losses: Array
    weights: Array
    """What the better completion's log-likelihood is weighed by, and the worse one's with a minus, in an objective of
    which the mean over completions has the gradient of the mean of the losses over pairs, with a minus."""


def best_and_worst(rewards: Sequence[float]) -> tuple[int, int] | None:
    """Return the places of the highest and the lowest reward, the first of several; None where all are equal.

    Online preferences from the policy's own completions: arXiv 2402.04792, with a reward in place of an annotator.
    """
    if min(rewards) == max(rewards):
        return None
    places = range(len(rewards))
    return max(places, key=lambda place: rewards[place]), min(places, key=lambda place: rewards[place])


def moved(trained: Array, start: Array) -> float:
    """Return how much likelier a completion became since the job began, as a logarithm.

    Args:
        trained: its tokens' log-probabilities under the weights being trained.
        start: under the weights that the job began with.

    """
    return float(np.sum(trained, dtype=np.float64) - np.sum(start, dtype=np.float64))


def judge(margins: Array, spec: PreferenceSpec) -> Judged:
    """Return the loss of each pair, and the weights that it comes down to; h is what best and worst moved apart.

    `sigmoid`: DPO, arXiv 2305.18290, equation 7, -log sigma(beta h); with label smoothing e, after the note on
    conservative DPO of its author, -(1 - e) log sigma(beta h) - e log sigma(-beta h). `ipo`: arXiv 2310.12036,
    equation 17, (h - 1 / (2 beta))^2.
    """
    if spec.variant == "ipo":
        beyond = margins - 1.0 / (2.0 * spec.beta)
        return Judged(np.square(beyond), -_PER_PAIR * 2.0 * beyond)
    scaled, smoothing = spec.beta * margins, spec.label_smoothing
    losses = (1.0 - smoothing) * np.logaddexp(0.0, -scaled) + smoothing * np.logaddexp(0.0, scaled)
    slopes = spec.beta * (smoothing * _sigmoid(scaled) - (1.0 - smoothing) * _sigmoid(-scaled))
    return Judged(losses, -_PER_PAIR * slopes)


def numbers(margins: Array, judged: Judged, spec: PreferenceSpec) -> dict[str, float]:
    """Return what `sums.add` adds up of these pairs; `loss` is as if each of their completions had the pair's."""
    return {
        "loss": _PER_PAIR * float(judged.losses.sum()),
        "pairs": float(len(margins)),
        "pair_losses": float(judged.losses.sum()),
        "pair_margins": float(spec.beta * margins.sum()),
        "pairs_right": float((margins > 0).sum()),
    }


def _sigmoid(values: Array) -> Array:
    return np.exp(-np.logaddexp(0.0, -values))
