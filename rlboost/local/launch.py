"""Runs a system in the foreground until a signal."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Sequence

from rlboost.local.chaos import ChaosEvent, play
from rlboost.local.cluster import LocalCluster
from rlboost.local.state import Config
from rlboost.local.supervisor import ClusterEvent
from rlboost.terminal import echo

# --- Ends a task on a signal ------------------------------------------------------------------------------------------


def cancel_on_signals() -> None:
    """Cancel the calling task at SIGINT, SIGTERM and SIGHUP: the first signal stops everything in order."""
    task = asyncio.current_task()
    assert task is not None
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)


# --- Run a local system in the foreground until a signal --------------------------------------------------------------


def serve(cluster: LocalCluster, schedule: Sequence[ChaosEvent], on_ready: Callable[[Config], None]) -> bool:
    """Run a system until SIGINT, SIGTERM or SIGHUP; return True if it became ready.

    The first signal stops everything in order, a second one immediately.

    Args:
        cluster: the system, not entered yet.
        schedule: applied to its spot workers once everything is ready.
        on_ready: called once everything is ready.

    Raises:
        ConfigError: see `LocalCluster`.
        StartFailed: see `LocalCluster`.
        Fatal: see `LocalCluster`.

    """
    ready = False

    async def body() -> None:
        nonlocal ready
        cancel_on_signals()
        cluster.on_event(_print_trouble)
        async with cluster:
            ready = True
            on_ready(cluster.config)
            await play(schedule, cluster)
            await asyncio.get_running_loop().create_future()  # until a signal cancels this task

    try:
        asyncio.run(body())
    except asyncio.CancelledError:
        return ready
    raise AssertionError("unreachable: only a signal or an error ends the body")


def _print_trouble(event: ClusterEvent) -> None:
    """Print which process will not be restarted, and why, and what stops the whole system."""
    if event.kind == "disk_full":
        echo(f"rlboost: {event.name}: {event.detail}", err=True)
    if event.kind in ("refused", "gave_up"):
        echo(f"rlboost: {event.name} will not be restarted: {event.detail}", err=True)
