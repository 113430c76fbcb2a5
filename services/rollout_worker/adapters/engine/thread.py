"""The thread that owns an inference engine: runs rounds, and calls from other threads between two rounds."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from rlboost.services.rollout_worker.ports import EngineFailed
from rlboost.shared.errors import Fatal, RLBoostError

T = TypeVar("T")


class EngineThread:
    """Runs rounds in its own thread once `run_rounds` has set them.

    An `RLBoostError` raised by a call goes to the caller. Any other error, and any error of a round, ends the engine.

    Args:
        name: the thread's name.

    """

    def __init__(self, name: str) -> None:
        self.lock = threading.Condition()
        """Guards the state that the engine shares with other threads; notify it when there may be work."""
        self._has_work: Callable[[], bool] = lambda: False
        self._round: Callable[[], None] = lambda: None
        self._on_end: Callable[[], None] = lambda: None
        self._calls: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._closing = False
        self._ended: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    # --- from any thread ----------------------------------------------------------------------------------------------

    def run_rounds(
        self, *, has_work: Callable[[], bool], round_: Callable[[], None], on_end: Callable[[], None]
    ) -> None:
        """Run rounds from now on.

        Args:
            has_work: called under `lock`; returns True if there is a round to run.
            round_: runs one round; called without the lock.
            on_end: called as the last thing on the thread.

        """
        with self.lock:
            self._has_work, self._round, self._on_end = has_work, round_, on_end
            self.lock.notify()

    def check_alive(self, *, allow_closed: bool = False) -> None:
        """Raise `EngineFailed` if the engine died, `Fatal` if it was closed. Called under `lock`."""
        if self._ended.done() and (error := self._ended.exception()) is not None:
            raise EngineFailed(str(error)) from error.__cause__
        if self._closing and not allow_closed:
            raise Fatal("the inference engine is closed")

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Run `function` between two rounds; cancelling the future before it starts withdraws it."""
        done: Future[T] = Future()
        with self.lock:
            self.check_alive()
            self._calls.append((function, done))
            self.lock.notify()
        return done

    async def close(self) -> None:
        """Stop for good, after the current round, and wait until the thread has ended; idempotent."""
        with self.lock:
            self._closing = True
            self.lock.notify()
        # Not joined in a thread of asyncio's pool: the end of the process would wait for that thread without a limit.
        with contextlib.suppress(Fatal):
            # Shielded: cancelling this wait must not cancel the future, which the thread sets.
            await asyncio.shield(asyncio.wrap_future(self._ended))
        self._thread.join(1.0)  # it only unwinds: the process must not end before

    # --- on the thread ------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        failure: Fatal | None = None
        try:
            while self._between_rounds():
                self._round()
        except Exception as error:  # noqa: BLE001 - ends the thread; `check_alive` raises it
            failure = _death(error)
        try:
            self._on_end()
        except Exception as error:  # noqa: BLE001 - as above
            failure = failure or _death(error)
        with self.lock:
            uncalled, self._calls = self._calls, deque()
            if failure is None:
                self._ended.set_result(None)
            else:
                self._ended.set_exception(failure)
        for _, done in uncalled:
            if done.set_running_or_notify_cancel():
                done.set_exception(failure or Fatal("the inference engine is closed"))

    def _between_rounds(self) -> bool:
        """Run queued calls and wait until there is a round to run; return False at the end."""
        while True:
            with self.lock:
                self.lock.wait_for(lambda: self._closing or bool(self._calls) or self._has_work())
                if self._closing:
                    return False
                if not self._calls:
                    return True
                function, done = self._calls.popleft()
            _run_call(function, done)


def _run_call(function: Callable[[], T], done: Future[T]) -> None:
    if not done.set_running_or_notify_cancel():
        return
    try:
        result = function()
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
