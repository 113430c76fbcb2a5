"""Runs blocking work in a thread that neither a cancelled task nor the end of the process waits for."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def run_in_thread(name: str, work: Callable[[], T]) -> asyncio.Future[T]:
    """Start `work` in its own daemon thread and return its outcome.

    Unlike `asyncio.to_thread`, no pool is joined when the process ends, so `work` may block forever. Cancelling the
    returned future does not stop `work`; its outcome is then dropped.

    Args:
        name: the thread's name, as stack dumps show it.
        work: called once; whatever it raises is raised where the future is awaited.

    """
    outcome: Future[T] = Future()
    outcome.set_running_or_notify_cancel()

    def run() -> None:
        try:
            outcome.set_result(work())
        except BaseException as error:  # noqa: BLE001 - raised where the future is awaited
            outcome.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return asyncio.wrap_future(outcome)
