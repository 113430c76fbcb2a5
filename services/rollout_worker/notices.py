"""The loop that hears that this machine will be taken away.

watch: asks each source about once a second, in a task of its own; produces the worker's departure, at the first notice;
waits for sources, never for longer than a call's limit, and nothing waits for it; ends at the stop, and where a cloud
wants its notice acknowledged, when that is done.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Protocol

import structlog

from services.rollout_worker.domain.notices import EVERY_S, Advice, Notice, Patience
from services.rollout_worker.ports import NoticeSource
from shared.errors import Retryable

log = structlog.get_logger(__name__)

_LOOKS = 4
"""How often each cloud is looked for; a machine that has just booted may not have its network yet."""
_ACKNOWLEDGE_AFTER_S = 5.0
"""From the notice. Other workers on this machine see it within two seconds and need two: the cloud must not begin
before they have handed off too."""


class Leaver(Protocol):
    """Who leaves."""

    def take_notice(self, notice: Notice) -> None:
        """Begin to hand off, and leave."""

    async def take_advice(self, advice: Advice) -> None:
        """Tell people, and leave where that is wanted."""

    async def handed_off(self) -> None:
        """Wait until nothing is held any more."""


class Watch:
    """Asks what may know that this machine will be taken away.

    Args:
        sources: are asked for as long as the worker runs, whether they answer or not.
        candidates: one of them at most is there; it is looked for, and then asked.
        leaver: gets the notice.
        every_s: how often a source is asked.
        acknowledge_after_s: from the notice.

    """

    def __init__(
        self,
        sources: Sequence[NoticeSource],
        candidates: Sequence[NoticeSource],
        leaver: Leaver,
        *,
        every_s: float = EVERY_S,
        acknowledge_after_s: float = _ACKNOWLEDGE_AFTER_S,
    ) -> None:
        self._sources = sources
        self._candidates = candidates
        self._leaver = leaver
        self._every_s = every_s
        self._acknowledge_after_s = acknowledge_after_s
        self._noticed: tuple[NoticeSource, Notice, float] | None = None
        """Who said it, what, and when (monotonic)."""

    async def run(self, stop: asyncio.Event) -> None:
        """Watch until the stop, which the leaver sets at a notice."""
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._ask(source), name=f"notices-{source.name}") for source in self._sources]
            if self._candidates:
                tasks.append(group.create_task(self._look(), name="notices-look"))
            await stop.wait()
            for task in tasks:
                task.cancel()
        await self._acknowledge()

    async def _look(self) -> None:
        """Look for a cloud, and ask the one that is there."""
        for n in range(_LOOKS):
            for source in self._candidates:
                if await source.found():
                    log.info("notices_from", source=source.name)
                    await self._ask(source)
                    return
            await asyncio.sleep(self._every_s * (1 << n))
        log.info("no_notices", looked_for=[source.name for source in self._candidates])

    async def _ask(self, source: NoticeSource) -> None:
        """Ask until there is a notice."""
        patience, advised = Patience(), ""
        while True:
            began = time.monotonic()
            try:
                word = await source.ask()
            except Retryable as error:
                if patience.failed(began):
                    log.warning("notices_unanswered", source=source.name, reason=str(error))
            else:
                if patience.answered():
                    log.info("notices_answered_again", source=source.name)
                match word:
                    case Notice():
                        self._noticed = self._noticed or (source, word, began)
                        self._leaver.take_notice(word)
                        return
                    case Advice(reason) if reason != advised:
                        advised = reason
                        await self._leaver.take_advice(word)
            await asyncio.sleep(began + patience.wait_s(self._every_s) - time.monotonic())

    async def _acknowledge(self) -> None:
        if self._noticed is None or not self._noticed[1].event_id:
            return
        source, notice, at = self._noticed
        await self._leaver.handed_off()
        await asyncio.sleep(at + self._acknowledge_after_s - time.monotonic())
        try:
            await source.acknowledge(notice)
        except Retryable as error:
            log.warning("notice_not_acknowledged", source=source.name, reason=str(error))
        else:
            log.info("notice_acknowledged", source=source.name, event_id=notice.event_id)
