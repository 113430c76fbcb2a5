"""User reward functions may misbehave in any way: each call of the pool returns scores or a reason."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from rlboost.services.trainer.adapters.reward_pool import RewardPool
from rlboost.services.trainer.adapters.user_code.log import UserCodeLog
from rlboost.services.trainer.fakes.rewards import FakeRewards
from rlboost.services.trainer.ports.rewards import RewardBatch, RewardFunction, Scores
from rlboost.shared.errors import ConfigError
from rlboost.shared.job.reward import RewardSpec
from rlboost.shared.process.waiting import Waits
from tests.support.eventually import eventually

FUNCTIONS = "tests.support.reward_functions"
Start = Callable[..., Awaitable[RewardPool]]


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    async with AsyncExitStack() as stack:

        async def make(function: str, timeout_s: float = 20.0, workers: int = 1) -> RewardPool:
            spec = RewardSpec(function=f"{FUNCTIONS}:{function}", timeout_s=timeout_s, workers=workers)
            pool = RewardPool(spec, Waits())
            stack.push_async_callback(pool.close)
            await pool.start()
            return pool

        yield make


def batch(prompt: Any = "good", n: int = 2, **columns: Any) -> RewardBatch:
    completions: list[Any] = ["ab", "abcd", "x" * 7][:n]
    return RewardBatch([prompt] * n, completions, [[1, 2]] * n, {name: [value] * n for name, value in columns.items()})


@pytest.mark.parametrize("kind", ["pool", "fake"])
async def test_score_returns_one_reward_per_completion(kind: str, start: Start) -> None:
    rewards: RewardFunction = FakeRewards(lambda _: Scores((2.0, 4.0)))
    if kind == "pool":
        rewards = await start("mixed")
    await rewards.start()
    assert await rewards.score(batch()) == Scores((2.0, 4.0))
    await rewards.close()


async def test_async_reward_function_is_awaited(start: Start) -> None:
    pool = await start("later")
    assert await pool.score(batch()) == Scores((0.5, 0.5))
    assert await pool.score(batch()) == Scores((0.5, 0.5))


async def test_reward_function_gets_columns_but_no_secrets(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLBOOST_TOKEN", "secret")
    pool = await start("columns_seen")
    assert await pool.score(batch(answer="42", tags=["a"])) == Scores((1.0, 1.0))


async def test_reward_function_gets_chat_messages(start: Start) -> None:
    pool = await start("of_countdown_shape")
    chat = RewardBatch([[{"role": "user", "content": "?"}]], [[{"role": "assistant", "content": "four"}]], [[1]])
    assert await pool.score(chat) == Scores((4.0,))


@pytest.mark.parametrize(
    ("prompt", "reason", "detail"),
    [
        ("raise", "raised", "ValueError: I do not like this one"),
        ("exit", "crashed", "code 3"),
        ("quit", "crashed", "code 1"),
        ("die", "crashed", "code -9"),
        ("short", "wrong_length", "1 rewards for 2 completions"),
        ("nan", "not_a_number", "nan"),
        ("none", "missing", "no reward for completion 0"),
        ("text", "raised", "ValueError"),
        ("nothing", "raised", "TypeError"),
    ],
)
async def test_failing_reward_gives_a_reason_and_next_group_is_scored(
    start: Start, prompt: str, reason: str, detail: str
) -> None:
    pool = await start("mixed")
    scores = await pool.score(batch(prompt))
    assert (scores.rewards, scores.reason) == (None, reason)
    assert detail in scores.detail
    assert await pool.score(batch()) == Scores((2.0, 4.0))


async def test_hanging_reward_is_killed_with_its_children(start: Start, tmp_path: Path) -> None:
    pool = await start("mixed", timeout_s=0.5)
    file = tmp_path / "pid"
    scores = await pool.score(batch("hang-with-child", file=str(file)))
    assert (scores.rewards, scores.reason) == (None, "timeout")
    child = int(file.read_text())
    await eventually(lambda: _is_gone(child))
    assert await pool.score(batch()) == Scores((2.0, 4.0))


def _is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] == "Z"
    except FileNotFoundError:
        return True


@pytest.mark.parametrize("prompt", ["print", "input"])
async def test_reward_function_may_use_the_standard_streams(start: Start, prompt: str) -> None:
    pool = await start("mixed")
    assert await pool.score(batch(prompt)) == Scores((2.0, 4.0))
    assert await pool.score(batch()) == Scores((2.0, 4.0))


async def test_failing_reward_shows_its_line_row_and_log(tmp_path: Path) -> None:
    log = UserCodeLog(tmp_path / "reward.log")
    pool = RewardPool(RewardSpec(function=f"{FUNCTIONS}:mixed", timeout_s=20), Waits(), log)
    await pool.start()
    assert (await pool.score(batch("print"))).rewards
    detail = (await pool.score(batch("raise", answer="42"))).detail
    crash = (await pool.score(batch("quit"))).detail
    await pool.close()
    assert re.search(r"^ValueError: I do not like this one \(.*reward_functions\.py:\d+\)$", detail, re.MULTILINE)
    assert "row: prompt='raise', answer='42', completions=['ab', 'abcd']" in detail
    assert 'raise ValueError("I do not like this one")' in detail
    assert "children" not in detail
    assert str(log.path) in detail
    assert "its last output: enough" in crash
    assert "to standard output" in log.path.read_text()


async def test_hanging_reward_writes_where_it_hangs(tmp_path: Path) -> None:
    log = UserCodeLog(tmp_path / "reward.log")
    pool = RewardPool(RewardSpec(function=f"{FUNCTIONS}:mixed", timeout_s=0.5), Waits(), log)
    await pool.start()
    detail = (await pool.score(batch("hang"))).detail
    await pool.close()
    assert str(log.path) in detail
    assert "reward_functions.py" in log.path.read_text()


async def test_unserializable_column_is_a_reason(start: Start) -> None:
    pool = await start("mixed")
    scores = await pool.score(batch(answer=1 << 70))
    assert (scores.rewards, scores.reason) == (None, "unserializable")


async def test_hanging_group_blocks_only_its_process(start: Start) -> None:
    pool = await start("mixed", timeout_s=3.0, workers=2)
    hanging = asyncio.create_task(pool.score(batch("hang")))
    for _ in range(3):
        assert await pool.score(batch()) == Scores((2.0, 4.0))
    assert not hanging.done()
    assert (await hanging).reason == "timeout"


@pytest.mark.parametrize(
    ("function", "text"),
    [
        ("no.such.module:f", "PYTHONPATH"),
        (f"{FUNCTIONS}:no_such_function", "no_such_function"),
        (f"{FUNCTIONS}:lenghts", "has no 'lenghts'; did you mean 'lengths'?"),
        (f"{FUNCTIONS}:NOT_A_FUNCTION", "is not a reward function: it is of the type int"),
        ("antigravity_of_nobody:f", "import antigravity_of_nobody"),
    ],
)
async def test_unimportable_reward_function_is_rejected_by_name(function: str, text: str) -> None:
    pool = RewardPool(RewardSpec(function=function), Waits())
    with pytest.raises(ConfigError, match=r"reward\.function") as caught:
        await pool.start()
    assert text in str(caught.value)
    await pool.close()


async def test_close_ends_every_process(start: Start) -> None:
    pool = await start("mixed", workers=2)
    pids = [process._process.pid for process in pool._processes if process._process is not None]
    await pool.close()
    assert len(pids) == 2
    assert all(_is_gone(pid) for pid in pids)


def test_reward_process_and_children_exit_with_a_killed_parent(tmp_path: Path) -> None:
    file = tmp_path / "pid"
    program = f"""
import asyncio, pathlib, sys
from rlboost.services.trainer.adapters.reward_pool import RewardPool
from rlboost.services.trainer.ports.rewards import RewardBatch
from rlboost.shared.job.reward import RewardSpec
from rlboost.shared.process.waiting import Waits

async def main():
    pool = RewardPool(RewardSpec(function="{FUNCTIONS}:mixed", timeout_s=60), Waits())
    await pool.start()
    print(pool._processes[0]._process.pid, flush=True)
    await pool.score(RewardBatch(["hang-with-child"], ["a"], [[1]], {{"file": ["{file}"]}}))

asyncio.run(main())
"""
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    child = int(asyncio.run(eventually(lambda: file.exists() and file.read_text())))
    parent.kill()
    parent.wait(10)
    parent.stdout.close()
    asyncio.run(eventually(lambda: _is_gone(pid) and _is_gone(child)))


@pytest.mark.parametrize(("allowed", "error"), [("", "yaml is an installed package"), ("yaml", "yaml:safe_load is no")])
async def test_function_of_an_installed_package_needs_the_setting(
    monkeypatch: pytest.MonkeyPatch, allowed: str, error: str
) -> None:
    """Allowed, it is only rejected for its parameters."""
    monkeypatch.setenv("RLBOOST_TRAINER_USER_MODULES", allowed)
    pool = RewardPool(RewardSpec(function="yaml:safe_load"), Waits())
    try:
        with pytest.raises(ConfigError, match=error):
            await pool.start()
    finally:
        await pool.close()
