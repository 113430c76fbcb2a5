"""What a teacher does to advantages, and what a job with one may choose."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlboost.services.trainer.domain.plan import TrainingRow
from rlboost.shared.errors import ConfigError
from rlboost.shared.job.spec import RlJob, parse
from rlboost.shared.wire import floats
from tests.support.trainer_rig import Rig, WatchedEngine, spec

TEACHER = {"model": "larger"}
OF_TEACHER = -1.5
"""The log-probability that the fake engine's reference gives to every token."""


async def trained_rows(folder: Path, **algorithm: Any) -> list[TrainingRow]:
    rows: list[TrainingRow] = []
    rig = Rig(folder, spec(steps=1, algorithm={"group_size": 2, **algorithm}))
    rig.make_engine = lambda: WatchedEngine(rows)
    assert (await rig.run()).state == "completed"
    return rows


async def test_teacher_alone_gives_each_token_its_advantage(tmp_path: Path) -> None:
    rows = await trained_rows(tmp_path, name="distill", teacher={**TEACHER, "coef": 0.5})
    assert len(rows) == 8, "groups of equal rewards are trained on"
    for row in rows:
        expected = 0.5 * (OF_TEACHER - np.array(floats(row.sampled)))
        np.testing.assert_allclose(floats(row.advantages), expected, rtol=1e-6)
        assert set(floats(row.reference)) == {OF_TEACHER}


async def test_teacher_is_added_to_advantages_from_rewards(tmp_path: Path) -> None:
    rewarded = await trained_rows(tmp_path / "rewards", name="dr_grpo")
    both = await trained_rows(tmp_path / "both", name="dr_grpo", teacher=TEACHER)
    for one, other in zip(rewarded, both, strict=True):
        judged = OF_TEACHER - np.array(floats(one.sampled))
        np.testing.assert_allclose(floats(other.advantages), np.array(floats(one.advantages)) + judged, rtol=1e-5)


def job(**changes: Any) -> RlJob:
    raw: dict[str, Any] = {"model": "m", "data": {"train": "t"}, "steps": 3}
    found = parse({**raw, **changes})
    assert isinstance(found, RlJob)
    return found


def test_distillation_needs_no_reward_and_no_group() -> None:
    assert job(algorithm={"name": "distill", "teacher": TEACHER, "group_size": 1}).reward is None
    with pytest.raises(ConfigError, match="reward: a job of kind rl needs it"):
        job(algorithm={"name": "grpo", "teacher": TEACHER})


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"algorithm": {"name": "distill"}}, "teacher: missing, and advantage none learns from nothing else"),
        ({"algorithm": {"name": "distill", "teacher": {}}}, "algorithm.teacher.model: missing"),
        ({"algorithm": {"name": "distill", "teacher": {**TEACHER, "coef": 0}}}, "algorithm.teacher.coef: should be"),
        ({"algorithm": {"name": "ppo", "teacher": TEACHER}}, "teacher: not supported with advantage: gae"),
        ({"algorithm": {"name": "dpo", "teacher": TEACHER}}, "teacher: not supported with advantage: best_worst"),
        ({"algorithm": {"teacher": TEACHER, "kl_coef": 0.1}}, "teacher: not supported with kl_coef"),
        ({"algorithm": {"teacher": TEACHER, "equal_groups": "drop"}}, "equal_groups does not apply, a teacher scores"),
        ({"algorithm": {"name": "dapo", "teacher": TEACHER, "resample": 4}}, "resample does not apply, a teacher"),
        (
            {"algorithm": {"name": "distill", "teacher": TEACHER}, "trainer": {"router_replay": "R3"}},
            "trainer.router_replay: replays the experts of the job's model",
        ),
    ],
)
def test_what_does_not_go_with_a_teacher_is_rejected_by_name(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        job(reward={"function": "a:b"}, **changes)


def test_evaluation_of_a_distillation_needs_a_reward() -> None:
    evaluated = {"data": {"train": "t", "eval": "e"}, "eval": {"every": 5}}
    with pytest.raises(ConfigError, match="eval: it needs a reward"):
        job(algorithm={"name": "distill", "teacher": TEACHER}, **evaluated)
    job(algorithm={"name": "distill", "teacher": TEACHER}, reward={"function": "a:b"}, **evaluated)
