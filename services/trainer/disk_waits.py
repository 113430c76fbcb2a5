"""Writes that wait for a full disk, so that a job ends only if no space is freed."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from rlboost.services.trainer.job_streams import JobStreams
from rlboost.shared.errors import DiskFull, Fatal, Timeout
from rlboost.shared.waiting import Waits

T = TypeVar("T")

LIMIT_S = 3600.0
"""How long a write waits for space."""
RETRY_S = 10.0
"""Interval between two attempts."""


class DiskWaits:
    """Repeats the writes of one job until its disk has space."""

    def __init__(self, waits: Waits, streams: JobStreams) -> None:
        """Show each wait in `waits`, and report it as an event in `streams`."""
        self._waits = waits
        self._streams = streams

    async def __call__(self, what: str, write: Callable[[], Awaitable[T]]) -> T:
        """Return the result of `write`, which is called again as long as it raises `DiskFull`.

        Raises:
            Fatal: the disk was full for longer than `LIMIT_S`.

        """
        try:
            return await write()
        except DiskFull as error:
            reason = str(error)
        await self._streams.emit_event("disk_full", what=what, reason=reason)
        try:
            async with self._waits.on(f"disk space for {what}", because=reason, limit_s=LIMIT_S):
                while True:
                    await asyncio.sleep(RETRY_S)
                    try:
                        return await write()
                    except DiskFull:
                        continue
        except Timeout as error:
            raise Fatal(
                f"{reason}; the disk was still full after {LIMIT_S:.0f} s: free space, then create the job again with "
                "trainer.resume"
            ) from error
