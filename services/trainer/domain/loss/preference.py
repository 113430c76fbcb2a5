"""Preference losses over pairs: the best of a group against its worst.

A pair's loss depends on both completions, which may be in different micro-batches. So the loss is computed in advance
from log-probabilities under the current weights. Its derivative with respect to the margin is a number, and that number
times the gradient of each completion's log-probability is exactly the gradient of the loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlboost.services.trainer.domain.rewards import all_equal, is_equal
from rlboost.shared.job.algorithm import PreferenceSpec

Array = np.ndarray[Any, np.dtype[np.float64]]

_PER_PAIR = 2
"""Completions per pair: corrects sums that the engine divides by the number of completions."""


@dataclass(frozen=True, slots=True)
class PairLosses:
    """Losses and gradient weights; columns have one entry per pair."""

    losses: Array
    weights: Array
    """Weight of the better completion's log-likelihood; the worse one has the negative weight. The mean over
    completions of the weighted log-likelihoods has minus the gradient of the mean loss over pairs."""


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


def sequence_log_ratio(trained: Array, start: Array) -> float:
    """Return the log ratio of a completion's probability under the current and the initial weights.

    Args:
        trained: log-probabilities of its tokens under the current weights.
        start: under the job's initial weights.

    """
    return float(np.sum(trained, dtype=np.float64) - np.sum(start, dtype=np.float64))


def pair_losses(margins: Array, spec: PreferenceSpec) -> PairLosses:
    """Return the loss of each pair and the weights that give its gradient.

    h is the margin: the log ratio of the best minus that of the worst.

    `sigmoid`: DPO, arXiv 2305.18290, equation 7, -log sigma(beta h); with label smoothing e, after the note on
    conservative DPO of its author, -(1 - e) log sigma(beta h) - e log sigma(-beta h). `ipo`: arXiv 2310.12036,
    equation 17, (h - 1 / (2 beta))^2.
    """
    if spec.variant == "ipo":
        beyond = margins - 1.0 / (2.0 * spec.beta)
        return PairLosses(np.square(beyond), -_PER_PAIR * 2.0 * beyond)
    scaled, smoothing = spec.beta * margins, spec.label_smoothing
    losses = (1.0 - smoothing) * np.logaddexp(0.0, -scaled) + smoothing * np.logaddexp(0.0, scaled)
    slopes = spec.beta * (smoothing * _sigmoid(scaled) - (1.0 - smoothing) * _sigmoid(-scaled))
    return PairLosses(losses, -_PER_PAIR * slopes)


def pair_sums(margins: Array, judged: PairLosses, spec: PreferenceSpec) -> dict[str, float]:
    """Return the sums of these pairs for `sums.add`; `loss` counts each pair's loss once per completion."""
    return {
        "loss": _PER_PAIR * float(judged.losses.sum()),
        "pairs": float(len(margins)),
        "pair_losses": float(judged.losses.sum()),
        "pair_margins": float(spec.beta * margins.sum()),
        "pairs_right": float((margins > 0).sum()),
    }


def _sigmoid(values: Array) -> Array:
    return np.exp(-np.logaddexp(0.0, -values))
