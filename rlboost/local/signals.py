"""Ends a task on a signal."""

from __future__ import annotations

import asyncio
import signal


def cancel_on_signals() -> None:
    """Cancel the calling task at SIGINT, SIGTERM and SIGHUP: the first signal stops everything in order."""
    task = asyncio.current_task()
    assert task is not None
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
