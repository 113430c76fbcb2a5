"""Where everything that computes runs, and when it may."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from shared.errors import Fatal, Timeout
from shared.waiting import Waits

T = TypeVar("T")


class DeviceThread:
    """One thread: the event loop stays free, and a cancelled job never waits for a kernel."""

    def __init__(self) -> None:
        """Start no thread yet."""
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="device")

    async def __call__(self, call: Callable[[], T]) -> T:
        """Return what the call returns. Calls run one after the other, in the order in which they were made.

        When the caller is cancelled, a call that has begun still ends by itself.
        """
        return await asyncio.get_running_loop().run_in_executor(self._executor, call)

    def post(self, call: Callable[[], object]) -> Future[object]:
        """Make a call without waiting for it."""
        return self._executor.submit(call)

    def close(self) -> None:
        """Take no more calls; drop those that have not begun."""
        self._executor.shutdown(wait=False, cancel_futures=True)


class DeviceTurn:
    """The trainer's turn on a device that it shares with the reserved engines, during one step."""

    def __init__(
        self, thread: DeviceThread, waits: Waits, step: int, limit_s: float, rest: Callable[[], object]
    ) -> None:
        """Wait for the turn; the engines may keep the device for `limit_s`.

        `rest` is called on the device when the turn ends before the step does.
        """
        self._thread = thread
        self._rest = rest
        self._resting: Future[object] | None = None
        self._waits = waits
        self._step = step
        self._limit_s = limit_s
        self._ours = asyncio.Event()
        self._began = self._since = time.monotonic()
        self.waited_s: float | None = None
        """From the step's begin to the first turn."""
        self.held_s = 0.0
        """How long the device was ours, in turns that have ended."""
        self.busy_s = 0.0
        """How long it computed."""
        self._computes_since: float | None = None

    @property
    def idle_s(self) -> float:
        """Return how long the device was ours until now without computing."""
        now = time.monotonic()
        held_s = self.held_s + (now - self._since if self._ours.is_set() else 0.0)
        busy_s = self.busy_s + (0.0 if self._computes_since is None else now - self._computes_since)
        return max(0.0, held_s - busy_s)

    def give(self, *, ours: bool) -> None:
        """Say whose turn it is."""
        now = time.monotonic()
        if ours and not self._ours.is_set():
            self._since = now
            if self.waited_s is None:
                self.waited_s = now - self._began
            self._ours.set()
        elif not ours and self._ours.is_set():
            self.end()
            self._resting = self._thread.post(self._rest)

    def end(self) -> None:
        """End the last turn of the step: what is published next is still where it was computed."""
        if self._ours.is_set():
            self.held_s += time.monotonic() - self._since
            self._ours.clear()

    async def run(self, call: Callable[[], T]) -> T:
        """Run a call on the device once it is our turn; one that has begun is not interrupted by the turn's end.

        Raises:
            Fatal: the reserved engines kept the device for too long.

        """
        # The turn may be lost again during either wait.
        while not self._ours.is_set() or self._resting is not None:
            if self._resting is not None:
                resting, self._resting = self._resting, None
                await asyncio.wrap_future(resting)
            else:
                await self._turn()
        began = self._computes_since = time.monotonic()
        result = await self._thread(call)
        self._computes_since = None
        self.busy_s += time.monotonic() - began
        return result

    async def _turn(self) -> None:
        because = f"the reserved engines generate for step {self._step} on it"
        try:
            async with self._waits.on("the device", because=because, limit_s=self._limit_s):
                await self._ours.wait()
        except Timeout as error:
            raise Fatal(f"{error}: is the rollout manager running, and is there a worker that hangs?") from error
