"""Tasks in Harbor's format train on a Docker engine, and containers that are lost cost their sessions only."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from rlboost.agents.harbor import BASH, Task, verified
from rlboost.sandbox import LABEL, Sandbox, SandboxBroken, SandboxUnavailable
from tests.support.black_box import black_box
from tests.support.calling_model import write_calling_model
from tests.support.compose_project import docker
from tests.support.harbor_tasks import write_task
from tests.support.tool_model import call_text

pytestmark = [pytest.mark.docker, pytest.mark.timeout(420)]

IMAGE = "python:3.11-slim"
STEPS = 3


def left() -> list[str]:
    return docker("ps", "--all", "--quiet", "--filter", f"label={LABEL}").split()


async def reward(task: Task, command: str) -> float:
    async with await Sandbox.start(IMAGE, purpose="harbor-test") as sandbox:
        await sandbox.exec(command)
        return await verified(sandbox, task)


async def test_tests_return_the_reward_of_what_the_model_left(tmp_path: Path) -> None:
    task = Task.read(write_task(tmp_path / "a"))
    assert await reward(task, "echo 4 > /answer") == 1.0
    assert await reward(task, "echo 5 > /answer") == 0.0
    assert (
        await reward(task, "mkdir -p /logs/verifier /tests; echo 1 > /logs/verifier/reward.json; echo 5 > /tests/a")
        == 0.0
    )
    assert await reward(task, "while true; do sleep 100 & done") == 0.0
    with pytest.raises(SandboxBroken):
        await reward(task, "rm -rf /usr/bin /bin")


@pytest.mark.parametrize(
    ("test", "why"),
    [
        ("exit 0", "wrote the rewards"),
        ("echo nan > /logs/verifier/reward.txt", "not one number"),
        ("echo '{\"a\": 1}' > /logs/verifier/reward.json", "wrote no reward, but None"),
        ("sleep 60", "have not ended within 2 s"),
    ],
)
async def test_tests_without_a_reward_are_a_fault_of_the_task(tmp_path: Path, test: str, why: str) -> None:
    with pytest.raises(RuntimeError, match=why):
        await reward(Task.read(write_task(tmp_path / "a", test=test, verifier="timeout_sec = 2.0")), "true")


async def test_lost_container_is_no_result(tmp_path: Path) -> None:
    async with await Sandbox.start(IMAGE, purpose="harbor-test") as sandbox:
        docker("kill", sandbox.name)
        with pytest.raises(SandboxUnavailable):
            await verified(sandbox, Task.read(write_task(tmp_path / "a")))


def test_tasks_train_although_a_container_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    call = call_text('{"command": "echo 4 > /answer"}', name="bash").replace("<tool_call>\n", "<tool_call>")
    instructions = ("Write 4.", "Say 4.")
    model = write_calling_model(tmp_path / "model", call=call, prompts=instructions, tool=BASH)
    for name, instruction in zip(("a", "b"), instructions, strict=True):
        write_task(tmp_path / "tasks" / name, instruction=instruction)
    spec: dict[str, Any] = {
        "name": "harbor",
        "model": str(model),
        "data": {"train": "agent:rows", "prompts_per_step": 2},
        "agent": {
            "function": "rlboost.agents.harbor:Tasks",
            "arguments": {"folder": str(tmp_path / "tasks"), "network": False},
            "timeout_s": 1000,
            "max_turns": 3,
            "replacements": 4,
        },
        "algorithm": {"name": "grpo", "group_size": 4},
        "sampling": {"max_tokens": 8},
        "optimizer": {"lr": 1.5e-3, "warmup_steps": 2},
        "steps": STEPS,
    }
    with black_box(tmp_path / "state", workers=1) as box:
        short = box.submit({**spec, "agent": {**spec["agent"], "timeout_s": 100}})
        box.until(lambda: box.get(f"/v1/jobs/{short}")["state"] == "failed", "the short job has failed")
        assert "its sessions may need" in box.get(f"/v1/jobs/{short}")["error"]
        job_id = box.submit(spec)
        killed = 0
        limit = time.monotonic() + 120
        while not killed and time.monotonic() < limit:
            for container in left():
                killed += (
                    subprocess.run(["docker", "kill", container], capture_output=True, check=False).returncode == 0
                )
                break
        assert killed
        box.until_completed(job_id, 240)
        rows = box.get(f"/v1/jobs/{job_id}/metrics")
        samples = box.get(f"/v1/jobs/{job_id}/samples")
        events = " ".join(str(event) for event in box.events(job_id))
    assert len(samples) == STEPS * 2 * 4
    assert sum(row.get("conversations/lost", 0) for row in rows) == killed
    assert "SandboxUnavailable" in events
    rewards = {sample["reward"] for sample in samples}
    assert rewards == {0.0, 1.0}
    assert not left()
