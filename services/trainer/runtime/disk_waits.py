"""Writes that wait for a full disk, so that a job ends only if no space is freed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from rlboost.services.trainer.runtime.device import DeviceThread
from rlboost.services.trainer.runtime.job_streams import JobStreams
from rlboost.shared.errors import DiskFull, Fatal
from rlboost.shared.process.waiting import Waits

T = TypeVar("T")

LIMIT_S = 3600.0
"""How long a write waits for space. One that has started then may take as long again."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 10.0, 300.0
"""Pauses before attempts, which double: each attempt fills the disk for a moment, which other services may share."""


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
        pause_s, until = FIRST_PAUSE_S, time.monotonic() + LIMIT_S
        async with self._waits.on(f"disk space for {what}", because=reason, limit_s=2 * LIMIT_S):
            while time.monotonic() < until:
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
                try:
                    return await write()
                except DiskFull as error:
                    reason = str(error)
        raise Fatal(
            f"{reason}; the disk was still full after {LIMIT_S:.0f} s: free space, then create the job again with "
            "trainer.resume"
        )


class FolderWrites:
    """Writes into a job's folder, in the device's thread, that wait for a full disk."""

    def __init__(self, disk: DiskWaits, device: DeviceThread) -> None:
        """Bind to the job."""
        self._disk = disk
        self._device = device

    async def __call__(self, write: Callable[[], T]) -> T:
        """Return the result of `write`; see `DiskWaits`."""
        return await self._disk("the job's folder", lambda: self._device(write))
