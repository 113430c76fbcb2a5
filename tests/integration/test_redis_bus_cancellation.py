from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from urllib.parse import urlsplit

import pytest
import uvloop

from rlboost.shared.errors import BusUnavailable
from rlboost.shared.redis.bus import RedisBus


@pytest.fixture
async def bus(redis_url: str) -> AsyncIterator[RedisBus]:
    bus = RedisBus(redis_url)
    await bus.length("any")
    yield bus
    await bus.close()


async def test_write_to_a_connection_that_redis_has_closed_is_an_outage(bus: RedisBus) -> None:
    async def write_after_close() -> None:
        _, writer = await asyncio.open_connection("127.0.0.1", urlsplit(f"redis://{bus.address}").port)
        writer.transport.abort()
        await asyncio.sleep(0.1)
        writer.writelines([b"x"])

    def on_uvloop() -> BaseException:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner, pytest.raises(RuntimeError) as raised:
            runner.run(write_after_close())
        return raised.value

    async def raise_it(error: BaseException) -> None:
        raise error

    error = await asyncio.to_thread(on_uvloop)
    with pytest.raises(BusUnavailable, match="closed the connection"):
        await bus._call(raise_it(error))
    assert await bus.length("any") == 0


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
