"""What Redis refuses, and whether it is worth trying again. The server is a script: a full disk is hard to come by."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from rlboost.shared.errors import BusUnavailable, Fatal, RLBoostError
from rlboost.shared.messages import Drain
from rlboost.shared.redis.bus import RedisBus
from rlboost.shared.streams.bus import HashSet


@asynccontextmanager
async def server_that_refuses_writes(reply: str) -> AsyncIterator[RedisBus]:
    answers = {b"MULTI": "+OK", b"EXEC": "-EXECABORT Transaction discarded because of previous errors."}

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while head := await reader.readline():
            words = []
            for _ in range(int(head[1:])):
                n_bytes = int((await reader.readline())[1:])
                words.append((await reader.readexactly(n_bytes + 2))[:-2])
            writes = words[0] in {b"HSET", b"XADD"}
            writer.write(f"{f'-{reply}' if writes else answers.get(words[0], '+OK')}\r\n".encode())
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    bus = RedisBus(f"redis://127.0.0.1:{port}/0?protocol=2")
    try:
        yield bus
    finally:
        await bus.close()
        server.close()


@pytest.mark.parametrize(
    ("reply", "error"),
    [
        ("MISCONF Errors writing to the AOF file: No space left on device", BusUnavailable),
        ("OOM command not allowed when used memory > 'maxmemory'.", BusUnavailable),
        ("READONLY You can't write against a read only replica.", BusUnavailable),
        ("NOREPLICAS Not enough good replicas to write.", BusUnavailable),
        ("WRONGTYPE Operation against a key holding the wrong kind of value", Fatal),
    ],
)
async def test_refused_write_is_retryable_when_redis_may_accept_it_later(reply: str, error: type[RLBoostError]) -> None:
    async with server_that_refuses_writes(reply) as bus:
        with pytest.raises(error, match=re.escape(reply.partition(" ")[2])):
            await bus.append("stream", Drain())
        with pytest.raises(error, match=re.escape(reply.partition(" ")[2])):
            await bus.transact([HashSet("key", {"a": "b"}), HashSet("key", {"c": "d"})])
