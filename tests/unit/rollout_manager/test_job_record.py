"""What the manager says of a job."""

from __future__ import annotations

from rlboost.services.rollout_manager.domain.jobs import Job
from rlboost.shared.job.spec import parse

SPEC = {"model": "m", "data": {"train": "t.jsonl"}, "reward": {"function": "a:b"}, "steps": 2}


def test_evaluation_after_the_last_step_keeps_training_metrics() -> None:
    job = Job("j", 1, parse(SPEC), created_at=0.0, state="running")
    job.on_metrics(0, {"reward/mean": 0.1, "eval/reward_mean": 0.2})
    job.on_metrics(1, {"reward/mean": 0.3, "time/train_s": 4.0})
    assert job.latest == {"reward/mean": 0.3, "time/train_s": 4.0}
    job.on_metrics(2, {"eval/reward_mean": 0.5, "time/train_s": 0.0})
    assert job.latest == {"reward/mean": 0.3, "time/train_s": 4.0, "eval/reward_mean": 0.5}
