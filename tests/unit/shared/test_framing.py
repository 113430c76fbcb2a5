"""What `send` raises on each event loop of the services: their own is uvloop's, that of the tests asyncio's."""

from __future__ import annotations

import asyncio
from asyncio.subprocess import PIPE
from collections.abc import Callable

import pytest
import uvloop

from rlboost.shared.framing import pack, send

LOOPS = (asyncio.new_event_loop, uvloop.new_event_loop)


@pytest.mark.parametrize("loop_factory", LOOPS)
def test_send_to_a_process_that_has_ended_is_a_connection_error(
    loop_factory: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    async def body() -> None:
        process = await asyncio.create_subprocess_exec("sleep", "60", stdin=PIPE, stdout=PIPE)
        assert process.stdin is not None
        process.kill()
        await process.wait()
        with pytest.raises(ConnectionResetError, match="the other side has closed"):
            send(process.stdin, pack({"id": 1}))

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(body())
