"""User environments may misbehave in any way: each call of the pool returns an answer or a reason."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from rlboost.services.trainer.adapters.environment_pool import EnvironmentPool
from rlboost.services.trainer.ports.samples import EnvironmentFault, Environments, ResetResult, StepResult
from rlboost.shared.errors import ConfigError
from rlboost.shared.job.reward import EnvironmentSpec
from rlboost.shared.model.tool_calls import HERMES, CallStyle
from rlboost.shared.process.waiting import Waits
from tests.support.environments import Game
from tests.support.eventually import eventually
from tests.support.trainer_fakes import FakeEnvironments

FUNCTIONS = "tests.support.environments"
Start = Callable[..., Awaitable[EnvironmentPool]]


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    async with AsyncExitStack() as stack:

        async def make(
            function: str = "Game", timeout_s: float = 20.0, style: CallStyle = HERMES, **more: Any
        ) -> EnvironmentPool:
            spec = EnvironmentSpec(function=f"{FUNCTIONS}:{function}", timeout_s=timeout_s, **more)
            pool = EnvironmentPool(spec, Waits(), style=style)
            stack.push_async_callback(pool.close)
            await pool.start()
            return pool

        yield make


@pytest.fixture(params=["pool", "async in a pool", "fake"])
async def environments(request: pytest.FixtureRequest, start: Start) -> Environments:
    if request.param == "fake":
        return FakeEnvironments(Game)
    return await start("Game" if request.param == "pool" else "Later")


async def reason(call: Awaitable[Any]) -> tuple[str, str]:
    with pytest.raises(EnvironmentFault) as caught:
        await call
    return caught.value.reason, caught.value.detail


async def test_step_processes_a_conversation_turn_by_turn(environments: Environments) -> None:
    row = {"prompt": "p"}
    assert await environments.reset(row, 3) == ResetResult(None, [])
    assert await environments.reset({**row, "does": "begin"}, 3) == ResetResult("seed 3", [])
    assert await environments.step(1, row, 3, ["ab"]) == [StepResult("1:ab", 2.0, False)]
    assert await environments.step(2, row, 3, ["x"]) == [StepResult("1:x", 1.0, False)]
    assert await environments.step(1, row, 3, ["ab", "abc"]) == [StepResult("2:abc", 3.0, True)]


async def test_step_passes_raw_text_to_an_environment_that_names_it(start: Start) -> None:
    pool = await start("Raw")
    assert (await pool.step(1, {}, 3, ["ab"], ["ab<eos>"]))[0].observation == "ab of ab<eos>"


async def test_step_replays_all_turns_after_release(environments: Environments) -> None:
    await environments.step(1, {}, 3, ["ab"])
    environments.release(1)
    environments.release(7)
    assert await environments.step(1, {}, 3, ["ab", "c"]) == [
        StepResult("1:ab", 2.0, False),
        StepResult("2:c", 1.0, True),
    ]


@pytest.mark.parametrize(
    ("does", "why", "detail"),
    [
        ("raise", "raised", "ValueError: I do not like this"),
        ("exit", "crashed", "code 3"),
        ("forget", "raised", "step returned int, not rlboost.environments.Step"),
        ("nan", "raised", "reward nan"),
        ("huge", "raised", "reward 1e+300: return a finite number, at most 1e+15"),
        ("no-reward", "raised", "reward None"),
        ("text-reward", "raised", "a reward is '1.0', of the type str, not a number"),
        ("refund", "raised", "the cost is -1.0: give a finite number from 0"),
        ("text-done", "raised", "done='False', which is text"),
        ("object", "raised", "a list of chat messages with a role"),
        ("half a character", "raised", "a value that cannot be sent"),
        ("raise half a character", "raised", r"ValueError: \ud800"),
        ("long text", "raised", "bytes, more than 16777216"),
        ("time", "raised", "a value that cannot be sent"),
        ("number", "raised", "a value that cannot be sent"),
    ],
)
async def test_failing_environment_gives_a_reason_and_others_continue(
    start: Start, does: str, why: str, detail: str
) -> None:
    pool = await start()
    assert await pool.step(1, {}, 0, ["a"]) == [StepResult("1:a", 1.0, False)]
    fault, text = await reason(pool.step(2, {"does": does}, 0, ["a"]))
    assert fault == f"environment_{why}"
    assert detail in text
    # Only if the shared process died, the first environment is created again and replays its turn.
    again = [StepResult("1:a", 1.0, False)] if why == "crashed" else []
    assert await pool.step(1, {}, 0, ["a", "bc"]) == [*again, StepResult("2:bc", 2.0, True)]


async def test_raising_reset_is_a_reason(start: Start) -> None:
    pool = await start()
    fault, text = await reason(pool.reset({"does": "raise at once"}, 0))
    assert (fault, text[:21]) == ("environment_raised", "ValueError: not today")
    assert "row: does='raise at once'" in text
    assert 'raise ValueError("not today")' in text
    assert await pool.reset({}, 0) == ResetResult(None, [])


async def test_hanging_environment_is_killed_with_its_children(start: Start, tmp_path: Path) -> None:
    pool = await start(timeout_s=3.0)
    file = tmp_path / "pid"
    found = await reason(pool.step(1, {"does": "hang", "file": str(file)}, 0, ["a"]))
    assert found == ("environment_timeout", "no answer within 3 s; its process was killed")
    await eventually(lambda: not _lives(int(file.read_text())))
    assert await pool.step(2, {}, 0, ["a"]) == [StepResult("1:a", 1.0, False)]


async def test_ended_process_takes_along_what_it_started(start: Start, tmp_path: Path) -> None:
    pool = await start()
    file = tmp_path / "pid"
    row = {"does": "answer and leave", "file": str(file)}
    assert await pool.step(1, row, 0, ["a"]) == [StepResult("1:a", 1.0, False)]
    await eventually(lambda: not _lives(int(file.read_text())))
    assert await pool.step(2, {}, 0, ["a"]) == [StepResult("1:a", 1.0, False)]


async def test_step_released_while_queued_does_not_run(start: Start, tmp_path: Path) -> None:
    file = tmp_path / "closed"
    pool = await start("Closing", arguments={"file": str(file)})
    running = asyncio.create_task(pool.step(1, {"slow_s": 0.5}, 0, ["a"]))
    queued = asyncio.create_task(reason(pool.step(2, {}, 0, ["b"])))
    await asyncio.sleep(0)  # the first call runs, the second is queued
    pool.release(2)
    assert (await queued)[0] == "environment_released"
    assert await running == [StepResult("1:a", 1.0, False)]
    await pool.close()
    assert file.read_text().splitlines() == ["[]", "['a']"]


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except FileNotFoundError:
        return False


async def test_crash_in_a_later_turn_fails_only_its_conversation(start: Start, tmp_path: Path) -> None:
    pool = await start(arguments={"n": 3})
    row = {"does": "exit once", "file": str(tmp_path / "died")}
    await pool.step(1, row, 0, ["a"])
    assert (await reason(pool.step(1, row, 0, ["a", "b"])))[0] == "environment_crashed"
    again = await pool.step(1, row, 0, ["a", "b", "c"])
    assert [reply.observation for reply in again] == ["1:a", "2:b", "3:c"]


async def test_hanging_environment_blocks_only_its_process(start: Start, tmp_path: Path) -> None:
    pool = await start(timeout_s=3.0, workers=2)
    file = str(tmp_path / "pid")
    hanging = asyncio.create_task(reason(pool.step(1, {"does": "hang", "file": file}, 0, ["a"])))
    await eventually(lambda: os.path.exists(file))  # noqa: PTH110
    assert await pool.step(2, {}, 0, ["a"]) == [StepResult("1:a", 1.0, False)]
    assert not hanging.done()
    assert (await hanging)[0] == "environment_timeout"


@pytest.mark.parametrize("function", ["Closing", "ClosingLater"])
async def test_every_environment_is_closed_once(start: Start, tmp_path: Path, function: str) -> None:
    file = tmp_path / "closed"
    pool = await start(function, arguments={"file": str(file)})
    closed = ["[]"]
    assert file.read_text().splitlines() == closed, "the one created at start, to check its type"
    await reason(pool.reset({"does": "raise at once"}, 0))
    await reason(pool.step(0, {"does": "raise"}, 0, ["no"]))
    closed += ["[]", "['no']"]
    assert file.read_text().splitlines() == closed, "those that raised"
    for turn in ("a", "b", "c"):
        await pool.step(ord(turn), {}, 0, [turn])
    pool.release(ord("a"))
    await pool.reset({}, 0)
    closed += ["['a']", "[]"]
    assert file.read_text().splitlines() == closed, "the released one, and the one of the reset"
    await pool.close()
    closed += ["['b']", "['c']"]
    assert file.read_text().splitlines() == closed, "those of open conversations"


async def test_reset_returns_tools_and_step_calls_them(start: Start) -> None:
    pool = await start("Sums")
    row = {"prompt": [{"role": "user", "content": "12+5?"}], "answer": 17}
    opening = await pool.reset(row, 0)
    assert [tool["function"]["name"] for tool in opening.tools] == ["add"]
    call = '<tool_call>{"name": "add", "arguments": {"a": 12, "b": 5}}</tool_call>'
    tool_messages = [{"role": "tool", "name": "add", "content": "17"}]
    assert await pool.step(1, row, 0, [call]) == [StepResult(tool_messages, 0.0, False)]
    assert await pool.step(1, row, 0, [call, "It is 17."]) == [StepResult("", 1.0, True)]


async def test_cancelled_start_leaves_no_half_started_process(start: Start) -> None:
    pool = await start()
    (host,) = pool._hosts
    await pool.close()
    starting = asyncio.create_task(pool.start())
    await eventually(lambda: host.process._process)
    starting.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await starting
    assert await pool.step(1, {}, 0, ["a"]) == [StepResult("1:a", 1.0, False)]


async def test_environment_may_print(start: Start) -> None:
    pool = await start()
    assert await pool.step(1, {"does": "print"}, 0, ["a"]) == [StepResult("1:a", 1.0, False)]


async def test_unserializable_row_is_a_reason(start: Start) -> None:
    pool = await start()
    assert (await reason(pool.step(1, {"n": 1 << 70}, 0, ["a"])))[0] == "environment_unserializable"


async def test_releases_before_an_unserializable_row_reach_the_process(start: Start, tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    pool = await start("Closing", arguments={"file": str(closed)})
    await pool.step(1, {}, 0, ["a"])
    pool.release(1)
    await reason(pool.step(2, {"n": 1 << 70}, 0, ["a"]))
    await pool.step(3, {}, 0, ["b"])
    assert closed.read_text().splitlines() == ["[]", "['a']"], "the one created at start, and the released one"
    await pool.step(3, {}, 0, ["b", "c"])
    assert (await reason(pool.step(3, {}, 0, ["b", "c", "\ud800"])))[0] == "environment_unserializable"
    assert await pool.step(3, {}, 0, ["b", "c", "d"]) == [StepResult("3:d", 1.0, True)]


@pytest.mark.parametrize(
    ("function", "arguments", "text"),
    [
        ("Missing", {}, "environment.function: tests.support.environments:Missing is not an environment"),
        ("Silent", {}, "is not an environment: it is a Silent, which has no method step"),
        ("Game", {"m": 1}, "unexpected keyword argument 'm'"),
    ],
)
async def test_invalid_environment_is_rejected_at_start(
    start: Start, function: str, arguments: dict[str, Any], text: str
) -> None:
    with pytest.raises(ConfigError, match=text.replace("(", r"\(")):
        await start(function, arguments=arguments)


async def test_model_whose_tool_calls_cannot_be_read_is_a_config_error(start: Start) -> None:
    style = CallStyle("", problem="the template writes them in smoke signals")
    pool = await start("Sums", style=CallStyle("glm", "<tool_call>f</tool_call>"))
    call = (
        "<tool_call>add<arg_key>a</arg_key><arg_value>1</arg_value><arg_key>b</arg_key><arg_value>2</arg_value>"
        "</tool_call>"
    )
    (answered,) = await pool.step(1, {}, 0, [call])
    assert [message["content"] for message in answered.observation if isinstance(message, dict)] == ["3"]
    with pytest.raises(ConfigError, match="Sums cannot read tool calls: the template writes them in smoke signals"):
        await start("Sums", style=style)
    await start("Game", style=style)
