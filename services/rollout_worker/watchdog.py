"""Ends the worker's process when its engine hangs: the engine's thread cannot be interrupted.

Consumes: the generator's progress.
Waits for: a twentieth of the stall limit between two checks.
Ends when: the worker stops, or with `EngineFailed` when the engine hangs.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import time
import traceback

import structlog

from rlboost.services.rollout_worker.generator import Generator
from rlboost.services.rollout_worker.ports import EngineFailed
from rlboost.shared.process.lifecycle import until_stop

log = structlog.get_logger(__name__)

_CHECKS_PER_LIMIT = 20
_MAX_INTERVALS = 2.0
"""A check that is late counts as at most this many intervals: the process itself was stopped meanwhile."""


class Watchdog:
    """Checks the engine's progress regularly.

    Args:
        generator: owns the engine.
        limit_s: how long a token may take while the engine has requests; see `HangDetector.hangs`.

    """

    def __init__(self, generator: Generator, limit_s: float) -> None:
        self._generator = generator
        self._limit_s = limit_s
        self._interval_s = limit_s / _CHECKS_PER_LIMIT

    async def run(self, stop: asyncio.Event) -> None:
        """Check until the stop.

        Raises:
            EngineFailed: the engine hangs.

        """
        checked_at = time.monotonic()
        while not await until_stop(stop, self._interval_s):
            now = time.monotonic()
            elapsed_s, checked_at = min(now - checked_at, _MAX_INTERVALS * self._interval_s), now
            detector = self._generator.watch_tokens(elapsed_s)
            if detector.hangs(self._limit_s):
                stats = self._generator.stats()
                log.error("engine_hung", running=stats.running, pending=stats.pending, stacks=_stacks())
                raise EngineFailed(
                    f"the inference engine hangs: it has {stats.running + stats.pending} samples, and no token has "
                    f"come for {detector.silent_s:.3g} s. The process exits so that another can replace it. If steps "
                    "of this model take that long, raise RLBOOST_WORKER_STALL_LIMIT_S"
                )


def _stacks() -> dict[str, list[str]]:
    """Return the stack of every other thread, by the thread's name."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return {
        names.get(ident, str(ident)): [line.strip() for line in traceback.format_stack(frame, limit=4)]
        for ident, frame in sys._current_frames().items()  # noqa: SLF001 - no public function returns these
        if ident != threading.get_ident()
    }
