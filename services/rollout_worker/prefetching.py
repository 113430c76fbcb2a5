"""The loop of a reserved worker that has the next weights come while the trainer still publishes them.

prefetch: consumes the drafts of the job that the worker serves, produces chunks in its cache; waits for the store, and
    for a pull of the worker's own. It ends at the stop. Whatever goes wrong in it, a pull fetches the rest later.
"""

from __future__ import annotations

import asyncio

import structlog

from services.rollout_worker.link import Link
from services.rollout_worker.ports import DraftSource
from shared.errors import RLBoostError

log = structlog.get_logger(__name__)

_LOOK_S = 0.5
"""How often a worker that serves no job yet looks whether it does."""
_RETRY_S = 2.0


class Prefetching:
    """Follows one job at a time, the one whose weights the worker was told to serve."""

    def __init__(self, link: Link, drafts: DraftSource, *, retry_s: float = _RETRY_S) -> None:
        self._link = link
        self._drafts = drafts
        self._retry_s = retry_s

    async def run(self, stop: asyncio.Event) -> None:
        """Follow until the stop."""
        async with asyncio.TaskGroup() as group:
            following = group.create_task(self._follow(), name="follow-drafts")
            await stop.wait()
            following.cancel()

    async def _follow(self) -> None:
        failed = False
        while True:
            if (wanted := self._link.me.session.wanted) is None:
                await asyncio.sleep(_LOOK_S)
                continue
            try:
                await self._drafts.follow(wanted[0])
                failed = False
            except RLBoostError as error:
                if not failed:
                    log.warning("prefetch_failed", job=wanted[0], error=str(error))
                failed = True
                await asyncio.sleep(self._retry_s)
