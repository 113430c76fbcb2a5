"""The life of one rollout worker: join, work, shut down.

Join: `_join` sends the first heartbeat, and retries while Redis is unavailable.
Work: four loops run until the stop: heartbeats, flushes, commands and weight updates (`commands`).
    They have tasks of their own, as has the engine's import, so a heartbeat never waits for a load. HTTP, preemption
    watch and hang watchdog are extra loops of `run`.
Shut down: a signal, a preemption notice or the manager's drain sets the stop. `shutdown` then hands off what the worker
    holds (invariant 7); heartbeats continue until `WorkerLeft`, the last message.
Failure: a task that fails cancels all others; `_report_failure` tells the manager why, and the process exits non-zero
    (invariant 8). A dead engine fails the next flush.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import structlog

from rlboost.services.rollout_worker.commands import CommandLoop, ImageLoads, WeightUpdates
from rlboost.services.rollout_worker.domain.parity_check import ParityCheckFailed
from rlboost.services.rollout_worker.domain.preemption import Notice, RebalanceRecommendation
from rlboost.services.rollout_worker.generator import Generator
from rlboost.services.rollout_worker.life import StartupTimer
from rlboost.services.rollout_worker.manager_connection import (
    REDIS_LIMIT_S,
    REJECTION_LIMIT_S,
    RETRY_INTERVAL_S,
    ManagerConnection,
)
from rlboost.services.rollout_worker.ports import EngineFailed, WeightSource
from rlboost.shared.errors import BusUnavailable, CredentialRejected, Fatal, leaves
from rlboost.shared.process.lifecycle import Loop, stop_cause, supervise, until_stop
from rlboost.shared.process.waiting import Waits

log = structlog.get_logger(__name__)

_HAND_OFF_FRACTION = 0.8
"""Fraction of the grace that the hand-off may take: the process must exit within the grace."""
_PAUSE_LIMIT_S = 1.0
"""How long the shutdown waits for the engine to pause: longer than a step, shorter than a load of large weights."""
_CLOSE_LIMIT_S = 1.0
"""How long the shutdown waits for the engine to close, after the hand-off."""
_FAILURE_REPORT_LIMIT_S = 2.0
"""How long a failed worker tries to tell the manager why."""


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """Behavior of a worker; see `Settings`."""

    flush_interval_s: float
    heartbeat_interval_s: float
    grace_s: float
    """Time from the stop until the process must be gone."""
    finish_limit_s: float = 600.0
    """With `in_flight: finish`: how long new weights wait for samples to finish under the current ones. Afterwards the
    samples continue under the new weights. A newer version restarts the wait, at most `max_staleness` times."""
    drain_on_rebalance: bool = False
    """Drain when the cloud recommends to rebalance."""


class WorkerApp:
    """One worker process: an engine and its connection to the manager.

    Args:
        stop: the process's stop event; the worker also sets it when it decides to drain.
        connection: writes heartbeats, tokens and events.
        generator: owns the engine.
        weights: provides weights.
        options: intervals, limits and behavior.
        waits: lists what is waited for.
        startup: times the phases up to the first token.

    """

    def __init__(
        self,
        stop: asyncio.Event,
        connection: ManagerConnection,
        generator: Generator,
        weights: WeightSource,
        options: WorkerOptions,
        waits: Waits,
        startup: StartupTimer | None = None,
    ) -> None:
        self._stop = stop
        self._connection = connection
        self._generator = generator
        self._options = options
        self._waits = waits
        self._startup = startup or StartupTimer()
        self._heartbeat_now = asyncio.Event()
        """Set when the next heartbeat should not wait for its interval."""
        self._handed_off = asyncio.Event()
        """Set when `WorkerLeft` has been sent."""
        executing = asyncio.Lock()
        self._updates = WeightUpdates(
            connection, generator, weights, waits, self._startup, options.finish_limit_s, executing
        )
        self._images = ImageLoads(weights, generator)
        self._commands = CommandLoop(
            connection,
            generator,
            self._updates,
            self._images,
            self._startup,
            executing,
            on_drain=self.drain,
            on_state_changed=self._heartbeat_now.set,
        )
        self._redis_answered_at = time.monotonic()
        self._rejected_since: float | None = None
        self._drain_reason = ""
        self._notice = Notice("")

    async def run(self, extra_loops: Mapping[str, Loop]) -> None:
        """Join, work until the stop and shut down, with `extra_loops` next to it.

        Raises:
            ExceptionGroup: a loop failed. The manager knows why, if Redis answered within 2 s.

        """
        try:
            await supervise({"worker": self._live, **extra_loops}, self._stop, grace_s=self._options.grace_s)
        except ExceptionGroup as group:
            await self._report_failure(group)
            raise

    async def _live(self, stop: asyncio.Event) -> None:
        await self._join()
        async with asyncio.TaskGroup() as group:
            heartbeats = group.create_task(self._send_heartbeats(), name="heartbeats")
            group.create_task(self._flush_until_stop(), name="flush")
            commands = (
                group.create_task(self._generator.prepare(), name="prepare-engine"),
                group.create_task(self._commands.run(), name="commands"),
                group.create_task(self._updates.run(self._commands.execute), name="weight-updates"),
            )
            await stop.wait()
            await self.shutdown(commands)
            await self._images.close()
            heartbeats.cancel()

    # --- join and work ------------------------------------------------------------------------------------------------

    async def _join(self) -> None:
        """Send heartbeats until the first has arrived, which announces the worker; return early at the stop."""
        while not await self._send_heartbeat():
            if await until_stop(self._stop, self._options.heartbeat_interval_s):
                return
        self._startup.end("join")

    async def _send_heartbeats(self) -> None:
        """Send a heartbeat in each interval, and at once after a change of state."""
        while True:
            await until_stop(self._heartbeat_now, self._options.heartbeat_interval_s)
            self._heartbeat_now.clear()
            await self._send_heartbeat()

    async def _send_heartbeat(self) -> bool:
        """Send one heartbeat; return False if Redis is unavailable. Join again if Redis no longer knows the worker.

        Raises:
            Fatal: Redis has been unavailable for too long.

        """
        try:
            await self._connection.send_heartbeat()
        except CredentialRejected as error:
            self._rejected_since = self._rejected_since or time.monotonic()
            if time.monotonic() - self._rejected_since > REJECTION_LIMIT_S:
                self._rejected_since = None
                await self._commands.rejoin_rejected(str(error))
            return False
        except BusUnavailable as error:
            self._rejected_since = None
            if time.monotonic() - self._redis_answered_at > REDIS_LIMIT_S:
                raise Fatal(f"{error}; gave up after {REDIS_LIMIT_S:.0f} s: start Redis, then the worker") from error
            return False
        self._redis_answered_at, self._rejected_since = time.monotonic(), None
        return True

    async def _flush_until_stop(self) -> None:
        """Send new tokens to the log in each interval; pause the engine while too many are unsent."""
        while not await until_stop(self._stop, self._options.flush_interval_s):
            try:
                n_generated = self._generator.stats().tokens_generated_total
                await self._connection.flush()
                self._startup.on_flush(n_generated)
                self._updates.on_flush()
                await self._generator.resume("unsent")
            except BusUnavailable as error:
                unsent = self._connection.incarnation.unsent
                log.warning("redis_unavailable", error=str(error), during="flush", unsent_bytes=unsent.unsent_bytes)
                if unsent.is_full:
                    await self._generator.pause("unsent")
                await until_stop(self._stop, RETRY_INTERVAL_S)

    # --- reasons to stop ----------------------------------------------------------------------------------------------

    def on_preemption_notice(self, notice: Notice) -> None:
        """Shut down now, because this machine will be preempted. The first reason to stop counts.

        The lead time is not used: it is unreliable, and a sample resumes on another worker for one prefill.
        """
        if not self._stop.is_set():
            log.warning("preemption_notice_received", reason=notice.reason, lead_s=notice.lead_s)
            self._notice = notice
            self._stop.set()

    async def on_rebalance_recommendation(self, recommendation: RebalanceRecommendation) -> None:
        """Emit an event, and drain if that is configured."""
        try:
            await self._connection.report_rebalance_recommendation(recommendation.reason)
        except BusUnavailable as error:
            log.warning("redis_unavailable", error=str(error), during="report a rebalance recommendation")
        if self._options.drain_on_rebalance:
            self.drain(recommendation.reason)

    def drain(self, reason: str) -> None:
        """Shut down without a preemption notice."""
        if not self._stop.is_set():
            self._drain_reason = reason
            self._stop.set()

    # --- the serving engine beside it ---------------------------------------------------------------------------------

    async def yield_device(self) -> None:
        """Stop generating, and hand all samples back; idempotent."""
        await self._commands.yield_device()

    async def take_device(self) -> None:
        """Generate again, if the manager knows of the pause; idempotent."""
        await self._commands.take_device()

    async def use_seats(self, seats: int) -> None:
        """Hold at most this many samples, and hand the newest of the others back; idempotent."""
        await self._commands.use_seats(seats)

    async def wait_handed_off(self) -> None:
        """Wait until `shutdown` has handed off everything."""
        await self._handed_off.wait()

    # --- shut down ----------------------------------------------------------------------------------------------------

    async def shutdown(self, command_tasks: Collection[asyncio.Task[None]]) -> None:
        """Accept nothing new, pause the engine, flush, leave, close the engine (invariant 7).

        Args:
            command_tasks: cancelled first: no command takes effect afterwards.

        Raises:
            WaitTimedOut: Redis was unavailable for too much of the grace.
            CredentialRejected: Redis rejected the worker for too long.

        """
        connection, began = self._connection, time.monotonic()
        reason = self._drain_reason or self._notice.reason or stop_cause(self._stop)
        for task in command_tasks:
            task.cancel()
        limit_s = _HAND_OFF_FRACTION * self._options.grace_s
        async with self._waits.on("the hand-off", because=reason, limit_s=limit_s):
            if not self._drain_reason:
                lead_s = self._options.grace_s if self._notice.lead_s is None else self._notice.lead_s
                await connection.retry_until_ok(
                    "send the preemption notice", lambda: connection.send_preemption_notice(reason, lead_s)
                )
            await asyncio.wait(command_tasks)
            connection.session.drain()  # its effect is not needed: the cancelled tasks include a running pull
            self._heartbeat_now.set()
            await self._pause_engine()
            await connection.retry_until_ok("flush the last tokens", connection.flush)
            samples = len(connection.session.held)
            await connection.retry_until_ok("leave", lambda: connection.leave(reason))
        log.info(
            "handed_off",
            samples=samples,
            tokens_generated=self._generator.stats().tokens_generated_total,
            took_s=round(time.monotonic() - began, 3),
        )
        self._handed_off.set()
        await self._close_engine()

    async def _pause_engine(self) -> None:
        """Return when the engine generates no more tokens of the held samples."""
        try:
            async with asyncio.timeout(_PAUSE_LIMIT_S):
                await self._generator.pause("shutdown")
        except TimeoutError:
            # A parity check or a long step still runs. Aborted requests get no further tokens.
            self._generator.abort(list(self._connection.session.held.items()))

    async def _close_engine(self) -> None:
        try:
            async with asyncio.timeout(_CLOSE_LIMIT_S):
                await self._generator.close()
        except TimeoutError:
            log.warning("engine_close_timed_out", after_s=_CLOSE_LIMIT_S)

    async def _report_failure(self, group: ExceptionGroup) -> None:
        """Tell the manager why the worker failed, so that its samples need not wait for the lease to expire."""
        error = leaves(group)[0]
        engine_failed = isinstance(error, EngineFailed) and not self._generator.is_paused
        try:
            async with asyncio.timeout(_FAILURE_REPORT_LIMIT_S):
                if isinstance(error, ParityCheckFailed):
                    await self._connection.report_parity_failure(error)
                await self._connection.leave(f"failed: {error}", engine_failed=engine_failed)
        except (BusUnavailable, TimeoutError) as unreported:
            log.warning("exit_report_failed", error=str(unreported))
