from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from rlboost.shared.redis.bus import RedisBus


@pytest.fixture
async def bus(redis_url: str) -> AsyncIterator[RedisBus]:
    bus = RedisBus(redis_url)
    await bus.length("any")
    yield bus
    await bus.close()


@pytest.mark.parametrize("turns", range(10))
async def test_a_reader_ends_wherever_it_is_cancelled(bus: RedisBus, turns: int) -> None:
    async def read_for_ever() -> None:
        while True:
            await bus.read({"quiet": "0-0"}, block_s=0.3)

    reading = asyncio.create_task(read_for_ever(), name="reader")
    for _ in range(turns):
        await asyncio.sleep(0)
    reading.cancel()
    done, _ = await asyncio.wait({reading}, timeout=30.0)
    assert reading in done, "the cancellation was swallowed"
