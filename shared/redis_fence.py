"""Fenced transactions on Redis without a round trip of their own, by a WATCH that stands between two of them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from shared.bus import Fence
from shared.errors import Fenced

Command = tuple[Any, ...]


class FencedConnection:
    """One connection, kept for fenced transactions alone.

    Each transaction is sent together with the WATCH and the GET for the next one:

        MULTI ... EXEC  WATCH counter  GET counter

    So when the next one comes it is known where the counter stood, and Redis itself refuses the EXEC if it has moved
    since. Whether the sender was paused for an hour between the two, or in the middle of sending, makes no difference.
    The watch ends with the connection; it is set anew on the next one, which costs a round trip.
    """

    def __init__(self, pool: Any) -> None:
        """Take a connection of the `redis.asyncio` pool at the first transaction."""
        self._pool = pool
        self._one_at_a_time = asyncio.Lock()
        self._connection: Any = None
        self._watched: Fence | None = None

    async def transact(self, commands: Sequence[Command], fence: Fence) -> None:
        """Carry out the commands atomically while the fence stands.

        Raises:
            Fenced: it does not; nothing was carried out.
            redis.exceptions.RedisError: no answer, or a command was refused.

        """
        async with self._one_at_a_time:
            in_step = False
            try:
                await self._carry_out(commands, fence)
                in_step = True
            except Fenced:
                in_step = True
                raise
            finally:
                if not in_step:  # replies may be on their way that nobody waits for
                    await self._drop()

    async def _carry_out(self, commands: Sequence[Command], fence: Fence) -> None:
        if self._connection is None:
            self._connection = await self._pool.get_connection()
        if self._watched != fence:
            await self._send([("UNWATCH",), *_watch(fence)])
            await self._reply()
            self._watched = await self._seen(fence)
        if self._watched != fence:
            raise Fenced(f"{fence.key} is at {self._watched.epoch}, not at {fence.epoch}: another has taken over")
        await self._send([("MULTI",), *commands, ("EXEC",), *_watch(fence)])
        for _ in range(1 + len(commands)):
            await self._reply()
        results = await self._reply()
        self._watched = await self._seen(fence)
        if results is None:
            raise Fenced(f"{fence.key} has left {fence.epoch}: another has taken over")
        for result in results:
            if isinstance(result, Exception):
                raise result

    async def _send(self, commands: Sequence[Command]) -> None:
        await self._connection.send_packed_command(self._connection.pack_commands(commands))

    async def _reply(self) -> Any:
        return await self._connection.read_response()

    async def _seen(self, fence: Fence) -> Fence:
        await self._reply()
        return Fence(fence.key, int(await self._reply() or 0))

    async def _drop(self) -> None:
        connection, self._connection, self._watched = self._connection, None, None
        if connection is not None:
            await connection.disconnect(nowait=True)
            await self._pool.release(connection)


def _watch(fence: Fence) -> list[Command]:
    return [("WATCH", fence.key), ("GET", fence.key)]
