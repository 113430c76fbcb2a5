"""What a critic is for: advantages by GAE, rewards of single tokens, and its own loss, each against its paper."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlboost.services.trainer.domain.advantages import Experience, gae, gae_advantages, token_rewards
from rlboost.services.trainer.domain.loss.policy import value_loss

Array = np.ndarray[Any, np.dtype[np.float64]]
seeds = st.integers(0, 2**32 - 1)


def papers_gae(rewards: Array, values: Array, gamma: float, lam: float) -> Array:
    """Equation 16 as it stands: the discounted sum of all that is still to come, for each token anew."""
    n = len(rewards)
    following = np.append(values, 0.0)
    deltas = [rewards[t] + gamma * following[t + 1] - values[t] for t in range(n)]
    return np.array([sum((gamma * lam) ** (k - t) * deltas[k] for k in range(t, n)) for t in range(n)])


@given(seeds, st.integers(1, 12), st.floats(0.5, 1.0), st.floats(0.0, 1.0))
def test_advantages_are_the_discounted_sums_of_the_paper(seed: int, n: int, gamma: float, lam: float) -> None:
    rng = np.random.default_rng(seed)
    rewards, values = rng.standard_normal(n), rng.standard_normal(n)
    kept = rewards.copy(), values.copy()
    np.testing.assert_allclose(gae(rewards, values, gamma, lam), papers_gae(rewards, values, gamma, lam), atol=1e-9)
    np.testing.assert_array_equal((rewards, values), kept)


def test_gae_with_lambda_1_and_0_matches_the_closed_forms() -> None:
    rewards, values = np.array([0.5, -1.0, 2.0]), np.array([0.3, 0.2, 0.1])
    assert gae(rewards, values, 1.0, 1.0) == pytest.approx([1.5 - 0.3, 1.0 - 0.2, 2.0 - 0.1])
    assert gae(rewards, values, 0.9, 0.0) == pytest.approx([0.5 + 0.18 - 0.3, -1.0 + 0.09 - 0.2, 2.0 - 0.1])


def test_token_rewards_put_the_reward_last_and_subtract_penalties() -> None:
    assert token_rewards(2.0, 3).tolist() == [0.0, 0.0, 2.0]
    assert token_rewards(2.0, 3, np.array([0.5, -0.25, 1.0])).tolist() == [-0.5, 0.25, 1.0]
    assert token_rewards(2.0, 1).tolist() == [2.0]


def a_step(seed: int) -> list[Experience]:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 9, size=6)
    return [Experience(float(rng.normal()), rng.standard_normal(n), 0.1 * rng.standard_normal(n)) for n in lengths]


@pytest.mark.parametrize("seed", range(3))
def test_advantages_are_whitened_over_tokens_and_returns_are_not(seed: int) -> None:
    step = a_step(seed)
    raw = [papers_gae(token_rewards(one.reward, len(one.values), one.penalties), one.values, 0.9, 0.8) for one in step]
    flat, values = np.concatenate(raw), np.concatenate([one.values for one in step])
    found = gae_advantages(step, 0.9, 0.8)
    np.testing.assert_allclose(np.concatenate(found.advantages), (flat - flat.mean()) / flat.std(), atol=1e-6)
    returns = np.concatenate(found.returns)
    np.testing.assert_allclose(returns, flat + values, atol=1e-6)
    assert (found.advantage_mean, found.advantage_std) == pytest.approx((flat.mean(), flat.std()), abs=1e-6)
    assert found.explained_variance == pytest.approx(1 - np.var(returns - values) / np.var(returns), abs=1e-6)


@given(seeds, st.randoms(use_true_random=False))
def test_the_order_in_which_completions_came_changes_no_bit(seed: int, random: Any) -> None:
    step = a_step(seed)
    order = random.sample(range(len(step)), len(step))
    there, other = gae_advantages(step, 1.0, 0.95), gae_advantages([step[i] for i in order], 1.0, 0.95)
    for place, i in enumerate(order):
        np.testing.assert_array_equal(other.advantages[place], there.advantages[i])
    assert other.explained_variance == there.explained_variance


def test_explained_variance_is_1_for_exact_values_and_0_for_none() -> None:
    knows = [Experience(reward, np.full(3, reward)) for reward in (1.0, 2.0, 5.0)]
    assert gae_advantages(knows, 1.0, 1.0).explained_variance == 1.0
    assert all((column == 0).all() for column in gae_advantages(knows, 1.0, 1.0).advantages)
    ignores = [Experience(reward, np.full(3, 2.0)) for reward in (1.0, 2.0, 5.0)]
    assert gae_advantages(ignores, 1.0, 1.0).explained_variance == pytest.approx(0.0)
    assert gae_advantages([Experience(1.0, np.zeros(2))], 1.0, 1.0).explained_variance == 0.0
    assert gae_advantages([], 1.0, 1.0).advantages == []


def papers_value_loss(values: Array, before: Array, returns: Array, clip: float) -> Array:
    held = np.clip(values, before - clip, before + clip)
    return np.maximum((values - returns) ** 2, (held - returns) ** 2) / 2


@pytest.mark.parametrize("seed", range(3))
def test_value_loss_and_gradient_match_the_clipped_reference(
    seed: int,
) -> None:
    rng = np.random.default_rng(seed)
    values, before, returns = (rng.standard_normal(40) for _ in range(3))
    given = torch.tensor(values, requires_grad=True)
    found = value_loss(given, torch.tensor(before), torch.tensor(returns), 0.2)
    np.testing.assert_allclose(found.losses.detach(), papers_value_loss(values, before, returns, 0.2), atol=1e-6)
    found.losses.sum().backward()
    h = 1e-6
    above, below = (papers_value_loss(values + d, before, returns, 0.2) for d in (h, -h))
    assert given.grad is not None
    np.testing.assert_allclose(given.grad.numpy(), (above - below) / (2 * h), atol=1e-6)
    held = found.clipped.numpy()
    assert 0 < held.sum() < 40
    np.testing.assert_array_equal(given.grad.numpy()[held], 0.0)


def test_values_within_the_clip_do_not_count_as_clipped() -> None:
    """Whatever the rounding: `before + (values - before)` differs from some of these values by a bit."""
    before, values = torch.linspace(-0.09, 0.09, 1001), torch.linspace(-0.07, 0.1, 1001).flip(0)
    assert not value_loss(values, before, torch.zeros(1001), 0.2).clipped.any()


def test_without_a_clip_the_value_loss_is_half_the_square() -> None:
    found = value_loss(torch.tensor([3.0, 1.0]), torch.zeros(2), torch.tensor([1.0, 1.0]), None)
    assert found.losses.tolist() == [2.0, 0.0]
    assert not found.clipped.any()
