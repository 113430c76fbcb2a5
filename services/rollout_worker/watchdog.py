"""Ends the worker when its engine hangs: it cannot be interrupted, so only another process helps."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
import traceback

import structlog

from services.rollout_worker.generator import Generator
from services.rollout_worker.ports import EngineFailed
from shared.lifecycle import until_stop

log = structlog.get_logger(__name__)

_LOOKS = 20
"""How often it looks within the limit."""
_LATE = 2.0
"""A look that comes later than this many intervals counts as this many: the process itself stood still."""


class Watchdog:
    """One more loop of the worker.

    Args:
        generator: owns the engine.
        limit_s: how long a token may take while the engine has requests; see `Progress`.

    """

    def __init__(self, generator: Generator, limit_s: float) -> None:
        self._generator = generator
        self._limit_s = limit_s
        self._interval_s = limit_s / _LOOKS

    async def run(self, stop: asyncio.Event) -> None:
        """Look until the stop.

        Raises:
            EngineFailed: the engine hangs.

        """
        looked = time.monotonic()
        while not await until_stop(stop, self._interval_s):
            now = time.monotonic()
            elapsed_s, looked = min(now - looked, _LATE * self._interval_s), now
            progress = self._generator.progress(elapsed_s)
            if progress.hangs(self._limit_s):
                stats = self._generator.stats()
                log.error("engine_hangs", running=stats.running, pending=stats.pending, stacks=_stacks())
                raise EngineFailed(
                    f"the inference engine hangs: it has {stats.running + stats.pending} samples, and no token has "
                    f"come for {progress.silent_s:.3g} s. The process ends, so that another can take its place; where "
                    "steps take so long by nature, raise RLBOOST_WORKER_STALL_LIMIT_S"
                )


def _stacks() -> dict[str, list[str]]:
    """Return where every other thread stands, by its name."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return {
        names.get(ident, str(ident)): [line.strip() for line in traceback.format_stack(frame, limit=4)]
        for ident, frame in sys._current_frames().items()  # noqa: SLF001 - there is no other way to ask
        if ident != threading.get_ident()
    }
