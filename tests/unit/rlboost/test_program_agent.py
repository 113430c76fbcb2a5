"""What an agent may return; one that is a program: what it is given, must print, and what becomes of its processes."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from rlboost.agents import Session
from rlboost.agents.host import Host
from rlboost.agents.program import MAX_OUTPUT_BYTES, run
from rlboost.environments import BudgetSpent
from rlboost.shared.errors import Fatal
from rlboost.shared.job.agent import NO_REWARDS, AgentRun, Rewards, agent_factory
from rlboost.shared.user_code import PROGRAM_AGENT, ForbiddenFunction
from tests.support.eventually import eventually
from tests.support.priced_environments import dear

SESSION = Session("http://manager/v1", "sk-1", "1/2/3/4", 2, is_eval=False)


def script(folder: Path, *lines: str) -> list[str]:
    file = folder / "agent.sh"
    file.write_text("\n".join(["#!/bin/sh", *lines]) + "\n")
    file.chmod(0o755)
    return [str(file)]


async def returned(value: object) -> tuple[Rewards, str]:
    run = AgentRun(lambda *_: value)
    await run.reset({"prompt": "a"}, 0)
    return await run.run(SESSION)


async def test_agent_returns_its_reward_and_those_of_single_answers() -> None:
    assert await returned(1) == await returned({"reward": 1.0}) == (Rewards(1.0, {}, 0.0), "")
    assert await returned({"reward": 1.0, "cost": 0.02}) == (Rewards(1.0, {}, 0.02), "")
    answers = {f"cmpl-{7:016x}": 1, f"msg_{8:016x}": -0.5}
    assert await returned({"reward": 0.5, "rewards": answers}) == (Rewards(0.5, answers, 0.0), "")


async def test_agent_rewards_each_policy_of_its_job() -> None:
    run = AgentRun(lambda _, row: row["returned"])
    session = replace(SESSION, policies={"verifier": SESSION})
    await run.reset({"returned": {"reward": 1.0, "policies": {"verifier": {"reward": 0.5, "cost": 0.1}}}}, 0)
    expected = Rewards(1.0, {}, 0.0, {"verifier": Rewards(0.5, {}, 0.1)})
    assert await run.run(session) == (expected, "")
    for wrong in (1.0, {"reward": 1.0}, {"reward": 1.0, "policies": {"judge": 1.0}}, {"reward": 1.0, "policies": 1}):
        await run.reset({"returned": wrong}, 0)
        rewards, raised = await run.run(session)
        assert rewards == NO_REWARDS
        assert "the other policies of its job are verifier: reward each of them" in raised
    _, raised = await returned({"reward": 1.0, "policies": {"verifier": 0.5}})
    assert "the other policies of its job are none" in raised


async def test_spent_budget_in_a_group_of_exceptions_is_not_the_agents_fault() -> None:
    async def ask(session: Session, row: dict[str, Any]) -> float:
        async with asyncio.TaskGroup() as calls:
            calls.create_task(dear("http://unused/v1", 1e-9)("1+2"))
        return 1.0

    run = AgentRun(ask)
    await run.reset({"prompt": "a"}, 0)
    with pytest.raises(BudgetSpent, match="the budget of dear is spent"):
        await run.run(SESSION)


async def test_host_whose_budget_is_spent_reports_the_session_and_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    posted = dict[str, Any]()
    arguments = {"url": "http://unused/v1", "budget": 1e-9}
    given = {"id": "s", "session": "s", "key": "k", "sample": "1", "step": 0, "is_eval": False, "timeout_s": 30.0}

    async def post(host: Host, path: str, token: str, **sent: Any) -> httpx.Response:
        if path.endswith("/next") and not host._running:
            return httpx.Response(200, json=[{**given, "row": {}, "arguments": arguments}])
        if not path.endswith("/reward"):
            await asyncio.Event().wait()
        posted.update(sent["json"])
        return httpx.Response(200)

    monkeypatch.setattr(Host, "_post", post)
    async with Host("http://manager", "t", "job", "tests.support.priced_environments:agent", concurrency=1) as host:
        with pytest.raises(Fatal, match="the budget of dear is spent"):
            await host.run(asyncio.Event())
    assert "the budget of dear is spent" in posted["infrastructure"]


@pytest.mark.parametrize(
    ("arguments", "why"),
    [({"command": ["/bin/sh"]}, "program:run is not allowed: command: /bin/sh"), ({}, "missing a required argument")],
)
async def test_host_ends_with_the_cause_if_its_agent_cannot_be_made(
    monkeypatch: pytest.MonkeyPatch, arguments: dict[str, Any], why: str
) -> None:
    async def post(*_: Any, **__: Any) -> httpx.Response:
        return httpx.Response(200, json=[{"arguments": arguments, "timeout_s": 30.0}])

    monkeypatch.setattr(Host, "_post", post)
    async with Host("http://manager", "t", "job", PROGRAM_AGENT, concurrency=1) as host:
        with pytest.raises(Fatal, match=why):
            await host.run(asyncio.Event())


@pytest.mark.parametrize(
    ("value", "sent"),
    [
        (0, {"reward": 0.0}),
        ({"reward": 1.0, "cost": 0.5}, {"reward": 1.0, "cost": 0.5}),
    ],
)
async def test_host_sends_only_what_earlier_managers_know_and_what_is_given(
    monkeypatch: pytest.MonkeyPatch, value: object, sent: dict[str, float]
) -> None:
    posted = list[Any]()

    async def post(host: Host, path: str, token: str, **given: Any) -> httpx.Response:
        posted.append(given["json"])
        return httpx.Response(200)

    monkeypatch.setattr(Host, "_post", post)
    monkeypatch.setattr(Host, "_agent", lambda *_: lambda *_: value)
    async with Host("http://manager", "t", "job", "unused", concurrency=1) as host:
        given = {"session": "s", "key": "k", "sample": "1", "step": 0, "is_eval": False, "timeout_s": 30.0}
        await host._serve({**given, "row": {}, "arguments": {}})
    assert posted == [sent]


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ({"score": 1.0}, "return its reward, or"),
        ({"reward": 1.0, "cost": -1.0}, "the cost is -1.0"),
        ({"reward": 1.0, "rewards": [1.0]}, "return its reward, or"),
        ({"reward": None, "rewards": {}}, "returned None"),
        ({"reward": 1.0, "rewards": {"first": 1.0}}, "'first' is not an answer's id"),
        ({"reward": 1.0, "rewards": {f"cmpl-{7:016x}": float("nan")}}, "returned the reward nan"),
        ({"reward": 1.0, "rewards": {f"cmpl-{i:016x}": 1.0 for i in range(1025)}}, "at most 1024"),
    ],
)
async def test_rewards_of_answers_that_cannot_be_used_are_named(value: object, why: str) -> None:
    rewards, raised = await returned(value)
    assert rewards == NO_REWARDS
    assert why in raised


async def test_program_gets_session_and_row_and_prints_its_reward(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ANTHROPIC_API_KEY", "the operator's")
    seen = tmp_path / "seen"
    command = script(
        tmp_path,
        f'echo "$OPENAI_BASE_URL $OPENAI_API_KEY" > {seen}',
        f'echo "$ANTHROPIC_BASE_URL $ANTHROPIC_AUTH_TOKEN$ANTHROPIC_API_KEY $SESSION_SAMPLE $1" >> {seen}',
        f"cat >> {seen}",
        "echo so",
        "echo 0.5",
    )
    assert await run(SESSION, {"prompt": "é"}, [*command, "x"]) == 0.5
    of_openai, of_anthropic, row = seen.read_text().splitlines()
    assert (of_openai, of_anthropic) == ("http://manager/v1 sk-1", "http://manager sk-1 1/2/3/4 x")
    assert json.loads(row) == {"prompt": "é"}


async def test_program_need_not_read_its_row(tmp_path: Path) -> None:
    assert await run(SESSION, {"prompt": "x" * 1_000_000}, script(tmp_path, "echo 1")) == 1.0


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ("exit 3", "ended with code 3"),
        ("kill -9 $$", "ended with code -9"),
        ("echo good", "print the reward, a number"),
        ("true", "print the reward, a number"),
        (f"head -c {MAX_OUTPUT_BYTES + 1} /dev/zero", "write to standard error"),
    ],
)
async def test_program_without_a_reward_is_an_error_that_says_why(tmp_path: Path, line: str, error: str) -> None:
    with pytest.raises((RuntimeError, ValueError), match=error):
        await run(SESSION, {}, script(tmp_path, line))


async def test_cancelled_program_takes_its_processes_along(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    command = script(tmp_path, f"sleep 3600 & echo $! > {pid}", "wait")
    task = asyncio.create_task(run(SESSION, {}, command))

    def started() -> int:
        return int(pid.read_text() or 0) if pid.exists() else 0

    child = await eventually(started)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task

    def is_gone() -> bool:
        state = Path(f"/proc/{child}/stat")
        return not state.exists() or state.read_text().split()[2] == "Z"

    assert await eventually(is_gone)


@pytest.mark.parametrize(
    ("command", "error"),
    [
        (["/bin/sh", "-c", "true"], "no file in the folder"),
        (["./nothing-here"], "no file in the folder"),
        (["agent.sh"], r"searched in PATH: write \./agent\.sh"),
        ([], "a list of texts"),
        ("agent.sh", "a list of texts"),
        (["tests/support/agents.py"], r"chmod \+x"),
    ],
)
def test_job_names_programs_of_the_operator_only(command: object, error: str) -> None:
    with pytest.raises(ForbiddenFunction, match=error):
        agent_factory(PROGRAM_AGENT, {"command": command})


@pytest.mark.parametrize("place", [".venv/bin/torchrun", "venv/bin/torchrun", ".git/hooks/push"])
def test_job_names_no_hidden_program_and_none_of_a_venv(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`torchrun --no-python /bin/sh -c ...` would run anything as the trainer's user."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    program = tmp_path / place
    program.parent.mkdir(parents=True)
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    if "venv" in place:
        (program.parents[1] / "pyvenv.cfg").touch()
    (tmp_path / "link").symlink_to(program)
    for named in (place, "./link"):
        with pytest.raises(ForbiddenFunction, match="hidden or of an installed package"):
            agent_factory(PROGRAM_AGENT, {"command": [named, "--no-python", "/bin/sh"]})


def test_program_in_the_trainers_folder_is_allowed() -> None:
    agent_factory(PROGRAM_AGENT, {"command": ["tests/support/agent_program.py"]})
