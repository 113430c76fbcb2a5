"""Tasks in Harbor's format: what of their files is done, and what is refused by name."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from rlboost.agents.harbor import START_LIMIT_S, Task, Tasks, reward_of
from rlboost.jobs.model_check import code_problems
from rlboost.sandbox import SandboxUnavailable
from rlboost.services.trainer.adapters.agent_rows import rows_of
from rlboost.shared.data.rows import read_rows
from rlboost.shared.errors import ConfigError
from rlboost.shared.job.agent import check_time, load_agent
from rlboost.shared.job.reward import AgentSpec
from rlboost.shared.user_code import HARBOR_AGENT, ForbiddenFunction, InvalidUserFunction, check_arguments
from tests.support.harbor_tasks import write_task
from tests.support.jobs import job_file, parse_rl


def test_task_is_read_with_its_limits(tmp_path: Path) -> None:
    task = Task.read(
        write_task(tmp_path / "a", environment='memory = "1.5G"\nallow_internet = false\nmcp_servers = []')
    )
    assert task.instruction == "Write 4."
    assert task.file.environment.memory_mb == 1536
    assert not task.file.environment.asks_for_internet
    assert task.limit_s == 600 + START_LIMIT_S + 30 + 30


@pytest.mark.parametrize(
    ("section", "line", "why"),
    [
        ("environment", "gpus = 1", r"environment.gpus"),
        ("environment", 'os = "windows"', r"environment.os"),
        ("environment", 'network_mode = "allowlist"', r"environment.network_mode"),
        ("environment", 'healthcheck = {command = "a"}', r"environment.healthcheck"),
        ("environment", 'mcp_servers = [{name = "a"}]', r"environment.mcp_servers"),
        ("environment", 'memory = "much"', r"memory is 'much'"),
        ("environment", 'memory = "8M"', r"environment.memory_mb"),
        ("environment", 'env = {KEY = "${KEY}"}', r"env.KEY is '\$\{KEY\}'"),
        ("verifier", 'env = {KEY = "${KEY:-a}"}', r"env.KEY is"),
        ("agent", "timeout_secs = 3", r"agent.timeout_secs"),
        ("top", 'steps = [{name = "a"}]', r"steps"),
        ("top", "= 3", r"cannot be read"),
    ],
)
def test_task_that_cannot_be_run_as_it_says_is_refused_by_name(
    tmp_path: Path, section: str, line: str, why: str
) -> None:
    with pytest.raises(ValueError, match=f"{tmp_path}/a.*{why}"):
        Task.read(write_task(tmp_path / "a", **{section: line}))


@pytest.mark.parametrize(
    ("name", "why"),
    [("tests/test.sh", "has no tests/test.sh"), ("environment/Dockerfile", "neither"), ("instruction.md", "cannot be")],
)
def test_task_without_a_file_is_refused(tmp_path: Path, name: str, why: str) -> None:
    (write_task(tmp_path / "a") / name).unlink()
    with pytest.raises(ValueError, match=why):
        Task.read(tmp_path / "a")


def test_task_of_several_containers_is_refused(tmp_path: Path) -> None:
    (write_task(tmp_path / "a") / "environment/docker-compose.yaml").touch()
    with pytest.raises(ValueError, match="several containers"):
        Task.read(tmp_path / "a")


def test_network_has_to_be_chosen_where_a_task_asks_for_it(tmp_path: Path) -> None:
    write_task(tmp_path / "a", environment="allow_internet = false")
    Tasks(str(tmp_path))
    write_task(tmp_path / "b")
    with pytest.raises(ValueError, match=r"b asks for the internet: set network in agent\.arguments"):
        Tasks(str(tmp_path))
    Tasks(str(tmp_path), network=False)


def put_docker(folder: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put a program docker first on the path."""
    folder.mkdir()
    (folder / "docker").write_text(f"#!/bin/sh\n{script}\n")
    (folder / "docker").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


def test_job_without_an_engine_is_refused_before_its_first_session(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_task(tmp_path / "tasks/a")
    put_docker(tmp_path / "bin", "echo permission denied >&2; exit 1", monkeypatch)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    arguments: dict[str, Any] = {"folder": str(tmp_path / "tasks"), "network": False}
    agent = AgentSpec(function=HARBOR_AGENT, arguments=arguments, timeout_s=1000)
    with pytest.raises(ConfigError, match="permission denied: containers need the program docker and an engine"):
        list(read_rows("agent:rows", "train", agent_rows=rows_of(agent)))
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(SandboxUnavailable, match="there is no program docker"):
        next(Tasks(**arguments).rows("train"))


@pytest.mark.parametrize("name", ["folder", "eval_folder"])
@pytest.mark.parametrize("place", ["../others", "here/../../others", "linked/../others", ".hidden/tasks"])
def test_job_names_tasks_of_the_operator_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, place: str
) -> None:
    """A job's author could have a file of the trainer's user as instruction.md, or build a Dockerfile of theirs."""
    here = tmp_path / "here"
    for task in ("tasks/a", ".hidden/tasks/a", "../others/a"):
        write_task(here / task)
    (here / "linked").symlink_to(tmp_path / "others")
    monkeypatch.chdir(here)
    monkeypatch.syspath_prepend(str(here))
    for allowed in ("tasks", "linked", "."):
        check_arguments(HARBOR_AGENT, {"folder": "tasks", name: allowed})
    with pytest.raises(ForbiddenFunction, match="is not in the folder in which the agents were started"):
        load_agent(HARBOR_AGENT, {"folder": "tasks", "network": False, name: place})


def test_rows_are_the_tasks_of_their_split(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_docker(tmp_path / "bin", "exit 0", monkeypatch)
    for name in ("train/a", "train/b", "eval/a"):
        write_task(tmp_path / name, instruction=name)
    tasks = Tasks(str(tmp_path / "train"), network=False)
    assert [row["prompt"][0]["content"] for row in tasks.rows("train")] == ["train/a", "train/b"]
    with pytest.raises(ValueError, match="the split 'test' has no tasks: set eval_folder"):
        next(tasks.rows("test"))
    both = Tasks(str(tmp_path / "train"), str(tmp_path / "eval"), network=False)
    assert [row["task"] for row in both.rows("test")] == [str(tmp_path / "eval/a")]
    with pytest.raises(ValueError, match="has no tasks"):
        Tasks(str(tmp_path / "nowhere"))


def test_job_gives_a_session_the_time_of_its_task(tmp_path: Path) -> None:
    write_task(tmp_path / "a")
    tasks = Tasks(str(tmp_path), network=False)
    check_time(tasks, tasks.least_timeout_s)
    with pytest.raises(InvalidUserFunction, match=r"agent\.timeout_s is 600: its sessions may need 780 s"):
        check_time(tasks, 600)


def test_reward_is_one_finite_number() -> None:
    assert reward_of(b"0.5\n", None) == reward_of(None, b'{"reward": 0.5, "style": 1}') == 0.5
    assert reward_of(b"1", b'{"reward": 1}') == 1.0
    for text, values in ((None, None), (b"", None), (b"inf", None), (b"1", b'{"reward": 0}'), (None, b"[1]")):
        with pytest.raises(ValueError, match="its tests wrote"):
            reward_of(text, values)


def test_check_of_a_job_refuses_its_tasks_and_its_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    write_task(tmp_path / "a")
    spec = parse_rl(
        job_file(
            reward=None,
            data={"train": "agent:rows"},
            agent={
                "function": "rlboost.agents.harbor:Tasks",
                "arguments": {"folder": str(tmp_path), "network": False},
                "timeout_s": 600,
            },
        )
    )
    with pytest.raises(ConfigError, match="its sessions may need 780 s"):
        list(read_rows("agent:rows", "train", agent_rows=rows_of(spec.agent)))
    (found,) = code_problems(spec)
    assert found.startswith("agent.function: ")
    assert "its sessions may need 780 s" in found
