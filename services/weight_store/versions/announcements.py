"""Announces committed versions on the bus, in order."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from rlboost.services.weight_store.domain.versions import Version
from rlboost.shared.errors import BusUnavailable
from rlboost.shared.messages import WeightsCommitted
from rlboost.shared.process.retries import retry_while
from rlboost.shared.process.waiting import Waits
from rlboost.shared.streams.bus import Bus
from rlboost.shared.streams.names import WEIGHTS_COMMITTED

_LIMIT_S = 3600.0
_RETRY_S = 0.5
_MAX_ANNOUNCED = 1000


class Announcements:
    """Committed versions that are not announced yet."""

    def __init__(self, bus: Bus, waits: Waits) -> None:
        """Start empty."""
        self._bus = bus
        self._waits = waits
        self._queue: asyncio.Queue[WeightsCommitted | None] = asyncio.Queue()

    def add(self, job_id: str, version: Version) -> None:
        """Queue a version of a job."""
        self._queue.put_nowait(
            WeightsCommitted(
                job_id=job_id,
                version=version.version,
                manifest_digest=version.digest,
                n_bytes=version.n_bytes,
                at=version.committed_at,
            )
        )

    async def announce(self, stop: asyncio.Event) -> None:
        """Announce every version, until the stop."""

        async def end() -> None:
            await stop.wait()
            self._queue.put_nowait(None)

        ending = asyncio.create_task(end(), name="announce-end")
        try:
            while (message := await self._queue.get()) is not None:
                await self._announce(message, stop)
        finally:
            ending.cancel()

    async def _announce(self, message: WeightsCommitted, stop: asyncio.Event) -> None:
        why = f"announce version {message.version} of job {message.job_id}"
        async with self._waits.on("Redis", because=why, limit_s=_LIMIT_S):
            with suppress(BusUnavailable):  # at the stop: the next start announces the newest version again
                await retry_while(
                    lambda error: isinstance(error, BusUnavailable) and not stop.is_set(),
                    lambda: self._bus.append(WEIGHTS_COMMITTED, message, _MAX_ANNOUNCED),
                    first_s=_RETRY_S,
                    longest_s=_RETRY_S,
                    jitter_s=0.0,
                )
