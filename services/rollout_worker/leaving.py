"""The end of a worker: what makes it leave, the hand-off, and its last word.

A stop is a signal, a notice that the machine goes, or the manager's order. Then nothing new is taken, everything made
goes to the log, and the last word is `WorkerLeft` (invariant 7).
"""

from __future__ import annotations

import asyncio
import time

import structlog

from services.rollout_worker.domain.notices import Advice, Notice
from services.rollout_worker.generator import CanaryFailed, Generator
from services.rollout_worker.link import Link
from services.rollout_worker.ports import EngineFailed
from shared.errors import BusUnavailable
from shared.lifecycle import stopped_by
from shared.waiting import Waits

log = structlog.get_logger(__name__)

_LAST_WORD_S = 2.0
"""How long a worker that fails tries to say why."""
_STILL_S = 1.0
"""How long the engine may take to stand still: a step lasts a fraction of it, a load of large weights many times."""
_CLOSE_S = 1.0
"""How long the engine may take to stop, once nothing more is needed of it."""


class Leaving:
    """Decides that the worker leaves, and hands off.

    Args:
        link: says the last words.
        generator: stands still first.
        waits: where waits are listed.
        grace_s: from the stop until the process must be gone.
        heeds_advice: whether it also leaves, as if the manager had drained it, when its machine is likely to be taken
            away.

    """

    def __init__(
        self, link: Link, generator: Generator, waits: Waits, grace_s: float, *, heeds_advice: bool = False
    ) -> None:
        self._link = link
        self._generator = generator
        self._waits = waits
        self._grace_s = grace_s
        self._heeds_advice = heeds_advice
        self._told_to_leave = ""
        self._notice = Notice("")
        self._gone = asyncio.Event()
        self.stop = asyncio.Event()
        """The process's stop; the worker that runs sets which."""
        self.changed = asyncio.Event()
        """Set when the next beat should not wait."""
        self.commands_over = asyncio.Event()
        """Set when no command will be carried out any more."""

    # --- why ----------------------------------------------------------------------------------------------------------

    def take_notice(self, notice: Notice) -> None:
        """Hand off now and leave, because this machine will be taken away. The first reason to leave counts.

        However long the lead: it is not to be relied on, and a sample goes on elsewhere at the cost of one prefill.
        """
        if not self.stop.is_set():
            log.warning("notice", reason=notice.reason, lead_s=notice.lead_s)
            self._notice = notice
            self.stop.set()

    async def take_advice(self, advice: Advice) -> None:
        """Tell people, and leave if that is heeded."""
        try:
            await self._link.report_advice(advice.reason)
        except BusUnavailable as error:
            log.warning("redis_away", error=str(error), during="telling of advice")
        if self._heeds_advice:
            self.leave(advice.reason)

    def leave(self, reason: str) -> None:
        """Leave without a notice: it was somebody's wish."""
        if not self.stop.is_set():
            self._told_to_leave = reason
            self.stop.set()

    # --- how ----------------------------------------------------------------------------------------------------------

    @property
    def is_over(self) -> bool:
        """Tell whether the last word has been said."""
        return self._gone.is_set()

    async def handed_off(self) -> None:
        """Wait until the hand-off is done."""
        await self._gone.wait()

    async def hand_off(self, stop: asyncio.Event) -> None:
        """Wait for the stop, then flush and say good-bye."""
        await stop.wait()
        link, began = self._link, time.monotonic()
        reason, lead_s = self._told_to_leave or self._notice.reason or stopped_by(stop), self._notice.lead_s
        # most of the grace: the process has to end in it
        async with self._waits.on("the hand-off", because=reason, limit_s=0.8 * self._grace_s):
            if not self._told_to_leave:
                lead = self._grace_s if lead_s is None else lead_s
                await link.insist("give notice", lambda: link.give_notice(reason, lead))
            await self.commands_over.wait()
            link.me.session.drain()
            self.changed.set()
            await self._stand_still()
            await link.insist("flush the last tokens", link.flush)
            samples = len(link.me.session.held)
            await link.insist("leave", lambda: link.leave(reason))
        log.info(
            "handed_off",
            samples=samples,
            tokens_made=self._generator.stats().tokens_made_total,
            took_s=round(time.monotonic() - began, 3),
        )
        self._gone.set()
        self.changed.set()
        try:
            async with asyncio.timeout(_CLOSE_S):
                await self._generator.close()
        except TimeoutError:
            log.warning("engine_not_closed", after_s=_CLOSE_S)

    async def _stand_still(self) -> None:
        """Return when the engine makes no more tokens of what is held."""
        try:
            async with asyncio.timeout(_STILL_S):
                await self._generator.hold("leaving")
        except TimeoutError:
            # In the middle of a load it makes nothing, and after it nothing of what it has forgotten.
            self._generator.abort(list(self._link.me.session.held.items()))

    async def say_why(self, group: ExceptionGroup) -> None:
        """Tell the manager, if that is quickly done, so that the samples need not wait for the lease to run out."""
        error: BaseException = group
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        engine_failed = isinstance(error, EngineFailed) and not self._generator.stands_still
        try:
            async with asyncio.timeout(_LAST_WORD_S):
                if isinstance(error, CanaryFailed):
                    await self._link.report_canary(error.version, error.verdict)
                await self._link.leave(f"failed: {error}", engine_failed=engine_failed)
        except (BusUnavailable, TimeoutError) as silent:
            log.warning("left_without_a_word", error=str(silent))
