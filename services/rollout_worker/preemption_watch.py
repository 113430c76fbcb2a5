"""The loop that polls for preemption notices.

Consumes: the answers of each notice source, polled about once a second in a task of its own.
Produces: the first notice, which makes the worker shut down, and rebalance recommendations.
Waits for: its sources, whose calls are bounded; nothing waits for it.
Ends when: the worker stops and, if the cloud expects it, the notice has been acknowledged after the hand-off
    (`Preemptible.wait_handed_off`, which the worker's shutdown unblocks).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Protocol

import structlog

from rlboost.services.rollout_worker.domain.preemption import (
    POLL_INTERVAL_S,
    Notice,
    RebalanceRecommendation,
    SourceBackoff,
)
from rlboost.services.rollout_worker.ports import NoticeSource
from rlboost.shared.errors import Retryable

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
