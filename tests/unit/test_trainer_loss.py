from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from services.trainer.domain.loss import clipped_loss

LOW, HIGH = 0.2, 0.28
numbers = st.floats(-3, 0, width=32)
tokens = st.lists(st.tuples(numbers, numbers, st.floats(-2, 2, width=32)), min_size=1, max_size=20)


def naive(rows: list[tuple[float, float, float]]) -> float:
    """The definition, token by token: -min(ratio A, clip(ratio) A)."""
    total = 0.0
    for new, old, advantage in rows:
        ratio = math.exp(new - old)
        clipped = min(max(ratio, 1 - LOW), 1 + HIGH)
        total -= min(ratio * advantage, clipped * advantage)
    return total


def columns(rows: list[tuple[float, float, float]]) -> list[torch.Tensor]:
    return [torch.tensor(column) for column in zip(*rows, strict=True)]


@given(tokens)
def test_the_loss_is_its_definition(rows: list[tuple[float, float, float]]) -> None:
    total, sums = clipped_loss(LOW, HIGH)(*columns(rows))
    assert total.item() == pytest.approx(naive(rows), rel=1e-4, abs=1e-4)
    assert sums["loss"] == total.item()
    assert sums["tokens"] == len(rows)


def test_a_clipped_token_has_no_gradient() -> None:
    new = torch.tensor([math.log(1.5), math.log(0.5), math.log(1.5), math.log(0.5)], requires_grad=True)
    advantages = torch.tensor([1.0, -1.0, -1.0, 1.0])
    total, sums = clipped_loss(LOW, HIGH)(new, torch.zeros(4), advantages)
    total.backward()
    assert new.grad is not None
    assert new.grad.tolist() == pytest.approx([0.0, 0.0, 1.5, -0.5])
    assert (sums["clipped_high"], sums["clipped_low"]) == (1.0, 1.0)


def test_on_policy_the_gradient_is_minus_the_advantage() -> None:
    new = torch.tensor([-1.0, -2.0], requires_grad=True)
    total, sums = clipped_loss(LOW, HIGH)(new, new.detach().clone(), torch.tensor([0.7, -0.3]))
    total.backward()
    assert new.grad is not None
    assert new.grad.tolist() == pytest.approx([-0.7, 0.3])
    assert sums["kl"] == sums["abs_log_ratio"] == 0.0
