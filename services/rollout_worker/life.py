"""What ends or interrupts a worker: preemption, an engine that hangs, a serving engine that needs its device.

*Preemption notices*. Consumes: the answers of each notice source, polled about once a second in a task of its own.
Produces: the first notice, which makes the worker shut down, and rebalance recommendations. Waits for: its sources,
whose calls are bounded; nothing waits for it. Ends when: the worker stops and, if the cloud expects it, the notice has
been acknowledged after the hand-off (`Preemptible.wait_handed_off`, which the worker's shutdown unblocks).

*Watchdog*, since an engine's thread cannot be interrupted. Consumes: the generator's progress. Waits for: a twentieth
of the stall limit between two checks. Ends when: the worker stops, or with `EngineFailed` when the engine hangs.

*Serving engine*, of a worker next to one. Consumes: its metrics, every 50 ms. Produces: calls of `Borrower`, and an
event when the engine does not answer, or is late without this worker. Waits for: an answer, 200 ms at most: a later one
counts as pressure. A yield waits for the worker's engine to stop, and for a load under way. Ends when: the worker
stops.
"""

from __future__ import annotations

import asyncio
import math
import os
import sys
import threading
import time
import traceback
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Literal, Protocol

import structlog
from prometheus_client import Counter

from rlboost.services.rollout_worker.domain.borrowing import Borrowing, ServingLoad
from rlboost.services.rollout_worker.domain.preemption import (
    POLL_INTERVAL_S,
    Notice,
    RebalanceRecommendation,
    SourceBackoff,
)
from rlboost.services.rollout_worker.generator import Generator
from rlboost.services.rollout_worker.ports import EngineFailed, NoticeSource
from rlboost.shared.errors import BusUnavailable, Retryable
from rlboost.shared.process.lifecycle import until_stop

log = structlog.get_logger(__name__)

_DETECT_TRIES = 4
"""How often each cloud is probed: the network of a machine that has just booted may not be up yet."""
_ACKNOWLEDGE_AFTER_S = 5.0
"""Delay of the acknowledgment after the notice. Other workers on this machine see the notice within 2 s and need 2 s:
the cloud must not reclaim the machine before they have handed off too."""


class Preemptible(Protocol):
    """Reacts to notices; the worker."""

    def on_preemption_notice(self, notice: Notice) -> None:
        """Start to shut down."""

    async def on_rebalance_recommendation(self, recommendation: RebalanceRecommendation) -> None:
        """Emit an event, and drain if that is configured."""

    async def wait_handed_off(self) -> None:
        """Wait until everything has been handed off."""


class PreemptionWatch:
    """Polls the sources that may announce a preemption of this machine.

    Args:
        sources: always polled, whether they answer or not.
        candidates: at most one of them is present on this machine; it is detected, then polled.
        worker: receives notices and recommendations.
        poll_interval_s: between two polls of a source.
        acknowledge_after_s: delay of the acknowledgment after the notice.

    """

    def __init__(
        self,
        sources: Sequence[NoticeSource],
        candidates: Sequence[NoticeSource],
        worker: Preemptible,
        *,
        poll_interval_s: float = POLL_INTERVAL_S,
        acknowledge_after_s: float = _ACKNOWLEDGE_AFTER_S,
    ) -> None:
        self._sources = sources
        self._candidates = candidates
        self._worker = worker
        self._poll_interval_s = poll_interval_s
        self._acknowledge_after_s = acknowledge_after_s
        self._first_notice: tuple[NoticeSource, Notice, float] | None = None
        """The first notice, its source, and its time (monotonic)."""

    async def run(self, stop: asyncio.Event) -> None:
        """Poll until the stop, which the worker sets on a notice; then acknowledge the notice."""
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._poll(source), name=f"notices-{source.name}") for source in self._sources]
            if self._candidates:
                tasks.append(group.create_task(self._detect_and_poll(), name="notices-detect"))
            await stop.wait()
            for task in tasks:
                task.cancel()
        await self._acknowledge()

    async def _detect_and_poll(self) -> None:
        """Detect this machine's cloud and poll it; return if none is detected."""
        for n in range(_DETECT_TRIES):
            for source in self._candidates:
                if await source.is_available():
                    log.info("notice_source_selected", source=source.name)
                    await self._poll(source)
                    return
            await asyncio.sleep(self._poll_interval_s * (1 << n))
        log.info("notice_source_missing", candidates=[source.name for source in self._candidates])

    async def _poll(self, source: NoticeSource) -> None:
        """Poll a source until it returns a notice."""
        backoff, last_recommendation = SourceBackoff(), ""
        while True:
            began = time.monotonic()
            try:
                answer = await source.poll()
            except Retryable as error:
                if backoff.on_failure(began):
                    log.warning("metadata_unavailable", source=source.name, reason=str(error))
            else:
                if backoff.on_answer():
                    log.info("metadata_recovered", source=source.name)
                match answer:
                    case Notice():
                        self._first_notice = self._first_notice or (source, answer, began)
                        self._worker.on_preemption_notice(answer)
                        return
                    case RebalanceRecommendation(reason) if reason != last_recommendation:
                        last_recommendation = reason
                        await self._worker.on_rebalance_recommendation(answer)
            await asyncio.sleep(began + backoff.wait_s(self._poll_interval_s) - time.monotonic())

    async def _acknowledge(self) -> None:
        if self._first_notice is None or not self._first_notice[1].event_id:
            return
        source, notice, at = self._first_notice
        await self._worker.wait_handed_off()
        await asyncio.sleep(at + self._acknowledge_after_s - time.monotonic())
        try:
            await source.acknowledge(notice)
        except Retryable as error:
            log.warning("notice_not_acknowledged", source=source.name, reason=str(error))
        else:
            log.info("notice_acknowledged", source=source.name, event_id=notice.event_id)


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


Phase = Literal["import", "join", "version", "pull", "load", "parity", "assignment", "step"]
"""In order, each until: our code runs; the manager knows the worker; a version is assigned; its weights are pulled;
the engine has loaded and verified them; the parity check has passed; a sample is assigned; the log has its first
token."""


class StartupTimer:
    """Times each phase once; what happens again before the first token counts toward the phase under way.

    Args:
        age_s: age of the process.
        clock: seconds.

    """

    def __init__(self, age_s: float = 0.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began = self._last = clock() - age_s
        self._phases: dict[str, float] = {}

    def end(self, phase: Phase) -> None:
        """Record the end of a phase; only the first call per phase counts."""
        if phase not in self._phases:
            now = self._clock()
            self._phases[phase], self._last = now - self._last, now

    def on_flush(self, tokens_generated: int) -> None:
        """Record that the log has the first `tokens_generated` tokens; the first token ends the last phase."""
        if tokens_generated and "step" not in self._phases:
            self.end("step")
            phases = {f"{phase}_s": round(seconds, 3) for phase, seconds in self._phases.items()}
            log.info("first_token", after_s=round(self._last - self._began, 3), **phases)


def process_age_s(stat: Path = Path("/proc/self/stat")) -> float:
    """Return the age of this process; 0 if `/proc` does not tell."""
    try:
        # proc(5), counted after the name: the start, in ticks since boot, is field 22.
        ticks = int(stat.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[19])
    except OSError:
        return 0.0
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


_SERVING_POLL_INTERVAL_S = 0.05
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
            if await until_stop(stop, began + _SERVING_POLL_INTERVAL_S - time.monotonic()):
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
