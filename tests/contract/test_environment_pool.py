"""The user's environments may do anything; the trainer always gets an answer, or the reason why there is none."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from services.trainer.adapters.environment_pool import EnvironmentPool
from services.trainer.fakes_environment import FakeEnvironments
from services.trainer.ports_environment import Environments, Misbehaved, Opening, Reply
from shared.errors import ConfigError
from shared.reward import EnvironmentSpec
from shared.waiting import Waits
from tests.support.environments import Game
from tests.support.eventually import eventually

FUNCTIONS = "tests.support.environments"
Start = Callable[..., Awaitable[EnvironmentPool]]


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    async with AsyncExitStack() as stack:

        async def make(function: str = "Game", timeout_s: float = 20.0, **more: Any) -> EnvironmentPool:
            spec = EnvironmentSpec(function=f"{FUNCTIONS}:{function}", timeout_s=timeout_s, **more)
            pool = EnvironmentPool(spec, Waits())
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
    with pytest.raises(Misbehaved) as caught:
        await call
    return caught.value.reason, caught.value.detail


async def test_a_conversation_is_heard_turn_by_turn(environments: Environments) -> None:
    row = {"prompt": "p"}
    assert await environments.open(row, 3) == Opening(None, [])
    assert await environments.open({**row, "does": "begin"}, 3) == Opening("seed 3", [])
    assert await environments.hear(1, row, 3, ["ab"]) == [Reply("1:ab", 2.0, False)]
    assert await environments.hear(2, row, 3, ["x"]) == [Reply("1:x", 1.0, False)]
    assert await environments.hear(1, row, 3, ["ab", "abc"]) == [Reply("2:abc", 3.0, True)]


async def test_one_that_is_not_there_any_more_hears_everything_again(environments: Environments) -> None:
    await environments.hear(1, {}, 3, ["ab"])
    environments.forget(1)
    environments.forget(7)
    assert await environments.hear(1, {}, 3, ["ab", "c"]) == [Reply("1:ab", 2.0, False), Reply("2:c", 1.0, True)]


@pytest.mark.parametrize(
    ("does", "why", "detail"),
    [
        ("raise", "raised", "ValueError: I do not like this"),
        ("exit", "crashed", "code 3"),
        ("forget", "raised", "step returned int, not rlboost.environments.Step"),
        ("nan", "raised", "reward nan"),
        ("object", "raised", "neither text nor a list of chat messages with a role"),
        ("half a character", "raised", "what it gave cannot be sent"),
        ("raise half a character", "raised", r"ValueError: \ud800"),
        ("time", "raised", "what it gave cannot be sent"),
        ("number", "raised", "what it gave cannot be sent"),
    ],
)
async def test_whatever_goes_wrong_is_a_reason_and_the_others_go_on(
    start: Start, does: str, why: str, detail: str
) -> None:
    pool = await start()
    assert await pool.hear(1, {}, 0, ["a"]) == [Reply("1:a", 1.0, False)]
    found = await reason(pool.hear(2, {"does": does}, 0, ["a"]))
    assert found[0] == f"environment_{why}"
    assert detail in found[1]
    # Where its process died with the other's, that one is made anew, and only then.
    again = [Reply("1:a", 1.0, False)] if why == "crashed" else []
    assert await pool.hear(1, {}, 0, ["a", "bc"]) == [*again, Reply("2:bc", 2.0, True)]


async def test_a_reset_that_raises_is_a_reason(start: Start) -> None:
    pool = await start()
    assert await reason(pool.open({"does": "raise at once"}, 0)) == ("environment_raised", "ValueError: not today")
    assert await pool.open({}, 0) == Opening(None, [])


async def test_an_environment_that_hangs_is_killed_with_its_children(start: Start, tmp_path: Path) -> None:
    pool = await start(timeout_s=1.0)
    file = tmp_path / "pid"
    found = await reason(pool.hear(1, {"does": "hang", "file": str(file)}, 0, ["a"]))
    assert found == ("environment_timeout", "no answer within 1 s; its process was killed")
    await eventually(lambda: not _lives(int(file.read_text())))
    assert await pool.hear(2, {}, 0, ["a"]) == [Reply("1:a", 1.0, False)]


async def test_what_a_process_had_started_goes_when_another_takes_its_place(start: Start, tmp_path: Path) -> None:
    pool = await start()
    (host,) = pool._hosts
    file = tmp_path / "pid"
    row = {"does": "answer and leave", "file": str(file)}
    assert await pool.hear(1, row, 0, ["a"]) == [Reply("1:a", 1.0, False)]
    await eventually(lambda: host.process._process is not None and host.process._process.returncode == 3)
    assert _lives(int(file.read_text()))
    assert await pool.hear(2, {}, 0, ["a"]) == [Reply("1:a", 1.0, False)]
    await eventually(lambda: not _lives(int(file.read_text())))


async def test_a_conversation_that_is_forgotten_before_its_turn_is_not_asked(start: Start, tmp_path: Path) -> None:
    file = tmp_path / "closed"
    pool = await start("Closing", arguments={"file": str(file)})
    heard = asyncio.create_task(pool.hear(1, {}, 0, ["a"]))
    queued = asyncio.create_task(reason(pool.hear(2, {}, 0, ["b"])))
    await asyncio.sleep(0)  # both are queued, the first is asked
    pool.forget(2)
    assert (await queued)[0] == "environment_forgotten"
    assert await heard == [Reply("1:a", 1.0, False)]
    await pool.close()
    assert file.read_text().splitlines() == ["[]", "['a']"]


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except FileNotFoundError:
        return False


async def test_a_death_in_a_later_turn_is_the_end_of_its_conversation_alone(start: Start, tmp_path: Path) -> None:
    pool = await start(arguments={"n": 3})
    row = {"does": "exit once", "file": str(tmp_path / "died")}
    await pool.hear(1, row, 0, ["a"])
    assert (await reason(pool.hear(1, row, 0, ["a", "b"])))[0] == "environment_crashed"
    again = await pool.hear(1, row, 0, ["a", "b", "c"])
    assert [reply.observation for reply in again] == ["1:a", "2:b", "3:c"]


async def test_conversations_in_other_processes_are_not_held_up(start: Start, tmp_path: Path) -> None:
    pool = await start(timeout_s=1.5, workers=2)
    file = str(tmp_path / "pid")
    hanging = asyncio.create_task(reason(pool.hear(1, {"does": "hang", "file": file}, 0, ["a"])))
    await eventually(lambda: os.path.exists(file))  # noqa: PTH110
    assert await pool.hear(2, {}, 0, ["a"]) == [Reply("1:a", 1.0, False)]
    assert not hanging.done()
    assert (await hanging)[0] == "environment_timeout"


@pytest.mark.parametrize("function", ["Closing", "ClosingLater"])
async def test_every_environment_is_closed(start: Start, tmp_path: Path, function: str) -> None:
    file = tmp_path / "closed"
    pool = await start(function, arguments={"file": str(file)})
    closed = ["[]"]
    assert file.read_text().splitlines() == closed, "the one that was made to see what it is"
    await reason(pool.open({"does": "raise at once"}, 0))
    await reason(pool.hear(0, {"does": "raise"}, 0, ["no"]))
    closed += ["[]", "['no']"]
    assert file.read_text().splitlines() == closed, "those that raised"
    for talk in ("a", "b", "c"):
        await pool.hear(ord(talk), {}, 0, [talk])
    pool.forget(ord("a"))
    await pool.open({}, 0)
    closed += ["['a']", "[]"]
    assert file.read_text().splitlines() == closed, "the one that is over, and one that was asked for its prompt"
    await pool.close()
    closed += ["['b']", "['c']"]
    assert file.read_text().splitlines() == closed, "those that were held"


async def test_tools_come_with_the_opening_and_are_called(start: Start) -> None:
    pool = await start("Sums")
    row = {"prompt": [{"role": "user", "content": "12+5?"}], "answer": 17}
    opening = await pool.open(row, 0)
    assert [tool["function"]["name"] for tool in opening.tools] == ["add"]
    call = '<tool_call>{"name": "add", "arguments": {"a": 12, "b": 5}}</tool_call>'
    told = [{"role": "tool", "name": "add", "content": "17"}]
    assert await pool.hear(1, row, 0, [call]) == [Reply(told, 0.0, False)]
    assert await pool.hear(1, row, 0, [call, "It is 17."]) == [Reply("", 1.0, True)]


async def test_a_start_that_is_cancelled_leaves_nothing_half_started(start: Start) -> None:
    pool = await start()
    (host,) = pool._hosts
    await pool.close()
    starting = asyncio.create_task(pool.start())
    await eventually(lambda: host.process._process)
    starting.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await starting
    assert await pool.hear(1, {}, 0, ["a"]) == [Reply("1:a", 1.0, False)]


async def test_prints_of_an_environment_disturb_nothing(start: Start) -> None:
    pool = await start()
    assert await pool.hear(1, {"does": "print"}, 0, ["a"]) == [Reply("1:a", 1.0, False)]


async def test_a_row_that_cannot_be_sent_is_a_reason(start: Start) -> None:
    pool = await start()
    assert (await reason(pool.hear(1, {"n": 1 << 70}, 0, ["a"])))[0] == "environment_unsendable"


@pytest.mark.parametrize(
    ("function", "arguments", "text"),
    [
        ("Missing", {}, "environment.function: tests.support.environments:Missing is no environment"),
        ("Silent", {}, "is no environment: it makes a Silent, which has no method step"),
        ("Game", {"m": 1}, "unexpected keyword argument 'm'"),
    ],
)
async def test_what_is_no_environment_is_said_at_the_start(
    start: Start, function: str, arguments: dict[str, Any], text: str
) -> None:
    with pytest.raises(ConfigError, match=text.replace("(", r"\(")):
        await start(function, arguments=arguments)
