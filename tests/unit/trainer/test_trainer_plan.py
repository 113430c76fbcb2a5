from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlboost.services.rollout_manager.domain.placement import _assignment
from rlboost.services.rollout_manager.domain.tokens import Sample
from rlboost.services.trainer.domain.advantages import group_standardized, standard_deviation
from rlboost.services.trainer.domain.plan import (
    check,
    epoch_order,
    eval_group_sizes,
    last_step,
    learning_rate,
    plan_step,
    prompt_indices,
    training_group,
    turn_ids,
)
from rlboost.services.trainer.step.turns import request_of
from rlboost.shared.errors import ConfigError
from rlboost.shared.ids import MAX_JOBS, SampleId, within_job
from rlboost.shared.job.fleet import SamplingSpec
from rlboost.shared.job.spec import RlJob
from rlboost.shared.job.training import OptimizerSpec
from tests.support.jobs import parse_rl
from tests.support.trainer_rig import Rig


def job(**changes: object) -> RlJob:
    raw = {
        "model": "m",
        "data": {"train": "t.jsonl", "eval": "e.jsonl", "prompts_per_step": 4},
        "reward": {"function": "m:f"},
        "algorithm": {"group_size": 3},
        "eval": {"every": 2, "samples": 7},
        "steps": 5,
    }
    return parse_rl({**raw, **changes})


@given(seed=st.integers(0, 9), epoch=st.integers(0, 5), n=st.integers(1, 40))
def test_every_epoch_holds_every_row_once(seed: int, epoch: int, n: int) -> None:
    assert sorted(epoch_order(seed, epoch, n)) == list(range(n))


@given(n=st.integers(1, 20), per_step=st.integers(1, 30), steps=st.integers(1, 6))
def test_steps_walk_through_the_epochs_without_a_gap(n: int, per_step: int, steps: int) -> None:
    walked = [row for step in range(steps) for row in prompt_indices(1, step, per_step, n)]
    epochs = [row for epoch in range(len(walked) // n + 1) for row in epoch_order(1, epoch, n)]
    assert walked == epochs[: len(walked)]


def test_the_order_changes_with_the_epoch_and_the_seed() -> None:
    assert epoch_order(0, 0, 50) != epoch_order(0, 1, 50)
    assert epoch_order(0, 0, 50) != epoch_order(1, 0, 50)


def test_plan_step_is_deterministic() -> None:
    assert plan_step(job(), 7, 2, 100, [5]) == plan_step(job(), 7, 2, 100, [5])


def test_groups_have_the_ids_that_the_job_and_step_give_them() -> None:
    groups = plan_step(job(), 7, 2, 100, [5])
    training = [SampleId.unpack(group.id) for group in groups if not group.is_eval]
    assert training == [SampleId(7, False, 2, g, 0) for g in range(4)]
    assert all(group.n == 3 for group in groups if not group.is_eval)
    assert len({group.seed for group in groups}) == len(groups)


def test_request_has_the_jobs_sampling() -> None:
    sampling: dict[str, Any] = {
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 20,
        "min_p": 0.05,
        "max_tokens": 9,
        "min_tokens": 2,
    }
    sampling |= {"stop": ("#", "</answer>")}
    spec = job(sampling=sampling)
    (group, *_) = plan_step(spec, 7, 2, 10, [3])
    asked = request_of(Rig(Path(), spec).claimed(no=7), 2, group, b"").sampling
    assert {name: getattr(asked, name) for name in sampling} == sampling
    assert spec.sampling.model_fields_set == set(sampling) == set(SamplingSpec.model_fields), "each of them"


def sample_seeds(job_no: int, step: int) -> dict[int, tuple[int, int]]:
    """Return for each turn of a step, by its id within the job, its seed for the engine and for the environment."""
    spec = job(environment={"function": "m:e", "max_turns": 3}, algorithm={"group_size": 3, "resample": 2})
    claimed = Rig(Path(), spec).claimed(no=job_no)
    groups = [*plan_step(spec, job_no, step, 10, [3]), training_group(spec, job_no, step, 4, 7)]
    ids, found = turn_ids(spec, [3]), {}
    for group in groups:
        request = request_of(claimed, step, group, b"")
        for member in range(group.id, group.id + group.n):
            for turn in range(3):
                sample = ids.of(member).id_of(member, turn)
                found[within_job(sample)] = (_assignment(Sample(sample, request, "0-0", 0)).seed, group.seed)
    return found


@pytest.mark.parametrize("step", [0, 1, 2])
def test_samples_have_the_same_seeds_whatever_the_jobs_number(step: int) -> None:
    one, other = sample_seeds(1, step), sample_seeds(MAX_JOBS - 1, step)
    assert one == other
    assert len({seed for seed, _ in one.values()}) == len(one)
    assert one != sample_seeds(1, step + 1)


def test_evaluation_is_due_every_so_often_and_after_the_last_step() -> None:
    spec = job()
    evaluated = [any(group.is_eval for group in plan_step(spec, 1, step, 9, [5])) for step in range(6)]
    trained = [any(not group.is_eval for group in plan_step(spec, 1, step, 9, [5])) for step in range(6)]
    assert evaluated == [True, False, True, False, True, True]
    assert trained == [True] * 5 + [False]
    assert last_step(spec) == 5
    assert last_step(job(eval=None)) == 4


@given(samples=st.integers(1, 300), prompts=st.integers(1, 300))
def test_evaluation_samples_are_spread_evenly_and_none_is_lost(samples: int, prompts: int) -> None:
    counts = eval_group_sizes(samples, prompts)
    assert sum(counts) == samples
    assert max(counts) - min(counts) <= 1


def test_a_job_that_cannot_be_planned_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"eval\.samples"):
        check(job(eval={"samples": 2000}), [5])
    check(job(), [5])


def test_the_learning_rate_warms_up_and_falls() -> None:
    spec = OptimizerSpec(lr=1.0, warmup_steps=5, decay=0.8)
    assert [learning_rate(spec, step, 60) for step in (0, 1, 4, 5)] == pytest.approx([0.0, 0.2, 0.8, 1.0])
    assert learning_rate(spec, 59, 60) == pytest.approx(1 - 0.8 * 54 / 55)
    assert learning_rate(OptimizerSpec(lr=0.5), 0, 10) == 0.5


def test_advantages_are_relative_to_the_group() -> None:
    assert group_standardized([1.0, 0.0]) == pytest.approx([0.5 / (0.5**0.5 + 1e-4), -0.5 / (0.5**0.5 + 1e-4)])


@given(st.floats(-1e6, 1e6), st.integers(1, 9))
def test_group_of_equal_rewards_has_no_advantages(reward: float, n: int) -> None:
    assert group_standardized([reward] * n) is None


@given(st.lists(st.floats(-100, 100), min_size=2, max_size=9))
def test_advantages_add_up_to_nothing(rewards: list[float]) -> None:
    values = group_standardized(rewards)
    assert values is None or sum(values) == pytest.approx(0.0, abs=1e-6)


def test_the_standard_deviation_is_the_samples() -> None:
    assert standard_deviation([1.0, 3.0]) == pytest.approx(2**0.5)
    assert standard_deviation([4.0]) == 0.0
