"""Replaces the engine's weights: pull, load, verify, parity check, serve.

Consumes: `PullWeights` effects of the session, one at a time: a newer one cancels the older.
Produces: the outcome, once the weights can be served or are found unavailable.
Waits for: the weight source (`WeightSource.pull`); with `in_flight: finish` also for the samples in the engine, which
    `on_flush` reports and `finish_limit_s` bounds; then for the engine's load and parity check.
Ends when: the outcome was handled, or `cancel` or `abandon` is called.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

import structlog

from rlboost.services.rollout_worker.domain.effects import PullWeights
from rlboost.services.rollout_worker.generator import Generator
from rlboost.services.rollout_worker.manager_connection import ManagerConnection
from rlboost.services.rollout_worker.ports import StagedWeights, WeightSource
from rlboost.services.rollout_worker.startup_timer import StartupTimer
from rlboost.shared.errors import BadSignature, Corrupt, NotFound, WaitTimedOut
from rlboost.shared.ids import WeightsRef
from rlboost.shared.progress import LastDuration
from rlboost.shared.waiting import Waits

log = structlog.get_logger(__name__)

LOAD_LIMIT_S = 3600.0
"""For the engine, its build included: compiling a large model takes many minutes."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """The engine has new weights, which have passed the parity check. It is paused with reason "loading"."""

    weights: WeightsRef
    update_s: float
    """From the command to here."""
    pause_s: float
    """Without generation, of that."""


@dataclass(frozen=True, slots=True)
class Unavailable:
    """The weights could not be pulled; the manager knows. The engine is as it was."""

    weights: WeightsRef
    reason: str


Outcome = Loaded | Unavailable
HandleOutcome = Callable[[Outcome], Awaitable[None]]


class WeightUpdates:
    """Runs at most one weight update at a time.

    Args:
        connection: reports weights that are unavailable.
        generator: loads the weights.
        source: provides the weights.
        waits: lists what is waited for.
        startup: times the first update.
        finish_limit_s: how long new weights wait for samples that are to finish under the current ones.

    """

    def __init__(
        self,
        connection: ManagerConnection,
        generator: Generator,
        source: WeightSource,
        waits: Waits,
        startup: StartupTimer,
        finish_limit_s: float,
    ) -> None:
        self._connection = connection
        self._generator = generator
        self._source = source
        self._waits = waits
        self._startup = startup
        self._finish_limit_s = finish_limit_s
        self._task: asyncio.Task[None] | None = None
        self._flushed = asyncio.Event()
        self._starts, self._loads, self._checks = LastDuration(), LastDuration(), LastDuration()

    async def start(self, pull: PullWeights, group: asyncio.TaskGroup, handle: HandleOutcome) -> None:
        """Start an update in the background; cancel the one under way.

        Args:
            pull: which weights.
            group: owns the task.
            handle: called with the outcome, by the task.

        """
        await self.cancel()
        self._task = group.create_task(self._update(pull, handle), name=f"update-{pull.job_id}-{pull.version}")

    async def cancel(self) -> None:
        """Cancel the update under way and resume the engine if it still has its old weights."""
        if await self.abandon() and self._connection.session.serving is not None:
            await self._generator.resume("loading")

    async def abandon(self) -> bool:
        """Cancel the update under way and leave the engine as it is; return True if there was one.

        An update that cancels itself, by the effects of its own outcome, counts as none.
        """
        task, self._task = self._task, None
        if task is None or task is asyncio.current_task():
            return False
        task.cancel()
        await asyncio.wait({task})
        return True

    def renew_access(self, credential: str) -> None:
        """Pull weights with a new credential from now on."""
        self._source.renew_access(credential)

    def on_flush(self) -> None:
        """Check again whether the samples in flight have finished."""
        self._flushed.set()

    async def _update(self, pull: PullWeights, handle: HandleOutcome) -> None:
        await handle(await self._replace(pull))

    async def _replace(self, pull: PullWeights) -> Outcome:
        session, weights, began = self._connection.session, WeightsRef(pull.job_id, pull.version), time.monotonic()
        try:
            if self._generator.is_loading:
                async with self._engine_wait(f"it ends an earlier load before {weights}", LastDuration()):
                    await self._generator.wait_for_load()
            staged = await self._source.pull(*weights)
            self._startup.end("pull")
            if pull.in_flight == "finish" and session.serving is not None:
                await self._until_finished(weights)
            pulled = time.monotonic()
            try:
                await self._load(staged, pull)
            except Corrupt as error:
                # Most likely a chunk was damaged after it had been verified: starting an engine again takes longer.
                log.warning("weights_pulled_again", job=pull.job_id, version=pull.version, error=str(error))
                self._source.verify_cache_again()
                await self._load(await self._source.pull(*weights), pull)
        except (NotFound, BadSignature) as error:
            unavailable = Unavailable(weights, str(error))
            await self._report(unavailable)
            return unavailable
        self._startup.end("load")
        loaded = time.monotonic()
        async with self._engine_wait(f"it runs the parity check of {weights}", self._checks):
            await self._generator.check_parity()
        self._startup.end("parity")
        checked = time.monotonic()
        log.info(
            "weights_loaded",
            job=pull.job_id,
            version=pull.version,
            pull_s=round(pulled - began, 3),
            load_s=round(loaded - pulled, 3),
            parity_s=round(checked - loaded, 3),
        )
        return Loaded(weights, update_s=checked - began, pause_s=checked - pulled)

    async def _load(self, staged: StagedWeights, pull: PullWeights) -> None:
        on_unloaded, keep_kv = self._connection.session.on_weights_unloaded, pull.in_flight == "keep"
        weights, exists = WeightsRef(pull.job_id, pull.version), self._generator.exists
        because = f"it loads {weights}" if exists else f"it starts, then loads {weights}"
        async with self._engine_wait(because, self._loads if exists else self._starts):
            await self._generator.load(staged, pull.version, on_unloaded, keep_kv=keep_kv)

    @asynccontextmanager
    async def _engine_wait(self, because: str, last: LastDuration) -> AsyncIterator[None]:
        """Wait for the engine, which does not say how far it is; `last` measures this time for the next."""
        limit_s = LOAD_LIMIT_S
        wait = self._waits.on(
            "the inference engine", because=because, limit_s=limit_s, progress=last.text, kind="engine"
        )
        async with wait:
            with last.measured():
                yield

    async def _report(self, unavailable: Unavailable) -> None:
        connection, weights, reason = self._connection, unavailable.weights, unavailable.reason
        await connection.retry_until_ok(
            "report unavailable weights", lambda: connection.report_weights_unavailable(weights, reason)
        )

    async def _until_finished(self, weights: WeightsRef) -> None:
        """Wait until the samples in the engine have finished under its current weights, up to `finish_limit_s`."""
        session = self._connection.session
        because = f"they finish under their weights before {weights} is loaded"
        try:
            async with self._waits.on("the samples in flight", because=because, limit_s=self._finish_limit_s):
                while session.n_submitted:
                    self._flushed.clear()
                    await self._flushed.wait()
        except WaitTimedOut as error:
            log.warning("in_flight_finish_timed_out", samples=session.n_submitted, reason=str(error))
