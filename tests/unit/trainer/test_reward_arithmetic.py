"""Weighted sums of rewards differ by rounding; that difference must not decide anything."""

from __future__ import annotations

import pytest

from rlboost.services.trainer.domain.advantages import (
    all_equal,
    combine,
    group_advantages,
    group_standardized,
    is_equal,
    reaches,
    total,
)
from rlboost.services.trainer.domain.curriculum import Curriculum
from rlboost.services.trainer.domain.groups import ScoredGroup
from rlboost.services.trainer.domain.loss.preference import best_and_worst
from rlboost.services.trainer.domain.metrics import RolloutTally, StepTally
from rlboost.services.trainer.domain.plan import has_signal
from rlboost.services.trainer.domain.warnings import History, JobFacts, no_learning_signal
from rlboost.shared.messages import SampleFinished
from rlboost.shared.wire import F32, I32, pack
from tests.support.jobs import held_out, job

NEXT_BELOW_ONE = 0.9999999999999999


@pytest.mark.parametrize(
    "weights", [(0.6, 0.3, 0.1), (0.1, 0.3, 0.6), (0.1,) * 10, (0.7, 0.2, 0.1), (1.5, -0.4, -0.1), (1 / 3,) * 3]
)
def test_perfect_rewards_with_weights_that_sum_to_one_pass(weights: tuple[float, ...]) -> None:
    (reward,) = combine([[1.0]] * len(weights), weights)
    assert reward is not None
    assert reaches(reward, 1.0)
    assert is_equal(reward, 1.0)
    assert not reaches(reward, 1.0 + 1e-6)


def test_combine_of_terms_that_cancel_is_zero() -> None:
    assert combine([[1.0], [1.0], [1.0]], (0.1, 0.2, -0.3)) == [0.0]
    assert combine([[1e6], [1e6], [1e6]], (0.1, 0.2, -0.3)) == [0.0]
    assert total((1e6, -1e6, 1e-4)) == pytest.approx(1e-4)
    assert combine([[-0.0]], (1.0,)) == [0.0]
    assert total((5e-324,)) == 5e-324


def test_combine_leaves_functions_of_weight_zero_out() -> None:
    assert combine([[None, 0.5], [3.0, 4.0]], (1.0, 0.0)) == [None, 0.5]
    assert combine([[None], [None]], (1.0, 1.0)) == [None]
    assert combine([[2.0, None], [3.0, None]], (0.0, -0.0)) == [0.0, 0.0]  # an environment gives the reward


def test_rewards_are_equal_up_to_rounding_and_no_further() -> None:
    assert all_equal([0.1 + 0.2, 0.3, 0.3])
    assert all_equal([0.0, -0.0, 5e-324, 1e-300])
    assert all_equal([1e15, 1e15 + 0.125])
    assert not all_equal([1e-6, 0.0])
    assert not all_equal([0.3, 0.3001])


@pytest.mark.parametrize(
    ("reward", "limit", "passes"),
    [
        (NEXT_BELOW_ONE, 1.0, True),
        (0.1 + 0.2 - 0.3 - 1e-17, 0.0, True),
        (-NEXT_BELOW_ONE, -1.0, True),
        (-1.0000000000000002, -1.0, True),
        (-1.001, -1.0, False),
        (0.0, 1e-6, False),
        (-1e-6, 0.0, False),
        (0.999, 1.0, False),
    ],
)
def test_pass_reward_is_reached_up_to_rounding(reward: float, limit: float, passes: bool) -> None:
    assert reaches(reward, limit) is passes
    sample = SampleFinished(
        sample=1, tokens=pack([], I32), logprobs=pack([], F32), finish="stop", spans=[], attempts=1, group_done=False
    )
    evaluated = [ScoredGroup(1, (sample,), (reward,), held_out=held_out(pass_reward=limit))]
    rollouts = RolloutTally(evaluated=evaluated)
    assert StepTally(rollouts=rollouts).metrics()["eval/pass@1"] == float(passes)


def test_group_equal_up_to_rounding_has_no_signal_anywhere() -> None:
    rewards = [0.1 + 0.2, 0.3, 0.3]
    for kind in ("group_std", "group_mean", "leave_one_out", "batch_std", "group_mean_batch_std"):
        assert group_advantages(kind, [rewards], drop_equal=True) == [None]
    assert group_advantages("group_std", [rewards], drop_equal=False) == [[0.0, 0.0, 0.0]]
    assert group_standardized(rewards) is None
    assert not has_signal(rewards)
    assert best_and_worst(rewards) is None
    samples = (
        SampleFinished(
            sample=1,
            tokens=pack([1], I32),
            logprobs=pack([-1.0], F32),
            finish="stop",
            spans=[],
            attempts=1,
            group_done=False,
        ),
    ) * 3
    rollouts = RolloutTally(scored=[ScoredGroup(1, samples, tuple(rewards))])
    assert StepTally(rollouts=rollouts).metrics()["frac_reward_zero_std"] == 1.0


def test_penalty_that_rounds_does_not_make_a_signal() -> None:
    assert not has_signal(ScoredGroup(1, (), (0.3, 0.2), penalties=(0.2, 0.1)).shaped_rewards)


def test_best_and_worst_are_the_first_of_those_equal_up_to_rounding() -> None:
    assert best_and_worst([NEXT_BELOW_ONE, 1.0, 1e-17, 0.0]) == (0, 2)


@pytest.mark.parametrize(
    ("rule", "mean", "why"),
    [
        ({"skip_solved_above": 1.0}, NEXT_BELOW_ONE, "solved"),
        ({"skip_solved_above": 1.0}, 0.99, ""),
        ({"skip_failed_below": 0.0}, 5.5e-17, "failed"),
        ({"skip_failed_below": 0.3}, 0.1 + 0.2, "failed"),
        ({"skip_failed_below": 0.3}, 0.31, ""),
    ],
)
def test_curriculum_limits_hold_up_to_rounding(rule: dict[str, float], mean: float, why: str) -> None:
    one = job(data={"train": "t.jsonl", "prompts_per_step": 1, "curriculum": rule})
    curriculum = Curriculum(one, 2, None, {})
    (row,) = curriculum.plan(0).rows
    curriculum.score(0, [(row, mean)])
    curriculum.plan(1)
    assert curriculum.skips(1, row) is bool(why)


def test_warning_takes_rewards_equal_up_to_rounding_for_equal() -> None:
    history = History()
    for reward in (1.0, NEXT_BELOW_ONE, 1.0):
        history.add({"frac_reward_zero_std": 1.0, "reward/mean": reward, "reward/min": reward, "reward/max": reward})
    finding = no_learning_signal(history, JobFacts("job"))
    assert finding is not None
    assert "got reward 1, so none" in finding.seen
    assert "solved already" in finding.causes
