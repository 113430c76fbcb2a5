"""The loop of a worker beside a serving engine: it watches that engine's load, yields the device and takes it back.

Consumes: the serving engine's metrics, every 50 ms.
Produces: calls of `Borrower`, and an event when the engine does not answer, or is late without this worker.
Waits for: an answer, 200 ms at most: a later one counts as pressure. A yield waits for the worker's engine to stop, and
    for a load under way.
Ends when: the worker stops.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable
from typing import Protocol

import structlog
from prometheus_client import Counter

from rlboost.services.rollout_worker.domain.borrowing import Borrowing, ServingLoad
from rlboost.shared.errors import BusUnavailable, Retryable
from rlboost.shared.process.lifecycle import until_stop

log = structlog.get_logger(__name__)

POLL_INTERVAL_S = 0.05
ANSWER_LIMIT_S = 0.2
"""A server that takes longer is busy."""
_START_LIMIT_S = 5.0
_SILENCE_S = 5.0
"""A server that has not answered for this long is reported."""
_REPORT_EVERY_S = 600.0
_YIELDS = Counter("rlboost_worker_yields", "How often the worker yielded its device to the serving engine beside it.")
_BORROWED = Counter(
    "rlboost_worker_borrowed_seconds", "Time for which the worker had the device of the serving engine beside it."
)


class LoadSource(Protocol):
    """Reads the load of a serving engine; the adapter."""

    url: str

    async def read(self, limit_s: float) -> ServingLoad:
        """Return the load; raises `Retryable` without an answer, and `ConfigError` if the server does not report it."""


class Borrower(Protocol):
    """Yields its device and takes it back, both idempotently; the worker."""

    async def yield_device(self) -> None:
        """Return once the engine has stopped and the log has all its tokens."""

    async def take_device(self) -> None:
        """Generate again, or not yet: it is called until it has an effect."""


async def check_serving(source: LoadSource) -> None:
    """Read the load once, before anything else; a server that does not answer may start later.

    Raises:
        ConfigError: see `LoadSource.read`.

    """
    try:
        await source.read(_START_LIMIT_S)
    except Retryable as error:
        log.warning("serving_trouble", reason=str(error))


class ServingWatch:
    """Watches one serving engine for one worker.

    Args:
        source: reads its load.
        borrowing: decides.
        worker: yields and takes.
        report: emits an event for users.

    """

    def __init__(
        self, source: LoadSource, borrowing: Borrowing, worker: Borrower, report: Callable[[str], Awaitable[None]]
    ) -> None:
        self._source = source
        self._borrowing = borrowing
        self._worker = worker
        self._report = report
        self._reported_at = -math.inf

    async def run(self, stop: asyncio.Event) -> None:
        """Watch until the stop.

        Raises:
            ConfigError: the server's first answer shows that it does not report its load.

        """
        generates, answered_at, error = False, time.monotonic(), ""
        while True:
            began = time.monotonic()
            load: ServingLoad | None = None
            try:
                load = await self._source.read(ANSWER_LIMIT_S)
                answered_at = time.monotonic()
            except Retryable as unavailable:
                error = str(unavailable)
            reason = self._borrowing.observe(load, time.monotonic())
            await (self._worker.yield_device() if reason else self._worker.take_device())
            if reason and generates:
                _YIELDS.inc()
                took_s = round(time.monotonic() - began, 3)
                log.info("device_yielded", reason=reason, took_s=took_s, calm_s=self._borrowing.calm_s)
            elif not reason and not generates:
                log.info("device_taken", calm_s=self._borrowing.calm_s)
            generates = not reason
            if began - answered_at > _SILENCE_S:
                await self._report_trouble(error)
            elif late := self._borrowing.late_alone:
                await self._report_trouble(
                    f"{self._source.url}: {late} while this worker yielded: raise RLBOOST_WORKER_BESIDE_TTFT_MS"
                )
            if await until_stop(stop, began + POLL_INTERVAL_S - time.monotonic()):
                return
            if generates:
                _BORROWED.inc(time.monotonic() - began)

    async def _report_trouble(self, reason: str) -> None:
        now = time.monotonic()
        if now - self._reported_at < _REPORT_EVERY_S:
            return
        self._reported_at = now
        try:
            await self._report(reason)
        except BusUnavailable as error:
            log.warning("redis_unavailable", error=str(error), during="report trouble with the serving engine")
