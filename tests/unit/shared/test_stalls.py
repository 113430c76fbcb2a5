"""The longest stall of an event loop, and coroutines that let others run in between."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import pytest
import uvloop

from rlboost.shared.process.stalls import LONG_S, WINDOW_S, Stalls, Turnstile, let_others_run
from tests.support.eventually import eventually

BLOCKED_S = 0.2


def block(seconds: float) -> None:
    time.sleep(seconds)


def test_longest_stall_is_that_of_the_last_minute() -> None:
    stalls = Stalls()
    assert stalls.longest_s == 0.0
    for at, stall_s in ((0.0, 0.3), (1.0, 0.5), (2.0, 0.1), (3.0, 0.2)):
        stalls.add(at, stall_s)
    assert stalls.longest_s == 0.5
    stalls.add(1.5 + WINDOW_S, 0.0)
    assert stalls.longest_s == 0.2
    stalls.add(4.0 + WINDOW_S, 0.0)
    (metric,) = stalls.collect()
    assert metric.samples[0].value == 0.0


@pytest.mark.parametrize("loop_factory", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_task_whose_timer_is_due_runs_between_two_blocks(loop_factory: Callable[[], asyncio.AbstractEventLoop]) -> None:
    async def body() -> None:
        sleeping = asyncio.create_task(asyncio.sleep(0.001), name="sleeping")
        await asyncio.sleep(0)
        block(0.01)
        assert not sleeping.done()
        await let_others_run()
        assert sleeping.done()

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(body())


async def test_blocked_event_loop_is_measured() -> None:
    stalls, stop = Stalls(), asyncio.Event()
    running = asyncio.create_task(stalls.run(stop), name="stalls")
    await asyncio.sleep(0)
    block(BLOCKED_S)
    await eventually(lambda: stalls.longest_s > BLOCKED_S / 2)
    stop.set()
    await running


async def test_many_coroutines_let_others_run_in_between() -> None:
    """Each works for longer than an iteration should take."""
    turnstile, order = Turnstile(), list[int]()
    others = 0

    async def one(i: int) -> None:
        await turnstile.enter()
        order.append(i)
        block(1.5 * LONG_S)

    async def other() -> None:
        nonlocal others
        while len(order) < 20:
            others += 1
            await asyncio.sleep(0)

    waiting = asyncio.create_task(other(), name="other")
    await asyncio.gather(*map(one, range(20)))
    await waiting
    assert order == list(range(20))
    assert others > 10


async def test_cancelled_coroutine_does_not_hold_up_those_after_it() -> None:
    turnstile = Turnstile()
    tasks = [asyncio.create_task(turnstile.enter(), name=f"{i}") for i in range(50)]
    await asyncio.sleep(0)
    tasks[-2].cancel()
    await asyncio.wait_for(tasks[-1], 10)
    assert tasks[-2].cancelled()
