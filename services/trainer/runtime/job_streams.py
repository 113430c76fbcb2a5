"""The Redis streams of one job, read and written with retries.

A call that Redis does not answer is retried until a time limit. Retrying is safe: every message of the trainer is
idempotent on its own ids.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import structlog

from rlboost.shared.errors import BusUnavailable, WaitTimedOut
from rlboost.shared.messages import Event
from rlboost.shared.process.retries import retry_while
from rlboost.shared.process.waiting import Waits
from rlboost.shared.streams import names
from rlboost.shared.streams.bus import Append, Bus, Op
from rlboost.shared.streams.entries import Entry
from rlboost.shared.streams.read_size import ReadSize

log = structlog.get_logger(__name__)

T = TypeVar("T")

MAX_SAMPLES = 2_000
_MAX_ENTRIES = 512
_BLOCK_S = 1.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 1.0


class RetryingBus:
    """A bus that retries calls while Redis is unavailable."""

    def __init__(self, bus: Bus, waits: Waits, limit_s: float) -> None:
        """Wrap a bus; retry for at most `limit_s` per outage."""
        self.raw = bus
        self._waits = waits
        self._limit_s = limit_s

    async def __call__(self, call: Callable[[Bus], Awaitable[T]]) -> T:
        """Return the result of `call(bus)`, once the bus answers.

        Raises:
            BusUnavailable: it did not answer within the limit.

        """
        try:
            return await call(self.raw)
        except BusUnavailable as error:
            first = error
        try:
            async with self._waits.on("Redis", because=str(first), limit_s=self._limit_s):
                return await retry_while(
                    BusUnavailable,
                    lambda: call(self.raw),
                    first_s=_FIRST_PAUSE_S,
                    longest_s=_LONGEST_PAUSE_S,
                    jitter_s=0.0,
                )
        except WaitTimedOut as error:
            raise BusUnavailable(f"{first}; gave up after {self._limit_s:.0f} s: start Redis again") from error

    async def transact(self, ops: Sequence[Op]) -> None:
        """See `Bus.transact`."""
        await self(lambda bus: bus.transact(ops))


class JobStreams:
    """The events and samples of one job, for people. Entries are lost while Redis is down: no decision uses them."""

    def __init__(self, bus: RetryingBus, job_id: str) -> None:
        """Write to the streams of `job_id`."""
        self.bus = bus
        self._events = names.job_events(job_id)
        self._samples = names.job_samples(job_id)

    async def emit_event(self, kind: str, **fields: Any) -> None:
        """Log an event and append it to the job's events."""
        log.info(kind, **fields)
        await self._append([Append(self._events, _event(kind, fields), names.MAX_EVENTS)])

    async def emit_warnings(self, texts: Sequence[str]) -> None:
        """Emit a warning per text."""
        for text in texts:
            await self.emit_event("warning", text=text)

    async def publish_samples(self, samples: Sequence[dict[str, Any]]) -> None:
        """Append scored samples to the job's samples."""
        await self._append([Append(self._samples, _event("sample_scored", fields), MAX_SAMPLES) for fields in samples])

    async def _append(self, ops: Sequence[Op]) -> None:
        try:
            await self.bus.raw.transact(ops)
        except BusUnavailable as error:
            log.warning("events_dropped", error=str(error), events=len(ops))


def _event(kind: str, fields: dict[str, Any]) -> Event:
    return Event(kind=kind, at=time.time(), source="trainer", fields=fields)


class FinishedLog:
    """Reads `rollouts.finished` of one job, entry by entry, from the trainer's own position."""

    def __init__(self, bus: RetryingBus, waits: Waits, job_id: str, cursor: str, limit_s: float) -> None:
        """Start after `cursor`; `wait` fails after `limit_s` without an entry."""
        self.cursor = cursor
        """Position of the last entry that was taken."""
        self._bus = bus
        self._waits = waits
        self._stream = names.rollouts_finished(job_id)
        self._limit_s = limit_s
        self._ahead: deque[Entry] = deque()
        self._size = ReadSize(_MAX_ENTRIES)

    @property
    def all_taken(self) -> bool:
        """Return True if all entries read so far were taken; the stream may have more."""
        return not self._ahead

    async def wait(self, what: str, because: str, progress: Callable[[], str]) -> None:
        """Wait for `what` until there is a next entry; the arguments are those of `Waits.on`.

        Raises:
            WaitTimedOut: none came within the limit.

        """
        if not self._ahead:
            limit_s = self._limit_s
            async with self._waits.on(what, because=because, limit_s=limit_s, progress=progress, kind="samples"):
                await self.peek()

    async def peek(self) -> Entry:
        """Return the next entry without taking it; wait for it without a limit."""
        while not self._ahead:
            self._ahead.extend(await self._bus(self._read))
        return self._ahead[0]

    def take(self) -> Entry:
        """Take the next entry, which `wait` or `peek` has found."""
        entry = self._ahead.popleft()
        self.cursor = entry.id
        return entry

    async def _read(self, bus: Bus) -> list[Entry]:
        entries = await bus.read({self._stream: self.cursor}, count=self._size.count, block_s=_BLOCK_S)
        self._size.update(entries)
        return entries
