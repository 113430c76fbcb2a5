"""One job's streams, with patience: what Redis does not answer is tried again, up to a limit, under a name.

Trying again is safe because every message that the trainer sends is idempotent on ids of its own.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import structlog

from shared import names
from shared.bus import Append, Bus, Entry, Op
from shared.errors import BusUnavailable, Timeout
from shared.messages import Event
from shared.waiting import Waits

log = structlog.get_logger(__name__)

T = TypeVar("T")

EVENTS_KEPT = 20_000
SAMPLES_KEPT = 2_000
_BLOCK_S = 1.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 1.0


class PatientBus:
    """The bus, for callers who would rather wait than fail."""

    def __init__(self, bus: Bus, waits: Waits, limit_s: float) -> None:
        """Wrap a bus; it may be away for `limit_s` at a time."""
        self.raw = bus
        self._waits = waits
        self._limit_s = limit_s

    async def __call__(self, call: Callable[[Bus], Awaitable[T]]) -> T:
        """Return what `call(bus)` returns, once the bus answers.

        Raises:
            BusUnavailable: it was away for too long.

        """
        try:
            return await call(self.raw)
        except BusUnavailable as error:
            first = error
        try:
            async with self._waits.on("Redis", because=str(first), limit_s=self._limit_s):
                return await self._again(call)
        except Timeout as error:
            raise BusUnavailable(f"{first}; gave up after {self._limit_s:.0f} s: start Redis again") from error

    async def _again(self, call: Callable[[Bus], Awaitable[T]]) -> T:
        pause_s = _FIRST_PAUSE_S
        while True:
            await asyncio.sleep(pause_s)
            try:
                return await call(self.raw)
            except BusUnavailable as error:
                log.warning("redis_away", error=str(error), again_in_s=pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    async def transact(self, ops: Sequence[Op]) -> None:
        """See `Bus.transact`."""
        await self(lambda bus: bus.transact(ops))


class JobLink:
    """What people are told of one job. It is lost when Redis is away: nothing decides on it."""

    def __init__(self, bus: PatientBus, job_id: str) -> None:
        """Tell about `job_id`."""
        self.bus = bus
        self._events = names.job_events(job_id)
        self._samples = names.job_samples(job_id)

    async def tell(self, kind: str, **fields: Any) -> None:
        """Say what happened."""
        log.info(kind, **fields)
        await self._send([Append(self._events, _event(kind, fields), EVENTS_KEPT)])

    async def show(self, samples: Sequence[dict[str, Any]]) -> None:
        """Show scored samples."""
        await self._send([Append(self._samples, _event("sample_scored", fields), SAMPLES_KEPT) for fields in samples])

    async def _send(self, ops: Sequence[Op]) -> None:
        try:
            await self.bus.raw.transact(ops)
        except BusUnavailable as error:
            log.warning("events_lost", error=str(error), events=len(ops))


def _event(kind: str, fields: dict[str, Any]) -> Event:
    return Event(kind=kind, at=time.time(), source="trainer", fields=fields)


class FinishedLog:
    """Reads `rollouts.finished` of one job, entry by entry, from a position of the trainer's own."""

    def __init__(self, bus: PatientBus, waits: Waits, job_id: str, cursor: str, limit_s: float) -> None:
        """Begin behind `cursor`; a silence may last `limit_s`."""
        self.cursor = cursor
        """Position of the last entry that was taken."""
        self._bus = bus
        self._waits = waits
        self._stream = names.rollouts_finished(job_id)
        self._limit_s = limit_s
        self._ahead: deque[Entry] = deque()

    @property
    def drained(self) -> bool:
        """Tell whether nothing is at hand that was not taken yet; there may be more in the stream."""
        return not self._ahead

    async def wait(self, what: str, because: str) -> None:
        """Wait for `what` until there is a next entry.

        Raises:
            Timeout: none came for too long.

        """
        if not self._ahead:
            async with self._waits.on(what, because=because, limit_s=self._limit_s):
                await self.peek()

    async def peek(self) -> Entry:
        """Return the next entry without taking it, however long it may not come: nobody needs it now."""
        while not self._ahead:
            self._ahead.extend(await self._bus(self._read))
        return self._ahead[0]

    def take(self) -> Entry:
        """Take the next entry, which must be there."""
        entry = self._ahead.popleft()
        self.cursor = entry.id
        return entry

    async def _read(self, bus: Bus) -> list[Entry]:
        return await bus.read({self._stream: self.cursor}, block_s=_BLOCK_S)
