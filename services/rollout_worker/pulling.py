"""Weights on their way into the engine: pulled beside everything else, loaded, verified, and only then served."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import structlog

from services.rollout_worker.domain.actions import Action, Pull
from services.rollout_worker.domain.session import Weights
from services.rollout_worker.generator import Generator
from services.rollout_worker.link import Link
from services.rollout_worker.ports import WeightSource
from services.rollout_worker.startup import Startup
from shared.errors import NotFound, Timeout
from shared.waiting import Waits

log = structlog.get_logger(__name__)

Outcome = Callable[[], Awaitable[list[Action]]]
"""What came of a pull; it says what is to be done."""


class Pulling:
    """At most one pull at a time.

    Args:
        link: whose session is told what came of it.
        generator: gets the weights.
        weights: where they come from.
        waits: where waits are listed.
        startup: laps of the first pull.
        finish_limit_s: how long new weights wait for the samples that are to end under the old ones.

    """

    def __init__(
        self,
        link: Link,
        generator: Generator,
        weights: WeightSource,
        waits: Waits,
        startup: Startup,
        finish_limit_s: float,
    ) -> None:
        self._link = link
        self._generator = generator
        self._weights = weights
        self._waits = waits
        self._startup = startup
        self._finish_limit_s = finish_limit_s
        self._pulling: asyncio.Task[None] | None = None
        self.flushed = asyncio.Event()
        """Set after each flush: some samples may have ended."""

    async def begin(self, pull: Pull, group: asyncio.TaskGroup, apply: Callable[[Outcome], Awaitable[None]]) -> None:
        """Begin to pull and load; an earlier pull is given up.

        Args:
            pull: which weights.
            group: owns the task.
            apply: carries out what came of it, while no command is.

        """
        await self.stop()
        task = self._pull((pull.job_id, pull.version), pull, apply)
        self._pulling = group.create_task(task, name=f"pull-{pull.job_id}-{pull.version}")

    async def stop(self) -> None:
        """Give up the pull under way, unless it is the one that asks."""
        pulling, self._pulling = self._pulling, None
        if pulling is None or pulling is asyncio.current_task():
            return
        pulling.cancel()
        await asyncio.wait({pulling})
        if self._link.me.session.serving is not None:
            await self._generator.release("loading")  # it had not begun to replace the weights

    def cancel(self) -> None:
        """Give it up for good, without waiting."""
        if self._pulling is not None:
            self._pulling.cancel()

    async def _pull(self, weights: Weights, pull: Pull, apply: Callable[[Outcome], Awaitable[None]]) -> None:
        session, began = self._link.me.session, time.monotonic()
        try:
            await self._generator.settled()
            staged = await self._weights.pull(*weights)
            self._startup.end("pull")
        except NotFound as error:
            reason = str(error)
            await self._link.insist("report missing weights", lambda: self._link.report_unavailable(weights, reason))

            async def unavailable() -> list[Action]:
                return session.unavailable(weights, reason)

            await apply(unavailable)
            return
        if pull.in_flight == "finish" and session.serving is not None:
            await self._until_finished(weights)
        pulled = time.monotonic()
        await self._generator.load(staged, weights[1], session.unloaded, keep_kv=pull.in_flight == "keep")
        self._startup.end("load")
        loaded = time.monotonic()
        await self._generator.check_canary()
        self._startup.end("canary")
        log.info(
            "weights_loaded",
            job=weights[0],
            version=weights[1],
            pull_s=round(pulled - began, 3),
            load_s=round(loaded - pulled, 3),
            canary_s=round(time.monotonic() - loaded, 3),
        )

        async def served() -> list[Action]:
            actions = session.loaded(weights)
            await self._generator.release("loading")
            return actions

        await apply(served)

    async def _until_finished(self, weights: Weights) -> None:
        """Let the samples that the engine has end under the weights that it has, for a while at most."""
        session = self._link.me.session
        because = f"they end under their weights before version {weights[1]} of job {weights[0]} is loaded"
        try:
            async with self._waits.on("the samples in flight", because=because, limit_s=self._finish_limit_s):
                while session.started:
                    self.flushed.clear()
                    await self.flushed.wait()
        except Timeout as error:
            log.warning("in_flight_not_finished", samples=session.started, reason=str(error))
