"""Fenced transactions on Redis that need no extra round trip: each one sends the WATCH for the next."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from rlboost.shared.errors import Fenced
from rlboost.shared.streams.bus import Fence

Command = tuple[Any, ...]


class FencedConnection:
    """A connection that is used for fenced transactions only.

    Each transaction is sent together with the WATCH and the GET for the next one:

        MULTI ... EXEC  WATCH counter  GET counter

    The next transaction therefore knows the counter's value, and Redis refuses its EXEC if the counter has changed
    since, however long the sender was paused in between. The watch ends with the connection; setting it on a new
    connection costs one round trip.
    """

    def __init__(self, pool: Any) -> None:
        """Take a connection of the `redis.asyncio` pool at the first transaction."""
        self._pool = pool
        self._lock = asyncio.Lock()
        self._connection: Any = None
        self._watched: Fence | None = None

    async def transact(self, commands: Sequence[Command], fence: Fence) -> None:
        """Execute the commands atomically if the fence is valid.

        Raises:
            Fenced: the fence is not valid; no command took effect.
            redis.exceptions.RedisError: no answer, or a command was rejected.

        """
        async with self._lock:
            in_sync = False
            try:
                await self._execute(commands, fence)
                in_sync = True
            except Fenced:
                in_sync = True
                raise
            finally:
                if not in_sync:  # replies to this transaction may still arrive
                    await self._drop()

    async def _execute(self, commands: Sequence[Command], fence: Fence) -> None:
        if self._connection is None:
            self._connection = await self._pool.get_connection()
        if self._watched != fence:
            await self._send([("UNWATCH",), *_watch(fence)])
            await self._reply()
            self._watched = await self._read_watched(fence)
        if self._watched != fence:
            raise Fenced(
                f"{fence.key} is at {self._watched.epoch}, not at {fence.epoch}: another holder has taken over"
            )
        await self._send([("MULTI",), *commands, ("EXEC",), *_watch(fence)])
        for _ in range(1 + len(commands)):
            await self._reply()
        results = await self._reply()
        self._watched = await self._read_watched(fence)
        if results is None:
            raise Fenced(f"{fence.key} is no longer at {fence.epoch}: another holder has taken over")
        for result in results:
            if isinstance(result, Exception):
                raise result

    async def _send(self, commands: Sequence[Command]) -> None:
        await self._connection.send_packed_command(self._connection.pack_commands(commands))

    async def _reply(self) -> Any:
        return await self._connection.read_response()

    async def _read_watched(self, fence: Fence) -> Fence:
        await self._reply()
        return Fence(fence.key, int(await self._reply() or 0))

    async def _drop(self) -> None:
        connection, self._connection, self._watched = self._connection, None, None
        if connection is not None:
            await connection.disconnect(nowait=True)
            await self._pool.release(connection)


def _watch(fence: Fence) -> list[Command]:
    return [("WATCH", fence.key), ("GET", fence.key)]
