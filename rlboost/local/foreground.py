"""A local system in the foreground of a process, until a signal ends it."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Callable, Sequence

from rlboost.local.chaos import ChaosEvent, play
from rlboost.local.cluster import LocalCluster
from rlboost.local.state import Config
from rlboost.local.supervisor import ClusterEvent


def serve(cluster: LocalCluster, schedule: Sequence[ChaosEvent], on_ready: Callable[[Config], None]) -> bool:
    """Run a system until SIGINT, SIGTERM or SIGHUP; tell whether it had become ready.

    The first signal stops everything in order, a second one at once.

    Args:
        cluster: the system, not entered yet.
        schedule: acted out on its spot workers from the moment that everything is ready.
        on_ready: called once, then.

    Raises:
        ConfigError: see `LocalCluster`.
        StartFailed: see `LocalCluster`.

    """
    ready = False

    async def body() -> None:
        nonlocal ready
        this = asyncio.current_task()
        assert this is not None
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            asyncio.get_running_loop().add_signal_handler(number, this.cancel)
        cluster.on_event(_complain)
        async with cluster:
            ready = True
            on_ready(cluster.config)
            await play(schedule, cluster)
            await asyncio.get_running_loop().create_future()  # until a signal cancels this task

    try:
        asyncio.run(body())
    except asyncio.CancelledError:
        return ready
    raise AssertionError("only a signal or an error ends the body")


def _complain(event: ClusterEvent) -> None:
    """Say which process will not be started again, for what is wrong with it."""
    if event.kind in ("refused", "gave_up"):
        print(f"rlboost: {event.name} stays away: {event.detail}", file=sys.stderr, flush=True)
