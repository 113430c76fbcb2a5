from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from services.trainer.domain.loss import clipped_loss, decoupled_loss

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


CAP = 1.5
aged = st.lists(st.tuples(numbers, numbers, st.floats(-2, 2, width=32), numbers), min_size=1, max_size=20)


@given(aged, st.sampled_from([CAP, None]))
def test_the_decoupled_loss_is_its_definition(rows: list[tuple[float, ...]], cap: float | None) -> None:
    """In numpy: -sum of min(prox / rollout, cap) * min(r A, clip(r) A) with r = new / prox."""
    new, rollout, advantage, proximal = np.array(rows, np.float64).T
    ratio = np.exp(new - proximal)
    objective = np.minimum(ratio * advantage, np.clip(ratio, 1 - LOW, 1 + HIGH) * advantage)
    age = np.exp(proximal - rollout)
    weight = np.ones_like(age) if cap is None else np.minimum(age, cap)
    total, sums = decoupled_loss(LOW, HIGH, cap)(*columns(rows))
    assert total.item() == pytest.approx(-(weight * objective).sum(), rel=1e-4, abs=1e-4)
    assert sums["abs_log_ratio"] == pytest.approx(np.abs(new - rollout).sum(), rel=1e-4, abs=1e-4)
    near = np.isclose(age, CAP, rtol=1e-5).sum()
    assert abs(sums["tis_capped"] - (0 if cap is None else (age > CAP).sum())) <= near


def test_the_importance_weight_has_no_gradient_and_is_cut_at_the_cap() -> None:
    new = torch.tensor([-1.0, -1.0], requires_grad=True)
    rollout = torch.tensor([-1.0 - math.log(1.2), -1.0 - math.log(4.0)])
    total, sums = decoupled_loss(LOW, HIGH, CAP)(new, rollout, torch.tensor([0.5, 0.5]), new.detach().clone())
    total.backward()
    assert new.grad is not None
    assert new.grad.tolist() == pytest.approx([-0.5 * 1.2, -0.5 * CAP])
    assert sums["tis_capped"] == 1.0


@given(aged)
def test_without_a_column_of_its_own_the_proximal_policy_is_the_one_being_trained(
    rows: list[tuple[float, ...]],
) -> None:
    new, rollout, advantage, _ = columns(rows)
    given_it, implied = new.clone().requires_grad_(), new.clone().requires_grad_()
    loss = decoupled_loss(LOW, HIGH, CAP)
    one, its = loss(given_it, rollout, advantage, new)
    other, others = loss(implied, rollout, advantage, None)
    one.backward()
    other.backward()
    assert (one.item(), its) == (other.item(), others)
    assert given_it.grad is not None
    assert implied.grad is not None
    assert given_it.grad.equal(implied.grad)


def test_tokens_of_the_very_weights_have_the_same_gradient_in_both_losses() -> None:
    new = [torch.tensor([-1.0, -2.0, -0.5], requires_grad=True) for _ in range(2)]
    advantages = torch.tensor([0.7, -0.3, 1.0])
    for column, loss in zip(new, (clipped_loss(LOW, HIGH), decoupled_loss(LOW, HIGH, CAP)), strict=True):
        loss(column, column.detach().clone(), advantages, None)[0].backward()
    assert new[0].grad is not None
    assert new[1].grad is not None
    assert new[0].grad.equal(new[1].grad)
