"""Jobs with an environment: what a job file may say, and what the manager makes of their turns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from rlboost.jobs import check as jobcheck
from rlboost.services.rollout_manager.domain.apply_messages import apply_delivered, apply_message
from rlboost.services.rollout_manager.domain.effects import Now
from rlboost.services.rollout_manager.domain.jobs import LengthEstimates
from rlboost.services.rollout_manager.domain.tokens import Sample
from rlboost.services.rollout_manager.domain.world import World
from rlboost.shared.errors import ConfigError
from rlboost.shared.job.spec import RlJob
from rlboost.shared.messages import GroupOpened, TurnAnswered
from rlboost.shared.wire import I32, pack
from tests.support import jobs
from tests.support.builders import group_requested, job_created

GAME = {"function": "tests.support.environments:Game"}


def job(**changes: Any) -> RlJob:
    return jobs.job(**{"reward": None, **changes})


def test_environment_replaces_or_complements_a_reward() -> None:
    alone = job(environment=GAME)
    assert alone.reward is None
    assert alone.environment is not None
    assert (alone.environment.max_turns, alone.environment.timeout_s, alone.environment.workers) == (8, 30.0, 1)
    assert job(environment=GAME, reward={"function": "m:f"}).reward is not None
    assert job(reward={"function": "m:f"}).environment is None


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({}, "reward: a job of kind rl needs it, or an environment or agent"),
        ({"environment": {"function": "guess"}}, "environment.function"),
        ({"environment": {**GAME, "max_turns": 0}}, "environment.max_turns"),
        ({"environment": {**GAME, "turns": 3}}, "turns"),
        ({"environment": GAME, "reward": {"model": "m"}}, "reward.model: scores a prompt with one completion, and"),
        ({"environment": GAME, "kind": "sft"}, "a job of kind sft generates nothing: remove environment"),
    ],
)
def test_invalid_environment_section_is_refused(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        job(**changes)


@pytest.mark.parametrize(
    ("function", "problem"),
    [
        ("Game", []),
        ("Silent", ["is not an environment: it is a Silent, which has no method step"]),
        ("Missing", ["Missing is not an environment: tests.support.environments has no 'Missing'"]),
    ],
)
def test_config_check_tries_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str, problem: list[str]
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path.cwd()))
    monkeypatch.chdir(tmp_path)
    environment = {"function": f"tests.support.environments:{function}"}
    Path("job.yaml").write_text(yaml.safe_dump(jobs.job_file(reward=None, environment=environment)))
    found = [
        text for text in jobcheck.check(Path("job.yaml"), []).problems if text.startswith("environment.function: ")
    ]
    assert len(found) == len(problem)
    assert all(expected in text for expected, text in zip(problem, found, strict=True))


def sample(near: str) -> Sample:
    request = group_requested(preferred_worker=near)
    made = Sample(request.group, request, "1-0", 0)
    made.tokens += pack([0] * 5, I32)
    return made


@pytest.mark.parametrize(("preferred_worker", "learns"), [("", True), ("w-1", False)])
def test_lengths_are_remembered_for_prompts_that_come_again(preferred_worker: str, learns: bool) -> None:
    lengths, turn = LengthEstimates(), sample(preferred_worker)
    lengths.on_finished(turn)
    assert (lengths.on_group_closed(turn) is not None) is learns
    assert bool(lengths.prompts) is learns
    assert not lengths.longest


def test_restarted_manager_skips_the_trainers_notes() -> None:
    world = World(lease_s=1.0)
    apply_message(world, job_created(), "1-0", Now(0.0, 0.0))
    for note in (GroupOpened(group=256, prompt_digest=b"1"), TurnAnswered(sample=256)):
        apply_delivered(world.jobs["j"].progress, note)
    assert not world.jobs["j"].progress.delivered
