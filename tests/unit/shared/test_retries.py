"""Calls that are repeated while what they need is unavailable."""

from __future__ import annotations

import asyncio
import math

import pytest

from rlboost.shared.errors import BusUnavailable, NotFound, StoreUnavailable, WaitTimedOut
from rlboost.shared.messages.codec import MAX_SECONDS
from rlboost.shared.process.waiting import Waits, for_each, retry_while


class Call:
    """Fails with each of the errors in turn, then answers."""

    def __init__(self, *errors: Exception) -> None:
        self.errors = list(errors)
        self.tries = 0

    async def __call__(self) -> str:
        self.tries += 1
        if self.errors:
            raise self.errors.pop(0)
        return "answer"


async def test_call_is_repeated_until_it_answers() -> None:
    call = Call(BusUnavailable("down"), BusUnavailable("still down"))
    assert await retry_while(BusUnavailable, call, first_s=0.001, jitter_s=0.0) == "answer"
    assert call.tries == 3


async def test_other_error_is_raised_at_once() -> None:
    call = Call(StoreUnavailable("away"), NotFound("no such version"))
    with pytest.raises(NotFound):
        await retry_while(StoreUnavailable, call, first_s=0.001, jitter_s=0.0)
    assert call.tries == 2


async def test_last_error_is_raised_once_the_predicate_no_longer_holds() -> None:
    call = Call(*(BusUnavailable(f"try {n}") for n in range(1, 9)))
    with pytest.raises(BusUnavailable, match="try 3"):
        await retry_while(lambda _: call.tries < 3, call, first_s=0.001, jitter_s=0.0)


async def test_last_error_is_raised_after_the_limit() -> None:
    call = Call(*(BusUnavailable("down") for _ in range(1000)))
    with pytest.raises(BusUnavailable):
        await retry_while(BusUnavailable, call, limit_s=0.05, first_s=0.01, longest_s=0.01, jitter_s=0.0)
    assert 2 <= call.tries < 1000


async def test_wait_shows_the_last_error_of_its_calls_until_one_succeeds() -> None:
    waits = Waits()
    shown: list[str] = []

    async def work(call: Call) -> None:
        async def shows() -> str:
            shown.extend(wait.because for wait in waits.current())
            return await call()

        await retry_while(StoreUnavailable, shows, first_s=0.001, jitter_s=0.0)

    async with waits.on("the disk", because="an outer wait", limit_s=60):
        async with waits.on("the store", because="publish", limit_s=60):
            # In a task of its own, as uploads are.
            await for_each([Call(StoreUnavailable("full: free space"))], work, concurrency=1, name="upload")
            shown.extend(wait.because for wait in waits.current())
        await retry_while(StoreUnavailable, Call(StoreUnavailable("away")), first_s=0.001, jitter_s=0.0)
    failed = "publish; the last try failed: full: free space"
    assert shown == ["an outer wait", "publish", "an outer wait", failed, "an outer wait", "publish"]


async def test_wait_that_times_out_names_the_last_error() -> None:
    waits = Waits()

    async def always_down() -> None:
        await asyncio.sleep(0)
        raise BusUnavailable("disk full")

    with pytest.raises(WaitTimedOut, match=r"for Redis \(a write; the last try failed: disk full\)"):
        async with waits.on("Redis", because="a write", limit_s=0.1):
            await retry_while(BusUnavailable, always_down, first_s=0.01, longest_s=0.01, jitter_s=0.0)
    assert waits.take_timed_out()[0].because == "a write; the last try failed: disk full"


@pytest.mark.parametrize("limit_s", [1e12, math.inf])
async def test_wait_may_have_any_limit(limit_s: float) -> None:
    """As `reward.timeout_s` of a job file times its groups; messages have shorter ones."""
    waits = Waits()
    async with waits.on("the rewards", because="they are slow", limit_s=limit_s):
        await asyncio.sleep(0)
        assert waits.current()[0].limit_s == MAX_SECONDS
