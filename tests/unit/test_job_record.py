"""What the manager says of a job."""

from __future__ import annotations

from services.rollout_manager.domain.jobs import Job
from shared.jobspec import parse

SPEC = {"model": "m", "data": {"train": "t.jsonl"}, "reward": {"function": "a:b"}, "steps": 2}


def test_the_evaluation_behind_the_last_step_leaves_what_training_said() -> None:
    job = Job("j", 1, parse(SPEC), created_at=0.0, state="running")
    job.note(0, {"reward/mean": 0.1, "eval/reward_mean": 0.2})
    job.note(1, {"reward/mean": 0.3, "time/train_s": 4.0})
    assert job.latest == {"reward/mean": 0.3, "time/train_s": 4.0}
    job.note(2, {"eval/reward_mean": 0.5, "time/train_s": 0.0})
    assert job.latest == {"reward/mean": 0.3, "time/train_s": 4.0, "eval/reward_mean": 0.5}
