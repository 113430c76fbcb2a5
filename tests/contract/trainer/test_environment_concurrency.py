"""One process serves many conversations: they wait at the same time, and one that misbehaves fails alone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from rlboost.services.trainer.adapters import environment_pool as pool_module
from rlboost.services.trainer.adapters.environment_pool import EnvironmentPool
from rlboost.services.trainer.adapters.user_code import UserCodeLog
from rlboost.services.trainer.ports.samples import EnvironmentFault, StepResult
from rlboost.shared.job.reward import EnvironmentSpec
from rlboost.shared.process.waiting import Waits
from tests.support.eventually import eventually


@asynccontextmanager
async def environment_pool(
    function: str, timeout_s: float = 20.0, log: UserCodeLog | None = None, **more: Any
) -> AsyncIterator[EnvironmentPool]:
    """Start the environment, a class of `tests.support.concurrent_environments`."""
    path = f"tests.support.concurrent_environments:{function}"
    pool = EnvironmentPool(EnvironmentSpec(function=path, timeout_s=timeout_s, **more), Waits(), log)
    try:
        await pool.start()
        yield pool
    finally:
        await pool.close()


async def fault_of(call: Awaitable[Any]) -> EnvironmentFault:
    with pytest.raises(EnvironmentFault) as caught:
        await call
    return caught.value


def text_of(results: list[StepResult]) -> str:
    """Return the last observation without the process id."""
    return str(results[-1].observation).rpartition(" ")[0]


def process_of(results: list[StepResult]) -> str:
    return str(results[-1].observation).rpartition(" ")[2]


async def test_async_conversations_wait_at_the_same_time() -> None:
    async with environment_pool("Waiting") as pool:
        steps = [pool.step(i, {"n": 64}, 0, ["a"]) for i in range(64)]
        assert {text_of(results) for results in await asyncio.gather(*steps)} == {"1:a"}


async def test_async_tools_wait_at_the_same_time_and_others_run_in_the_main_thread() -> None:
    call = '<tool_call>{"name": "%s", "arguments": {}}</tool_call>'
    async with environment_pool("Tools") as pool:
        turns = [call % "fetch", call % "query", "the end"]
        for n in range(1, 4):
            answers = await asyncio.gather(*(pool.step(i, {}, 0, turns[:n]) for i in range(8)))
            if n < 3:
                content = {message["content"] for (answer,) in answers for message in answer.observation}  # type: ignore[index]
                assert content == {("fetched", "queried")[n - 1]}
        assert [answer.reward for (answer,) in answers] == [1.0] * 8


async def test_calls_of_one_conversation_do_not_overlap() -> None:
    async with environment_pool("Waiting") as pool:
        row = {"does": "wait", "s": 0.05}
        turns = [["a"], ["a", "b"], ["a", "b", "c"]]
        found = await asyncio.gather(*(pool.step(1, row, 0, texts) for texts in turns))
    assert [text_of(results) for results in found] == ["1:a", "2:b", "3:c"]


async def test_stopped_conversation_ends_alone_and_at_once() -> None:
    async with environment_pool("Waiting") as pool:
        first = process_of(await pool.step(0, {}, 0, ["a"]))
        hanging = [asyncio.create_task(pool.step(i, {"does": "wait", "s": 3600}, 0, ["a"])) for i in (1, 2)]
        going_on = asyncio.create_task(pool.step(3, {"does": "wait", "s": 1.0}, 0, ["a"]))
        await asyncio.sleep(0.2)
        for i in (1, 2):
            pool.stop(i)
        for task in hanging:
            with pytest.raises(EnvironmentFault) as stopped:
                await task
            assert stopped.value.reason == "environment_released"
        assert process_of(await going_on) == first
        pool.stop(99)  # there is none


async def test_plain_methods_run_in_the_main_thread_one_at_a_time() -> None:
    async with environment_pool("Plain") as pool:
        found = await asyncio.gather(*(pool.step(i, {}, 0, ["a"]) for i in range(8)))
        assert [results[0].observation for results in found] == ["a 0.33333"] * 8
        (later,) = await pool.step(9, {"does": "later"}, 0, ["a"])
        assert later.observation == "later a 0.33333"
        fault = await fault_of(pool.step(10, {"does": "end"}, 0, ["a"]))
        assert (fault.reason, fault.detail[:36]) == ("environment_raised", "RuntimeError: it raised StopIteratio")


async def test_plain_methods_run_in_as_many_threads_as_the_job_allows() -> None:
    async with environment_pool("Threaded", threads=8) as pool:
        await asyncio.gather(*(pool.step(i, {"does": "meet"}, 0, ["a"]) for i in range(8)))


async def test_async_code_may_wait_in_many_threads() -> None:
    async with environment_pool("Waiting", 2.0) as pool:
        row = {"does": "hang in a lent thread", "s": 1.0}
        steps = [pool.step(i, {**row, "n": 64}, 0, ["a"]) for i in range(64)]
        assert len(await asyncio.gather(*steps)) == 64
        first = process_of(await pool.step(64, {}, 0, ["a"]))
        hanging = {**row, "s": 3600}
        assert (await fault_of(pool.step(65, hanging, 0, ["a"]))).reason == "environment_timeout"
        assert process_of(await pool.step(66, {}, 0, ["a"])) == first


async def test_concurrency_of_one_serves_one_conversation_at_a_time() -> None:
    async with environment_pool("Alone", concurrency=1) as pool:
        found = await asyncio.gather(*(pool.step(i, {}, 0, ["a"]) for i in range(8)))
        assert [results[0].observation for results in found] == ["a"] * 8


async def test_await_beyond_the_limit_fails_alone(tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    log = UserCodeLog(tmp_path / "environment.log")
    async with environment_pool("Waiting", 1.0, log, arguments={"file": str(closed)}) as pool:
        first = process_of(await pool.step(1, {}, 0, ["a"]))
        fault = await fault_of(pool.step(2, {"does": "wait", "s": 3600}, 0, ["a"]))
        assert fault.reason == "environment_timeout"
        assert fault.detail == f"no answer within 1 s; where it was: {log.path}"
        assert "in go_wrong" in log.path.read_text()
        await eventually(lambda: closed.read_text().splitlines() == ["0", "1"])
        again = await pool.step(1, {}, 0, ["a", "b"])
        assert (text_of(again), process_of(again)) == ("2:b", first)


async def test_thread_that_hangs_fails_alone_while_most_threads_work() -> None:
    """The process is restarted once more than half of its threads hang."""
    async with environment_pool("Threaded", 1.0, threads=3) as pool:
        first = process_of(await pool.step(1, {}, 0, ["a"]))
        assert (await fault_of(pool.step(2, {"does": "hang"}, 0, ["a"]))).detail == "no answer within 1 s"
        assert process_of(await pool.step(3, {}, 0, ["a"])) == first
        fault = await fault_of(pool.step(4, {"does": "hang"}, 0, ["a"]))
        assert fault.detail == "no answer within 1 s; its process was killed"
        again = await pool.step(1, {}, 0, ["a", "b"])
        assert (len(again), process_of(again) != first) == (2, True)


async def test_only_thread_that_hangs_restarts_the_process() -> None:
    async with environment_pool("Plain", 1.0) as pool:
        hanging = asyncio.create_task(fault_of(pool.step(1, {"does": "hang"}, 0, ["a"])))
        others = [asyncio.create_task(pool.step(i, {}, 0, ["a"])) for i in range(2, 10)]
        assert (await hanging).reason == "environment_timeout"
        assert len(await asyncio.gather(*others)) == 8


@pytest.mark.parametrize("does", ["block", "block in a callback", "block with the lock of Python", "ignore"])
async def test_code_that_cannot_be_stopped_fails_alone(does: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process is restarted, and what the others called is repeated."""
    monkeypatch.setattr(pool_module, "_SILENCE_S", 1.5)
    async with environment_pool("Waiting", 1.0) as pool:
        first = process_of(await pool.step(0, {}, 0, ["a"]))
        others = [asyncio.create_task(pool.step(i, {"does": "wait", "s": 0.9}, 0, ["a"])) for i in range(1, 4)]
        fault = await fault_of(pool.step(4, {"does": does}, 0, ["a"]))
        assert fault.reason == "environment_timeout"
        assert {text_of(results) for results in await asyncio.gather(*others)} == {"1:a"}
        again = await pool.step(0, {}, 0, ["a", "b"])
        assert (len(again), text_of(again), process_of(again) != first) == (2, "2:b", True)


async def test_time_for_which_others_block_the_process_is_not_counted() -> None:
    async with environment_pool("Waiting", 2.0) as pool:
        row = {"does": "block shortly", "s": 0.5}
        assert len(await asyncio.gather(*(pool.step(i, row, 0, ["a"]) for i in range(8)))) == 8


@pytest.mark.parametrize("n", [2, 24])
async def test_crash_fails_one_conversation_and_the_others_are_repeated(n: int) -> None:
    async with environment_pool("Waiting") as pool:
        outcomes = await asyncio.gather(*(_outcome(pool, i, n) for i in range(n)))
    assert outcomes == ["environment_crashed" if i == n // 2 else "1:a" for i in range(n)]


async def _outcome(pool: EnvironmentPool, i: int, n: int) -> str:
    row = {"does": "exit", "s": 0.1} if i == n // 2 else {"does": "wait", "s": 0.2}
    try:
        return text_of(await pool.step(i, row, 0, ["a"]))
    except EnvironmentFault as fault:
        return fault.reason


async def test_process_that_always_ends_fails_all_its_calls() -> None:
    async with environment_pool("Dying") as pool:
        calls = (fault_of(pool.step(i, {}, 0, ["a"])) for i in range(4))
        assert {fault.reason for fault in await asyncio.gather(*calls)} == {"environment_crashed"}


@pytest.mark.parametrize("more", [{}, {"threads": 4, "concurrency": 8}, {"workers": 2}])
async def test_each_bad_conversation_fails_and_no_other_one(more: dict[str, Any]) -> None:
    bad = {
        3: ("exit", "environment_crashed"),
        11: ("ignore", "environment_timeout"),
        12: ("leave", "environment_raised"),
        20: ("exit", "environment_crashed"),
        27: ("block", "environment_timeout"),
    }
    async with environment_pool("Waiting", 1.5, **more) as pool:
        found = await asyncio.gather(*(_converse(pool, i, bad.get(i, ("wait", ""))[0]) for i in range(32)))
        assert [host.n_calls for host in pool._hosts] == [0] * len(pool._hosts)
    assert found == [bad[i][1] if i in bad else "3:c" for i in range(32)]


async def _converse(pool: EnvironmentPool, i: int, does: str) -> str:
    row = {"does": does, "s": 0.01 * (i % 7)}
    try:
        results = [await pool.step(i, row, 0, ["a", "b", "c"][:n]) for n in (1, 2, 3)]
        return text_of(results[-1])
    except EnvironmentFault as fault:
        return fault.reason
    finally:
        pool.release(i)


async def test_async_code_may_run_programs() -> None:
    async with environment_pool("Waiting") as pool:
        steps = [pool.step(i, {"does": "run a program"}, 0, ["a"]) for i in range(4)]
        assert {text_of(results) for results in await asyncio.gather(*steps)} == {"1:a"}


async def test_exit_by_an_exception_is_a_fault_of_its_conversation() -> None:
    async with environment_pool("Waiting") as pool:
        first = process_of(await pool.step(1, {}, 0, ["a"]))
        fault = await fault_of(pool.step(2, {"does": "leave"}, 0, ["a"]))
        assert (fault.reason, fault.detail[:13]) == ("environment_raised", "SystemExit: 3")
        assert process_of(await pool.step(1, {}, 0, ["a", "b"])) == first


async def test_release_closes_an_environment_after_its_call(tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    async with environment_pool("Waiting", arguments={"file": str(closed)}) as pool:
        (host,) = pool._hosts
        running = asyncio.create_task(pool.step(1, {"does": "wait", "s": 0.3}, 0, ["a"]))
        await eventually(lambda: any(call.has_begun for call in host._calls.values()))
        pool.release(1)
        assert text_of(await running) == "1:a"
        await eventually(lambda: closed.read_text().splitlines() == ["0", "1"])


async def test_cancelled_calls_end_the_process() -> None:
    async with environment_pool("Waiting") as pool:
        (host,) = pool._hosts
        calls = [asyncio.create_task(pool.step(i, {"does": "wait", "s": 3600}, 0, ["a"])) for i in range(8)]
        await eventually(lambda: all(call.has_begun for call in host._calls.values()) and host.n_calls == 8)
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        assert not host.process.is_running
        assert text_of(await pool.step(9, {}, 0, ["a"])) == "1:a"
