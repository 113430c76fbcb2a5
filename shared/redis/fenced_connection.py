"""Fenced transactions on Redis that need no extra round trip: each one sends the WATCH for the next."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from rlboost.shared.errors import Fenced
from rlboost.shared.streams.bus import LONGEST_LEASE_S, Fence

# --- Lua scripts for leases: lease and epoch change atomically, in the append-only file too ---------------------------
# A lease without an expiry, or with a far one, ends within `LONGEST_LEASE_S`: its holder may be gone. A key that is no
# string has no holder: MGET reads it as missing, and SET replaces it. The epoch is raised first, so that a script that
# fails there has changed nothing.


_SHORTEN = f"""
local function shorten(lease)
  local ttl = redis.call('PTTL', lease)
  if ttl == -1 or ttl > {LONGEST_LEASE_S * 1000:.0f} then
    redis.call('PEXPIRE', lease, {LONGEST_LEASE_S * 1000:.0f})
  end
end
"""
CAP_AND_READ_LEASES = f"""{_SHORTEN}
local values = redis.call('MGET', unpack(KEYS))
for i, lease in ipairs(KEYS) do
  if values[i] then shorten(lease) end
end
return values
"""
ACQUIRE_FENCED = f"""{_SHORTEN}
local held = redis.call('MGET', KEYS[1])[1]
if held then shorten(KEYS[1]) end
if held and held ~= ARGV[3] then return false end
local epoch = redis.call('INCR', KEYS[2])
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return epoch
"""


# --- Fenced connections -----------------------------------------------------------------------------------------------


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
            raise Fenced(_why_invalid(fence, self._watched))
        await self._send([("MULTI",), *commands, ("EXEC",), *_watch(fence)])
        for _ in range(1 + len(commands)):
            await self._reply()
        results = await self._reply()
        self._watched = await self._read_watched(fence)
        if results is None:
            raise Fenced(_why_invalid(fence, self._watched))
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


def _why_invalid(fence: Fence, stored: Fence) -> str:
    because = "another holder has taken over"
    if stored.epoch < fence.epoch:  # no holder lowers it
        because = "the work has ended elsewhere, or Redis has lost its data"
    return f"{fence.key} is at {stored.epoch}, not at {fence.epoch}: {because}"


def _watch(fence: Fence) -> list[Command]:
    return [("WATCH", fence.key), ("GET", fence.key)]
