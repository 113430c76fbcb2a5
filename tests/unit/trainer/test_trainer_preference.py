"""The best of a group against its worst: the losses of their papers, and that parted pairs keep their gradient."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from rlboost.services.trainer.domain.loss.inputs import TokenBatch
from rlboost.services.trainer.domain.loss.policy import job_loss
from rlboost.services.trainer.domain.loss.preference import best_and_worst, pair_losses, pair_sums, sequence_log_ratio
from rlboost.shared.job.algorithm import PreferenceSpec
from tests.support.jobs import parse_rl

Array = np.ndarray[Any, np.dtype[np.float64]]
SPECS = {
    "dpo": PreferenceSpec(beta=0.3),
    "smoothed": PreferenceSpec(beta=0.3, label_smoothing=0.1),
    "ipo": PreferenceSpec(variant="ipo", beta=0.3),
}


def papers(kind: str, h: float) -> float:
    """As printed, without a care for large numbers."""

    def sigma(x: float) -> float:
        return 1 / (1 + math.exp(-x))

    losses: dict[str, Callable[[], float]] = {
        "dpo": lambda: -math.log(sigma(0.3 * h)),
        "smoothed": lambda: -0.9 * math.log(sigma(0.3 * h)) - 0.1 * math.log(sigma(-0.3 * h)),
        "ipo": lambda: (h - 1 / (2 * 0.3)) ** 2,
    }
    return float(losses[kind]())


@pytest.mark.parametrize("kind", sorted(SPECS))
def test_losses_are_their_papers_and_weights_their_derivatives(kind: str) -> None:
    margins = np.linspace(-9, 9, 37)
    judged = pair_losses(margins, SPECS[kind])
    np.testing.assert_allclose(judged.losses, [papers(kind, h) for h in margins], atol=1e-6)
    d = 1e-6
    slopes = [(papers(kind, h + d) - papers(kind, h - d)) / (2 * d) for h in margins]
    np.testing.assert_allclose(judged.weights, -2 * np.array(slopes), atol=1e-6)


def test_margins_of_any_size_have_finite_losses() -> None:
    judged = pair_losses(np.array([-1e6, 1e6]), PreferenceSpec(beta=1.0))
    assert judged.losses.tolist() == [1e6, 0.0]
    assert judged.weights.tolist() == [2.0, 0.0]


def test_best_and_worst_is_none_for_equal_rewards() -> None:
    assert best_and_worst([0.0, 1.0, 0.5, 1.0, 0.0]) == (1, 0)
    assert best_and_worst([2.0, 1.0]) == (0, 1)
    assert best_and_worst([1.0, 1.0, 1.0]) is None


def test_pair_sums_are_sums_over_pairs_and_the_loss_counts_both_completions() -> None:
    margins = np.array([2.0, -1.0, 0.0])
    judged = pair_losses(margins, SPECS["dpo"])
    found = pair_sums(margins, judged, SPECS["dpo"])
    assert found["pairs"] == 3
    assert found["pairs_right"] == 1
    assert found["pair_margins"] == pytest.approx(0.3)
    assert found["pair_losses"] == pytest.approx(sum(papers("dpo", h) for h in margins))
    assert found["loss"] == pytest.approx(2 * found["pair_losses"])


# --- the gradient -----------------------------------------------------------------------------------------------------

VOCABULARY, CONTEXTS = 5, 3
LOSS = job_loss(
    parse_rl(
        {
            "model": "m",
            "data": {"train": "t"},
            "reward": {"function": "m:f"},
            "algorithm": {"name": "dpo"},
            "steps": 1,
        }
    )
)


def logprobs(table: Tensor, tokens: list[int]) -> Tensor:
    """A policy that is a table: the logits of a token depend on its place modulo `CONTEXTS`."""
    places = torch.arange(len(tokens)) % CONTEXTS
    return table.log_softmax(-1)[places, torch.tensor(tokens)]


def tables() -> tuple[Tensor, Tensor]:
    rng = np.random.default_rng(0)
    start = torch.tensor(rng.standard_normal((CONTEXTS, VOCABULARY)))
    return (start + 0.5 * torch.tensor(rng.standard_normal(start.shape))).requires_grad_(), start


def written_loss(kind: str, table: Tensor, start: Tensor, pairs: list[tuple[list[int], list[int]]]) -> Tensor:
    """Return the mean loss over pairs, in one graph: what DPO's authors would write."""
    spec, losses = SPECS[kind], []
    for best, worst in pairs:
        h = (logprobs(table, best) - logprobs(start, best)).sum() - (
            logprobs(table, worst) - logprobs(start, worst)
        ).sum()
        if kind == "ipo":
            losses.append((h - 1 / (2 * spec.beta)) ** 2)
        else:
            e = spec.label_smoothing
            losses.append(-(1 - e) * functional.logsigmoid(spec.beta * h) - e * functional.logsigmoid(-spec.beta * h))
    return torch.stack(losses).mean()


def trained_gradient(
    kind: str, table: Tensor, start: Tensor, pairs: list[tuple[list[int], list[int]]], cut: list[list[tuple[int, int]]]
) -> Tensor:
    """Return the gradient as an update has it: weights first, then micro-batches of any completions."""
    with torch.no_grad():
        gone = [
            [sequence_log_ratio(logprobs(table, y).numpy(), logprobs(start, y).numpy()) for y in pair] for pair in pairs
        ]
    weights = pair_losses(np.array([best - worst for best, worst in gone]), SPECS[kind]).weights
    divisor = 0.0
    for part in cut:
        completions = [pairs[pair][side] for pair, side in part]
        lengths = tuple(map(len, completions))
        by = [(1 - 2 * side) * weights[pair] for pair, side in part]
        now = torch.cat([logprobs(table, tokens) for tokens in completions])
        advantages = torch.tensor(np.repeat(by, lengths))
        total, sums = LOSS(TokenBatch(now, now.detach() - 0.1, advantages, lengths))
        assert total.item() == 0.0
        total.backward()
        divisor += sums["divisor"]
    assert table.grad is not None
    return table.grad / divisor


@pytest.mark.parametrize("kind", sorted(SPECS))
@settings(max_examples=15, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 5), st.randoms(use_true_random=False), st.integers(1, 6))
def test_the_gradient_of_parted_pairs_is_that_of_the_written_loss(
    kind: str, seed: int, n_pairs: int, random: Any, n_each: int
) -> None:
    rng = np.random.default_rng(seed)
    pairs = [
        (
            rng.integers(0, VOCABULARY, rng.integers(1, 8)).tolist(),
            rng.integers(0, VOCABULARY, rng.integers(1, 8)).tolist(),
        )
        for _ in range(n_pairs)
    ]
    table, start = tables()
    (expected,) = torch.autograd.grad(written_loss(kind, table, start, pairs), table)
    completions = [(pair, side) for pair in range(n_pairs) for side in (0, 1)]
    random.shuffle(completions)
    cut = [completions[i : i + n_each] for i in range(0, len(completions), n_each)]
    found = trained_gradient(kind, table, start, pairs, cut)
    torch.testing.assert_close(found, expected, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("kind", sorted(SPECS))
def test_it_is_that_of_finite_differences_too(kind: str) -> None:
    pairs = [([1, 2, 3], [0, 4]), ([2], [2, 2, 1, 0])]
    table, start = tables()
    found = trained_gradient(kind, table, start, pairs, [[(0, 0), (1, 1)], [(1, 0)], [(0, 1)]])
    d = 1e-6
    for place in np.ndindex(CONTEXTS, VOCABULARY):
        unit = torch.zeros_like(start)
        unit[place] = d
        with torch.no_grad():
            above, below = (written_loss(kind, table + by * unit, start, pairs) for by in (1, -1))
        assert found[place].item() == pytest.approx(((above - below) / (2 * d)).item(), abs=1e-6)
