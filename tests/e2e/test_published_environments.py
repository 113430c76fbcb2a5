"""What people have already trains unchanged: environments of `verifiers`, an agent of `openai-agents`, MCP servers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.black_box import BlackBox, black_box
from tests.support.calling_model import write_calling_model

pytestmark = pytest.mark.timeout(300)

STEPS, PROMPTS, GROUP = 10, 8, 8
VERIFIERS = "rlboost.agents.verifiers:Environment"
FAULTS = ("groups/dropped", "conversations/lost", "samples/duplicates")


def job(model: Path, **sections: Any) -> dict[str, Any]:
    return {
        "name": "published",
        "model": str(model),
        "algorithm": {"name": "grpo", "group_size": GROUP, "updates_per_step": 2},
        "sampling": {"max_tokens": 8},
        "optimizer": {"lr": 5e-3, "warmup_steps": 1},
        "steps": STEPS,
        **sections,
    }


def verifiers_job(model: Path, **arguments: Any) -> dict[str, Any]:
    given = {"env_id": "tests.support.verifiers_environments", **arguments}
    return job(
        model,
        data={"train": "agent:rows", "prompts_per_step": PROMPTS},
        agent={"function": VERIFIERS, "arguments": given, "timeout_s": 60},
    )


def rewards(box: BlackBox, spec: dict[str, Any]) -> list[float]:
    """Return the mean reward of each step of a job, in which a worker is killed."""
    job_id = box.submit(spec)
    box.until_step(job_id, 1)
    box.kill("preemptible")
    box.until_completed(job_id, 200)
    rows = box.get(f"/v1/jobs/{job_id}/metrics")
    assert not any(row.get(name, 0) for row in rows for name in FAULTS)
    assert max(row.get("mismatch_kl", 0) for row in rows) < 1e-5  # a step whose rewards are all equal has none
    return [row["reward/mean"] for row in rows]


def assert_rises(curve: list[float]) -> None:
    first, last = curve[0], sum(curve[-2:]) / 2
    print(curve)
    assert last > first + 0.25, curve


def test_single_turn_environment_of_verifiers_trains(tmp_path: Path) -> None:
    model = write_calling_model(tmp_path / "model")
    with black_box(tmp_path / "state", workers=2) as box:
        assert_rises(rewards(box, verifiers_job(model)))


def test_environment_of_verifiers_with_a_tool_trains(tmp_path: Path) -> None:
    model = write_calling_model(tmp_path / "model")
    with black_box(tmp_path / "state", workers=2) as box:
        assert_rises(rewards(box, verifiers_job(model, kind="tools")))
