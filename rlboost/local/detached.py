"""Run a system in the foreground until a signal, or start it in the background, wait until it is ready, and stop it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from rlboost.local.chaos import ChaosEvent, play
from rlboost.local.cluster import LocalCluster
from rlboost.local.state import Config, StateDir
from rlboost.local.supervisor import ClusterEvent
from rlboost.shared.errors import ConfigError, Fatal
from rlboost.shared.process.lifecycle import EXIT_CONFIG, on_stop_signals
from rlboost.terminal import echo

_STOP_LIMIT_S = 60.0
_KILL_LIMIT_S = 5.0
_SHOW_INTERVAL_S = 1.0
_SHOWN = re.compile(rb"\d\d:\d\d:\d\d \S+ (waiting|warning|died|gave_up|refused)\b")
"""Lines of the supervisor's log that are shown while it starts."""


def start(state: StateDir, arguments: Sequence[str]) -> Config:
    """Start `rlboost up` with these arguments; return the connection data when it is ready.

    Raises:
        ConfigError: it rejected its settings.
        Fatal: it did not become ready.

    """
    log = state.log_of("supervisor")
    try:
        log.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        log.touch(mode=0o600)
    except OSError as error:
        raise ConfigError(f"state folder {state.path}: {error.strerror}; name another with --state") from error
    before = log.stat().st_size
    shown = _Shown(log, before)
    with log.open("ab") as errors:
        process = subprocess.Popen(  # noqa: S603 - our own command
            [sys.executable, "-m", "rlboost", "up", "--json", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            start_new_session=True,
        )
    assert process.stdout is not None
    try:
        # Every step of the start has a limit, so either this line or the end of the file arrives.
        while not select.select([process.stdout], [], [], _SHOW_INTERVAL_S)[0]:
            shown.update()
        line = process.stdout.readline()
        shown.update()
    except KeyboardInterrupt:
        process.terminate()
        raise
    finally:
        process.stdout.close()
    try:
        return Config(**json.loads(line), pid=process.pid)
    except (ValueError, TypeError):  # no line, or another program's
        code = process.wait()
        text = _complaint(state, log, before)
        raise (ConfigError(text) if code == EXIT_CONFIG else Fatal(text)) from None


class _Shown:
    """Shows what the start waits for and warns of, from the supervisor's log."""

    def __init__(self, log: Path, position: int) -> None:
        self._log, self._position = log, position

    def update(self) -> None:
        with self._log.open("rb") as written:
            written.seek(self._position)
            *lines, _ = written.read().split(b"\n")
        self._position += sum(len(line) + 1 for line in lines)
        for line in lines:
            if _SHOWN.match(line):
                echo(line.decode(errors="replace"), err=True)


def _complaint(state: StateDir, log: Path, before: int) -> str:
    with log.open("rb") as written:
        written.seek(before)
        text = written.read().decode(errors="replace")
    _, found, complaint = f"\n{text}".rpartition("\nrlboost: ")
    if found and not complaint.startswith("warning: "):
        return complaint.strip()
    # A full disk keeps the supervisor from writing its log.
    end = state.end()
    return f"the system in {state.path} {end}" if end and end.reason else f"the supervisor died: see {log}"


def stop(state: StateDir) -> bool:
    """Stop the system in this folder and wait for its supervisor to exit; return False if none ran.

    Raises:
        Fatal: it still runs after SIGKILL.

    """
    if not state.running():
        return False
    supervisor = state.supervisor()
    try:
        process = os.pidfd_open(supervisor)
    except ProcessLookupError:
        return True  # it has exited
    try:
        for number, limit_s in ((signal.SIGTERM, _STOP_LIMIT_S), (signal.SIGKILL, _KILL_LIMIT_S)):
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(process, number)
            # The lock on the state folder is released slightly before the process exits.
            if select.select([process], [], [], limit_s)[0]:
                return True
    finally:
        os.close(process)
    raise Fatal(f"the supervisor {supervisor} of {state.path} does not exit: kill it by hand")


# --- Ends a task on a signal ------------------------------------------------------------------------------------------


def cancel_on_signals() -> None:
    """Cancel the calling task at a stop signal: the first signal stops everything in order."""
    task = asyncio.current_task()
    assert task is not None
    on_stop_signals(lambda _: task.cancel())


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
