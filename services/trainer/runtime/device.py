"""The thread of all computation, and the trainer's turns on a device shared with reserved engines."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from rlboost.shared.errors import Fatal, WaitTimedOut
from rlboost.shared.process.waiting import Waits

T = TypeVar("T")


class DeviceThread:
    """One thread for all computation: the event loop stays free, and a cancelled job never waits for a kernel."""

    def __init__(self) -> None:
        """Start no thread yet."""
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="device")

    async def __call__(self, call: Callable[[], T]) -> T:
        """Return the result of the call. Calls run one at a time, in the order in which they were made.

        If the caller is cancelled, a started call still runs to its end.
        """
        return await asyncio.get_running_loop().run_in_executor(self._executor, call)

    def post(self, call: Callable[[], object]) -> Future[object]:
        """Queue a call without waiting for it."""
        return self._executor.submit(call)

    def close(self) -> None:
        """Accept no more calls; drop calls that have not started."""
        self._executor.shutdown(wait=False, cancel_futures=True)


class DeviceTurn:
    """The trainer's turn on a device that it shares with the reserved engines, during one step."""

    def __init__(
        self, thread: DeviceThread, waits: Waits, step: int, limit_s: float, offload: Callable[[], object]
    ) -> None:
        """Start without the device; `run` waits for it for at most `limit_s`.

        `offload` is called on the device's thread when the turn ends before the step does.
        """
        self._thread = thread
        self._offload = offload
        self._offloading: Future[object] | None = None
        self._waits = waits
        self._step = step
        self._limit_s = limit_s
        self._owned = asyncio.Event()
        self._step_ended = False
        self._began = self._since = time.monotonic()
        self.waited_s: float | None = None
        """Time from the start of the step to the first turn; None before it."""
        self.held_s = 0.0
        """Total duration of the turns that have ended."""
        self.busy_s = 0.0
        """How long the device computed."""
        self._computes_since: float | None = None

    @property
    def idle_s(self) -> float:
        """Return how long the trainer has had the device until now without computing."""
        now = time.monotonic()
        held_s = self.held_s + (now - self._since if self._owned.is_set() else 0.0)
        busy_s = self.busy_s + (0.0 if self._computes_since is None else now - self._computes_since)
        return max(0.0, held_s - busy_s)

    def set_owned(self, *, owned: bool) -> None:
        """Set whether the trainer has the device; without effect once the step's last turn has ended."""
        if self._step_ended:
            return
        now = time.monotonic()
        if owned and not self._owned.is_set():
            self._since = now
            if self.waited_s is None:
                self.waited_s = now - self._began
            self._owned.set()
        elif not owned and self._owned.is_set():
            self._end_turn()
            self._offloading = self._thread.post(self._offload)

    def end_step(self) -> None:
        """End the step's last turn. Nothing is offloaded, because the weights are published from the device."""
        self._step_ended = True
        if self._owned.is_set():
            self._end_turn()

    def _end_turn(self) -> None:
        self.held_s += time.monotonic() - self._since
        self._owned.clear()

    async def run(self, call: Callable[[], T]) -> T:
        """Run a call on the device during a turn; the end of the turn does not interrupt a started call.

        Raises:
            Fatal: the reserved engines did not release the device within the limit.

        """
        # The turn may end again during either wait.
        while not self._owned.is_set() or self._offloading is not None:
            if self._offloading is not None:
                offloading, self._offloading = self._offloading, None
                await asyncio.wrap_future(offloading)
            else:
                await self._turn()
        began = self._computes_since = time.monotonic()
        try:
            return await self._thread(call)
        finally:
            self._computes_since = None
            self.busy_s += time.monotonic() - began

    async def _turn(self) -> None:
        because = f"the reserved engines generate for step {self._step + 1} on it"
        try:
            async with self._waits.on("the device", because=because, limit_s=self._limit_s):
                await self._owned.wait()
        except WaitTimedOut as error:
            raise Fatal(f"{error}: check that the rollout manager runs, and that no worker hangs") from error
