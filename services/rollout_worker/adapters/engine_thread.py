"""The thread that owns an inference engine: it runs rounds, and between two of them what others ask for."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from services.rollout_worker.ports import EngineFailed
from shared.errors import Fatal, RLBoostError

T = TypeVar("T")


class EngineThread:
    """A loop in a thread of its own; it runs rounds once `run_rounds` has told it which.

    An `RLBoostError` of a call is its caller's; any other error, and any error of a round, is the end of the engine.

    Args:
        name: of the thread.

    """

    def __init__(self, name: str) -> None:
        self.lock = threading.Condition()
        """Guards whatever the engine shares with other threads; notify it when there may be work."""
        self._has_work: Callable[[], bool] = lambda: False
        self._round: Callable[[], None] = lambda: None
        self._at_end: Callable[[], None] = lambda: None
        self._calls: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._closing = False
        self._ended: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    # --- from any thread ----------------------------------------------------------------------------------------------

    def run_rounds(
        self, *, has_work: Callable[[], bool], round_: Callable[[], None], at_end: Callable[[], None]
    ) -> None:
        """Run rounds from now on.

        Args:
            has_work: called under `lock`: whether there is a round to run.
            round_: runs one round, without the lock.
            at_end: called on the thread when nothing more will run on it.

        """
        with self.lock:
            self._has_work, self._round, self._at_end = has_work, round_, at_end
            self.lock.notify()

    def check_alive(self, *, closed_is_fine: bool = False) -> None:
        """Raise `EngineFailed` if the engine died, `Fatal` if it was closed. Called under `lock`."""
        if self._ended.done() and (error := self._ended.exception()) is not None:
            raise EngineFailed(str(error)) from error.__cause__
        if self._closing and not closed_is_fine:
            raise Fatal("the inference engine is closed")

    def ask(self, call: Callable[[], T]) -> Future[T]:
        """Have `call` run between two rounds; a future that is cancelled before withdraws it."""
        done: Future[T] = Future()
        with self.lock:
            self.check_alive()
            self._calls.append((call, done))
            self.lock.notify()
        return done

    def stop(self) -> None:
        """Stop for good, at the end of the round; idempotent."""
        with self.lock:
            self._closing = True
            self.lock.notify()

    async def close(self) -> None:
        """Stop, and wait until it has."""
        self.stop()
        # Not a thread of asyncio's pool that joins this one: the process's end would wait for it, whatever the limit.
        with contextlib.suppress(Fatal):
            await self.wait_ended()
        self._thread.join(1.0)  # it has nothing left to do: a process must not end while it unwinds

    async def wait_ended(self) -> None:
        """Return once it is closed; raise `EngineFailed` if it died."""
        # shielded: a waiter that is cancelled must not cancel what others wait for
        await asyncio.shield(asyncio.wrap_future(self._ended))

    # --- on the thread ------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        failure: Fatal | None = None
        try:
            while self._boundary():
                self._round()
        except Exception as error:  # noqa: BLE001 - the thread's end: whatever it was, the event loop must hear of it
            failure = _death(error)
        try:
            self._at_end()
        except Exception as error:  # noqa: BLE001 - likewise
            failure = failure or _death(error)
        with self.lock:
            left, self._calls = self._calls, deque()
            if failure is None:
                self._ended.set_result(None)
            else:
                self._ended.set_exception(failure)
        for _, done in left:
            if done.set_running_or_notify_cancel():
                done.set_exception(failure or Fatal("the inference engine is closed"))

    def _boundary(self) -> bool:
        """Do what was asked for, and sleep until there is a round to run; False at the end."""
        while True:
            with self.lock:
                self.lock.wait_for(lambda: self._closing or bool(self._calls) or self._has_work())
                if self._closing:
                    return False
                if not self._calls:
                    return True
                call, done = self._calls.popleft()
            _carry_out(call, done)


def _carry_out(call: Callable[[], T], done: Future[T]) -> None:
    if not done.set_running_or_notify_cancel():
        return
    try:
        result = call()
    except RLBoostError as error:
        done.set_exception(error)
    except Exception as error:
        done.set_exception(_death(error))
        raise
    else:
        done.set_result(result)


def _death(error: Exception) -> EngineFailed:
    failure = EngineFailed(f"the inference engine died: {error!r}")
    failure.__cause__ = error
    return failure
