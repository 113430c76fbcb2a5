"""User reward functions may misbehave in any way: each call of the pool returns scores or a reason."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rlboost.services.trainer.adapters.reward_pool import RewardPool
from rlboost.services.trainer.adapters.user_code import UserCodeLog
from rlboost.services.trainer.ports.samples import RewardBatch, RewardFunction, Scores, Verdict
from rlboost.shared.errors import ConfigError
from rlboost.shared.job.reward import RewardSpec
from rlboost.shared.process.waiting import Waits
from tests.support.eventually import eventually
from tests.support.trainer_fakes import FakeRewards

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
        ("text", "not_a_number", "a reward is 'good', of the type str, not a number"),
        ("nothing", "missing", f"{FUNCTIONS}:mixed returned None: is there a `return`?\nrow: prompt='nothing'"),
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


NO_REWARDS = [
    ("number", "not_a_number", "returned 1.0, of the type float: return a list with a number, or None, per"),
    ("text", "not_a_number", "returned '11', of the type str: return a list"),
    ("bytes", "not_a_number", "of the type bytes"),
    ("mapping", "not_a_number", "returned {0: 1.0, 1: 0.0}, of the type dict"),
    ("set", "not_a_number", "of the type set"),
    ("matrix", "not_a_number", "of the type ndarray"),
    ("scalar", "not_a_number", "of the type float32"),
    ("number-texts", "not_a_number", "a reward is '1.0', of the type str, not a number: convert it with float()"),
    ("lists", "not_a_number", "a reward is [1.0], of the type list, not a number"),
    ("mappings", "not_a_number", "{'acc': 1.0} has no 'score'"),
    ("complex", "not_a_number", "a reward is 1j, of the type complex"),
    ("one-element arrays", "not_a_number", "of the type ndarray, not a number"),
    ("huge integer", "too_large", "beyond any float"),
    ("huge", "too_large", "rewards [1e+308, -1e+308]: one is beyond 1e+15, scale them down"),
    ("float32 NaN", "not_a_number", "rewards [nan, 0.0]"),
    ("infinity", "not_a_number", "rewards [inf, 0.0]"),
    ("unprintable and huge", "not_a_number", "rewards [inf, 0.0]"),
]
"""What a function returns, and the reason and the detail of the dropped group."""


async def test_result_of_any_type_is_rewards_or_refused_by_name() -> None:
    pool = RewardPool(RewardSpec(function="tests.support.reward_results:returned", timeout_s=60), Waits())
    await pool.start()
    for result, reason, detail in NO_REWARDS:
        scores = await pool.score(batch(result))
        assert (scores.rewards, scores.reason) == (None, reason), result
        assert detail in scores.detail
    for result in (
        "booleans",
        "integers",
        "decimals",
        "array",
        "tensor",
        "tensors",
        "generator",
        "scores in mappings",
        "unprintable",
    ):
        assert await pool.score(batch(result)) == Scores((1.0, 0.0)), result
    await pool.close()


@pytest.mark.parametrize(
    ("function", "reason", "detail"),
    [
        ("verl_without_score", "not_a_number", "{'acc': 1.0} has no 'score'"),
        ("verl_without_return", "missing", "no reward for completion 0 of the group: functions returned None for it"),
    ],
)
async def test_result_of_verls_signature_that_is_no_reward_is_refused(
    start: Start, function: str, reason: str, detail: str
) -> None:
    group = RewardBatch(["?"], ["5"], [[1]], {"answer": ["7"]}, solutions=["5"])
    scores = await (await start(function)).score(group)
    assert (scores.rewards, scores.reason) == (None, reason)
    assert detail in scores.detail


async def test_functions_get_lists_of_their_own() -> None:
    spec = RewardSpec.model_validate(
        {
            "functions": [
                {"function": f"{FUNCTIONS}:changes_everything", "weight": 0.0},
                {"function": f"{FUNCTIONS}:sees_all"},
                {"function": f"{FUNCTIONS}:mixed", "weight": 0.0},
            ],
            "timeout_s": 20,
        }
    )
    pool = RewardPool(spec, Waits())
    await pool.start()
    scores = await pool.score(batch(tags=["a", "b"]))
    failed = await pool.score(batch("raise", tags=["a", "b"]))
    await pool.close()
    assert scores.rewards == (8.0, 8.0)
    assert "row: prompt='raise', tags=['a', 'b'], completions=['ab', 'abcd']" in failed.detail


@pytest.mark.parametrize(("weight", "expected"), [(0.0, None), (1.0, (2.0, 4.0))])
async def test_function_of_weight_zero_does_not_score_a_completion(
    weight: float, expected: tuple[float, float] | None
) -> None:
    parts = [{"function": f"{FUNCTIONS}:never"}, {"function": f"{FUNCTIONS}:mixed", "weight": weight}]
    pool = RewardPool(RewardSpec.model_validate({"functions": parts, "timeout_s": 20}), Waits())
    await pool.start()
    scores = await pool.score(batch("good", answer=None))
    await pool.close()
    assert (scores.rewards, scores.reason) == (expected, "" if expected else "missing")
    assert scores.parts["mixed"] == (2.0, 4.0)
    if expected is None:
        assert "row: prompt='good', answer=None" in scores.detail


async def test_weighted_sum_that_is_too_large_is_refused() -> None:
    parts = [{"function": f"{FUNCTIONS}:mixed", "weight": 1e15}]
    pool = RewardPool(RewardSpec.model_validate({"functions": parts, "timeout_s": 20}), Waits())
    await pool.start()
    scores = await pool.score(batch())
    await pool.close()
    assert (scores.rewards, scores.reason) == (None, "too_large")


@pytest.mark.parametrize(
    ("function", "arguments", "columns", "error"),
    [
        ("with_limit", {"limit": 3}, ["limit"], "reward.arguments: 'limit' is also a column of the data"),
        ("with_limit", {"completions": []}, [], "RLBoost itself passes 'completions'"),
        ("compute_score", {"ground_truth": "7"}, [], "RLBoost itself passes 'ground_truth'"),
        ("with_limit", {"limit": 3}, ["other"], ""),
        ("compute_with_options", {"factor": 2.0}, ["factor"], ""),  # verl's functions get no columns by name
    ],
)
async def test_argument_that_something_else_replaces_is_refused(
    function: str, arguments: dict[str, Any], columns: list[str], error: str
) -> None:
    pool = RewardPool(
        RewardSpec(function=f"{FUNCTIONS}:{function}", arguments=arguments, timeout_s=20), Waits(), columns=columns
    )
    try:
        if error:
            with pytest.raises(ConfigError, match=re.escape(error)):
                await pool.start()
        else:
            await pool.start()
    finally:
        await pool.close()


async def test_hanging_reward_is_killed_with_its_children(start: Start, tmp_path: Path) -> None:
    pool = await start("mixed", timeout_s=3.0)
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
    pool = RewardPool(RewardSpec(function=f"{FUNCTIONS}:mixed", timeout_s=3.0), Waits(), log)
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
from rlboost.services.trainer.ports.samples import RewardBatch
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


def verdicts(*rewards: float | None) -> dict[str, tuple[Verdict, ...]]:
    problem = "its answer has no verdict"
    return {
        "judge": tuple(
            Verdict("j.judge", reward, "hm", (), 2, "" if reward is not None else problem) for reward in rewards
        )
    }


async def test_verdicts_are_parts_of_the_sum() -> None:
    judge = {"judge": {"model": "judge", "prompt": "{completion}"}, "weight": 0.5}
    spec = RewardSpec.model_validate({"functions": [{"function": f"{FUNCTIONS}:mixed"}, judge]})
    pool = RewardPool(spec, Waits())
    try:
        await pool.start()
        scores = await pool.score(replace(batch(), verdicts=verdicts(4.0, None)))
        assert scores.rewards == (4.0, 4.0)
        assert scores.parts == {"mixed": (2.0, 4.0), "judge": (4.0, None)}
    finally:
        await pool.close()


async def test_reward_model_on_workers_that_gives_no_score_drops_the_group() -> None:
    """Else a completion that is too long for it would be rewarded by the other parts alone."""
    parts: list[dict[str, Any]] = [
        {"model": "scores", "name": "judge"},
        {"judge": {"model": "other", "prompt": "{completion}"}},
    ]
    given = {**verdicts(4.0, None), "other": verdicts(1.0, 2.0)["judge"]}
    pool = RewardPool(RewardSpec.model_validate({"functions": parts}), Waits())
    scores = await pool.score(replace(batch(), verdicts=given))
    assert (scores.rewards, scores.reason) == (None, "missing")
    assert scores.detail.startswith("no reward for completion 1 of the group: the model j.judge gave none")
    logged = RewardSpec.model_validate({"functions": [{**parts[0], "weight": 0}, parts[1]]})
    assert (await RewardPool(logged, Waits()).score(replace(batch(), verdicts=given))).rewards == (1.0, 2.0)


async def test_judge_alone_needs_no_process_and_may_give_no_reward() -> None:
    judge = {"judge": {"model": "judge", "prompt": "{completion}"}}
    pool = RewardPool(RewardSpec.model_validate({"functions": [judge]}), Waits())
    await pool.start()
    assert (await pool.score(replace(batch(), verdicts=verdicts(1.0, 2.0)))).rewards == (1.0, 2.0)
    scores = await pool.score(replace(batch(), verdicts=verdicts(1.0, None)))
    assert (scores.rewards, scores.reason) == (None, "missing")
    assert scores.detail.startswith(
        "no reward for completion 1 of the group: the model j.judge gave none: its answer has no verdict; "
        "the last of 2 answers: 'hm'"
    )
    await pool.close()
