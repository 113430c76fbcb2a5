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

from rlboost.services.trainer.domain.loss.function import TokenBatch
from rlboost.services.trainer.domain.loss.policy import job_loss
from rlboost.services.trainer.domain.loss.preference import (
    PairLogprobs,
    best_and_worst,
    pair_losses,
    pair_metrics,
    pair_sums,
)
from rlboost.shared.job.algorithm import PreferenceSpec
from tests.support.jobs import parse_rl

Array = np.ndarray[Any, np.dtype[np.float64]]
SPECS = {
    "dpo": PreferenceSpec(beta=0.3),
    "smoothed": PreferenceSpec(beta=0.3, label_smoothing=0.1),
    "robust": PreferenceSpec(variant="robust", beta=0.3, label_smoothing=0.1),
    "ipo": PreferenceSpec(variant="ipo", beta=0.3),
}


def of_margins(margins: Array, lengths: tuple[int, int] = (1, 1)) -> PairLogprobs:
    """Return pairs whose log ratios are 0 but for the better one's."""
    trained = np.stack([margins, np.zeros_like(margins)], axis=1)
    return PairLogprobs(trained - 3.0, np.full_like(trained, -3.0), np.full_like(trained, lengths))


def papers(kind: str, h: float) -> float:
    """As printed, without a care for large numbers."""

    def sigma(x: float) -> float:
        return 1 / (1 + math.exp(-x))

    losses: dict[str, Callable[[], float]] = {
        "dpo": lambda: -math.log(sigma(0.3 * h)),
        "smoothed": lambda: -0.9 * math.log(sigma(0.3 * h)) - 0.1 * math.log(sigma(-0.3 * h)),
        "robust": lambda: (-0.9 * math.log(sigma(0.3 * h)) + 0.1 * math.log(sigma(-0.3 * h))) / 0.8,
        "ipo": lambda: (h - 1 / (2 * 0.3)) ** 2,
    }
    return float(losses[kind]())


@pytest.mark.parametrize("kind", sorted(SPECS))
def test_losses_are_their_papers_and_weights_their_derivatives(kind: str) -> None:
    margins = np.linspace(-9, 9, 37)
    judged = pair_losses(of_margins(margins), SPECS[kind])
    np.testing.assert_allclose(judged.losses, [papers(kind, h) for h in margins], atol=1e-6)
    d = 1e-6
    slopes = [(papers(kind, h + d) - papers(kind, h - d)) / (2 * d) for h in margins]
    np.testing.assert_allclose(judged.weights, np.outer(slopes, [-2, 2]), atol=1e-6)


def test_ipo_compares_log_ratios_per_token() -> None:
    judged = pair_losses(of_margins(np.array([6.0]), lengths=(4, 8)), SPECS["ipo"])
    assert judged.losses.tolist() == [pytest.approx(papers("ipo", 6.0 / 4))]
    slope = 2 * (6.0 / 4 - 1 / 0.6)
    assert judged.weights.tolist() == [[pytest.approx(-2 * slope / 4), pytest.approx(2 * slope / 8)]]


def test_margins_of_any_size_have_finite_losses() -> None:
    judged = pair_losses(of_margins(np.array([-1e6, 1e6])), PreferenceSpec(beta=1.0))
    assert judged.losses.tolist() == [1e6, 0.0]
    assert judged.weights.tolist() == [[2.0, -2.0], [0.0, 0.0]]


def test_best_and_worst_is_none_for_equal_rewards() -> None:
    assert best_and_worst([0.0, 1.0, 0.5, 1.0, 0.0]) == (1, 0)
    assert best_and_worst([2.0, 1.0]) == (0, 1)
    assert best_and_worst([1.0, 1.0, 1.0]) is None


def test_pair_sums_are_sums_over_pairs_and_the_loss_counts_both_completions() -> None:
    pairs = of_margins(margins := np.array([2.0, -1.0, 0.0]))
    found = pair_sums(pairs, pair_losses(pairs, SPECS["dpo"]), SPECS["dpo"])
    assert found["loss"] == pytest.approx(2 * sum(papers("dpo", h) for h in margins))
    assert pair_metrics(found) == {
        "rewards/chosen": pytest.approx(0.1),
        "rewards/rejected": 0.0,
        "rewards/margins": pytest.approx(0.1),
        "rewards/accuracies": pytest.approx(1 / 3),
        "logps/chosen": pytest.approx(-3 + 1 / 3),
        "logps/rejected": -3.0,
    }
    assert pair_metrics({"loss": 1.0}) == {}


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
        ratios = [logprobs(table, tokens) - logprobs(start, tokens) for tokens in (best, worst)]
        best_ratio, worst_ratio = (one.mean() if kind == "ipo" else one.sum() for one in ratios)
        h = best_ratio - worst_ratio
        if kind == "ipo":
            losses.append((h - 1 / (2 * spec.beta)) ** 2)
        else:
            e = spec.label_smoothing
            right, wrong = functional.logsigmoid(spec.beta * h), functional.logsigmoid(-spec.beta * h)
            losses.append(
                -(1 - e) * right - e * wrong if kind != "robust" else (e * wrong - (1 - e) * right) / (1 - 2 * e)
            )
    return torch.stack(losses).mean()


def trained_gradient(
    kind: str, table: Tensor, start: Tensor, pairs: list[tuple[list[int], list[int]]], cut: list[list[tuple[int, int]]]
) -> Tensor:
    """Return the gradient as an update has it: weights first, then micro-batches of any completions."""
    with torch.no_grad():
        found = [[[logprobs(one, y).sum().item() for y in pair] for pair in pairs] for one in (table, start)]
    lengths_of_pairs = np.array([[float(len(y)) for y in pair] for pair in pairs])
    weights = pair_losses(PairLogprobs(np.array(found[0]), np.array(found[1]), lengths_of_pairs), SPECS[kind]).weights
    divisor = 0.0
    for part in cut:
        completions = [pairs[pair][side] for pair, side in part]
        lengths = tuple(map(len, completions))
        by = [weights[pair, side] for pair, side in part]
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
