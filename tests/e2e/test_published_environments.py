"""What people have already trains unchanged: environments of `verifiers`, an agent of `openai-agents`, MCP servers."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.black_box import BlackBox, black_box
from tests.support.calling_model import write_calling_model

pytestmark = pytest.mark.timeout(300)

STEPS, PROMPTS, GROUP = 10, 8, 8
VERIFIERS = "rlboost.agents.verifiers:Environment"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_calling_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def box(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BlackBox]:
    with black_box(tmp_path_factory.mktemp("system") / "state", workers=2) as started:
        yield started


def job(model: Path, **sections: Any) -> dict[str, Any]:
    return {
        "name": "published",
        "model": str(model),
        "algorithm": {"name": "grpo", "group_size": GROUP, "updates_per_step": 4},
        "sampling": {"max_tokens": 8},
        "optimizer": {"lr": 1.5e-3, "warmup_steps": 2},
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


def rows_file(folder: Path) -> str:
    rows = [{"prompt": [{"role": "user", "content": f"{i % 4}+{i % 3}?"}]} for i in range(16)]
    path = folder / "train.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def trained(box: BlackBox, spec: dict[str, Any], fault: Callable[[], None] = lambda: None) -> list[dict[str, Any]]:
    """Return the metrics of each step of a job in which a worker is killed, and whose rewards rise.

    Args:
        box: the system.
        spec: the job.
        fault: what else goes wrong.

    """
    job_id = box.submit(spec)
    box.until_step(job_id, 1)
    box.kill("preemptible")
    fault()
    box.until_completed(job_id, 200)
    rows: list[dict[str, Any]] = box.get(f"/v1/jobs/{job_id}/metrics")
    assert not any(row.get(name, 0) for row in rows for name in ("groups/dropped", "samples/duplicates"))
    # A step whose rewards are all equal has none.
    assert max(row.get("mismatch_kl", 0) for row in rows) < 1e-5
    curve = [row["reward/mean"] for row in rows]
    assert sum(curve[-3:]) / 3 > curve[0] + 0.15, curve
    return rows


@pytest.mark.parametrize("kind", ["single", "tools"])
def test_environment_of_verifiers_trains(box: BlackBox, model: Path, kind: str) -> None:
    rows = trained(box, verifiers_job(model, kind=kind))
    assert not any(row.get("conversations/lost") for row in rows)
    assert max(row["turns/max"] for row in rows) == (3 if kind == "tools" else 1)


def test_agent_of_openai_agents_with_a_tool_trains(box: BlackBox, model: Path, tmp_path: Path) -> None:
    spec = job(
        model,
        data={"train": rows_file(tmp_path), "prompts_per_step": PROMPTS},
        agent={"function": "tests.support.openai_agent:run", "timeout_s": 60},
    )
    assert not any(row.get("conversations/lost") for row in trained(box, spec))


def kill_mcp_server(box: BlackBox) -> None:
    (trainer,) = box.processes("trainer")
    started = psutil.Process(trainer["pid"]).children(recursive=True)
    (server,) = [process for process in started if "tests.support.mcp_server" in process.cmdline()]
    server.kill()


def test_tool_of_an_mcp_server_trains_although_the_server_dies(box: BlackBox, model: Path, tmp_path: Path) -> None:
    spec = job(
        model,
        data={"train": rows_file(tmp_path), "prompts_per_step": PROMPTS},
        environment={"function": "tests.support.mcp_environment:Adds", "max_turns": 3},
        sampling={"max_tokens": 64},
    )
    rows = trained(box, spec, lambda: kill_mcp_server(box))
    assert max(row["turns/max"] for row in rows) == 3


def test_fault_of_a_verifiers_environment_loses_its_sessions_only(box: BlackBox, model: Path) -> None:
    """Two of sixteen rows fail each time."""
    spec = verifiers_job(model, kind="broken")
    spec["data"]["prompts_per_step"] = 16
    job_id = box.submit({**spec, "steps": 1})
    box.until_completed(job_id)
    (row,) = box.get(f"/v1/jobs/{job_id}/metrics")
    assert row["groups/dropped/agent_raised"] == 2
    assert len(box.get(f"/v1/jobs/{job_id}/samples")) == 14 * GROUP
    causes = " ".join(str(event) for event in box.events(job_id))
    assert "no machine is left" in causes
    assert "KeyError" in causes


def test_sampling_that_a_session_refuses_fails_the_job_with_its_name(box: BlackBox, model: Path) -> None:
    job_id = box.submit(verifiers_job(model, sampling_args={"temperature": 0.3}))
    box.until(lambda: box.get(f"/v1/jobs/{job_id}")["state"] == "failed", "the job has failed")
    assert "temperature: this session trains with 1" in box.get(f"/v1/jobs/{job_id}")["error"]
