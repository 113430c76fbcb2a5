"""Keep processes running: start, watch, restart after a back-off, stop in order.

A slot is a named process. Its keeper task starts the process, waits for its exit, and restarts it. A slot ends when:

- it was stopped: the system stops, or the worker was preempted (`kill`, `notice`) or drained;
- it exited with 0, and its spec says that this is final;
- it exited with EXIT_CONFIG: a restart would fail in the same way;
- it is in a crash loop: it has never been ready, and died soon after each of several starts. A process that was ready
  once is restarted however often it dies.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

import httpx

from rlboost.local import die_with_parent, redis_server
from rlboost.local.layout import session_cpu_s
from rlboost.local.processes import HttpReady, ProcessSpec, RedisReady
from rlboost.local.state import ProcessRecord, StateDir
from rlboost.shared.errors import Conflict, Fatal, WaitTimedOut
from rlboost.shared.files import is_full
from rlboost.shared.http.clients import async_http_client
from rlboost.shared.process.lifecycle import EXIT_CONFIG, EXIT_OK, until_stop
from rlboost.shared.process.waiting import Waits
from rlboost.shared.proxies import direct
from rlboost.shared.variables import KILLED_ON_REQUEST, LAST_EXIT

# --- Restart policy: how long to wait before restarting a dead process, and when to give up ---------------------------


@dataclass
class Backoff:
    """Exponential back-off that resets after a process has lived long enough.

    Args:
        first_s: wait after the first death; doubles with each further death.
        limit_s: longest wait.
        steady_s: a process that lived this long started well, and its death counts as the first.
        most: number of consecutive deaths that is a crash loop.

    """

    first_s: float = 0.5
    limit_s: float = 10.0
    steady_s: float = 30.0
    most: int = 10
    deaths: int = 0

    @property
    def is_loop(self) -> bool:
        """Return True if the deaths counted so far are a crash loop."""
        return self.deaths >= self.most

    def after(self, alive_s: float) -> float:
        """Count a death after `alive_s` seconds of life; return the seconds to wait."""
        if alive_s >= self.steady_s:
            self.deaths = 0
        wait_s = min(self.limit_s, self.first_s * 2.0 ** min(self.deaths, 30))
        self.deaths += 1
        return wait_s


# --- Probe whether a process is ready ---------------------------------------------------------------------------------


_TIMEOUT_S = 2.0


class Readiness:
    """Probes through one HTTP client; close it after use."""

    def __init__(self) -> None:
        """Create the client, which costs more than a probe."""
        self._http = async_http_client(direct, timeout=_TIMEOUT_S)

    async def not_ready_reason(self, ready: HttpReady | RedisReady | None) -> str | None:
        """Return None if the process is ready, else the reason it is not."""
        if ready is None:
            return None
        if isinstance(ready, RedisReady):
            return await redis_server.not_ready_reason(ready.url)
        try:
            response = await self._http.get(ready.url)
        except httpx.TransportError as error:
            return f"{ready.url} does not answer: {error or type(error).__name__}"
        if response.status_code == httpx.codes.OK:
            return None
        return f"{ready.url} says {response.status_code}: {response.text[:300]}"

    async def close(self) -> None:
        """Close the client."""
        await self._http.aclose()


# --- One child process: runs in its own session, dies with its parent, and records its CPU time and exit --------------


@dataclass(frozen=True)
class Exit:
    """How a process ended. `code` is its exit code, or minus the signal that killed it."""

    code: int
    alive_s: float
    cpu_s: float
    """User and system time of it and its descendants."""

    def __str__(self) -> str:
        if self.code < 0:
            return f"killed by {signal.Signals(-self.code).name}"
        return f"ended with exit code {self.code}"


class Child:
    """A process from start to exit. Construct it inside a running event loop.

    It leads its own session: a Ctrl-C in the terminal reaches only the parent, and leftover descendants can be found.
    """

    def __init__(self, spec: ProcessSpec) -> None:
        """Start the process; its output is appended to the log."""
        self.spec = spec
        self.started_at = time.time()
        self._loop = asyncio.get_running_loop()
        self._exited: asyncio.Future[Exit] = self._loop.create_future()
        spec.log.touch(mode=0o600)
        with spec.log.open("ab") as log, Path(os.devnull).open("rb") as nothing:
            self._log_offset = log.tell()
            process = subprocess.Popen(  # noqa: S603 - the specs are ours
                die_with_parent.guarded(*spec.argv),
                env={**os.environ, **spec.env},
                stdin=nothing,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        process.returncode = 0  # this object reaps it
        self.pid = process.pid
        threading.Thread(target=self._reap, args=(time.monotonic(),), name=f"reap {spec.name}", daemon=True).start()

    def _reap(self, began: float) -> None:
        # wait4, because asyncio's child watcher discards the resource usage.
        _, status, usage = os.wait4(self.pid, 0)
        cpu_s = usage.ru_utime + usage.ru_stime + session_cpu_s(self.pid)
        with contextlib.suppress(ProcessLookupError):  # its descendants must not outlive it
            os.killpg(self.pid, signal.SIGKILL)
        end = Exit(os.waitstatus_to_exitcode(status), time.monotonic() - began, cpu_s)
        with contextlib.suppress(RuntimeError):  # the loop is closed: there is no listener
            self._loop.call_soon_threadsafe(self._exited.set_result, end)

    async def wait(self) -> Exit:
        """Wait for the exit; the caller bounds the wait."""
        return await asyncio.shield(self._exited)

    @property
    def alive(self) -> bool:
        """Return True until its exit has been recorded."""
        return not self._exited.done()

    def send(self, number: signal.Signals) -> None:
        """Send a signal if it still runs."""
        if self.alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def cpu_s(self) -> float:
        """Return the CPU seconds of it and its descendants; 0 before the exit on systems without `/proc`."""
        return self._exited.result().cpu_s if self._exited.done() else session_cpu_s(self.pid)

    def output(self, n_lines: int) -> list[str]:
        """Return the last lines of its output."""
        with self.spec.log.open("rb") as log:
            end = log.seek(0, os.SEEK_END)
            began = self._log_offset if self._log_offset <= end else 0  # truncated, as by logrotate
            log.seek(max(began, end - 64 * 1024))
            lines = log.read().decode(errors="replace").splitlines()
        return [line for line in lines if line.strip()][-n_lines:]


# --- The supervisor ---------------------------------------------------------------------------------------------------


NOTICE_LEAD_S = 30.0
"""Time from a preemption notice until SIGKILL, as clouds give it."""

_KILL_LIMIT_S = 10.0
_POLL_INTERVAL_S = 0.1
_SAVE_INTERVAL_S = 1.0
_MAX_STARTS = 3
"""Starts of a process that has never been ready: `until_ready` fails when the last one has died."""
_SHOWN_LINES = 15
_WAITING_INTERVAL_S = 15.0
"""Time between two events that say what a start waits for."""
_DISK_FULL = "the disk is full: free space; until then Redis rejects writes, and rlboost ps shows an earlier state"

EventKind = Literal[
    "started",
    "waiting",
    "ready",
    "died",
    "refused",
    "gave_up",
    "left",
    "killed",
    "noticed",
    "joined",
    "disk_full",
    "warning",
]


@dataclass(frozen=True)
class ClusterEvent:
    """A process event; `at` is Unix seconds. `disk_full` is of the state folder, and `name` is its path."""

    kind: EventKind
    name: str
    at: float
    detail: str = ""


class StartFailed(Fatal):
    """A process did not become ready; the message ends with the last lines of its output."""


@dataclass
class _Slot:
    spec: ProcessSpec
    child: Child
    restarts: int = 0
    cpu_s: float = 0.0
    """CPU seconds of earlier runs."""
    note: str = ""
    stop_reason: str = ""
    """Why the process is not restarted; empty while it is."""
    was_ready: bool = False
    ended_well: bool = False
    """Its process exited with 0, which is final."""
    killed: bool = False
    """True if its next exit is intended."""
    stop_requested: asyncio.Event = field(default_factory=asyncio.Event)
    keeper: asyncio.Task[None] | None = None

    @property
    def over(self) -> bool:
        return self.keeper is not None and self.keeper.done()

    def request_stop(self, why: str) -> None:
        self.stop_reason = self.stop_reason or why
        self.stop_requested.set()

    def record(self) -> ProcessRecord:
        started_at = datetime.fromtimestamp(self.child.started_at, UTC).isoformat(timespec="milliseconds")
        alive = self.child.alive
        note = f"running again: {self.note}" if alive and self.note else self.note
        spec, pid = self.spec, self.child.pid
        return ProcessRecord(spec.name, spec.role, pid, started_at, self.restarts, alive, note, spec.gpus)


class Supervisor:
    """Supervises all slots of one system.

    Args:
        state: receives the records at each change.
        tasks: owns the keepers; a keeper that fails ends the group.
        on_event: called in the event loop for every process event.

    """

    def __init__(
        self,
        state: StateDir,
        tasks: asyncio.TaskGroup,
        on_event: Callable[[ClusterEvent], None],
    ) -> None:
        self._state, self._tasks, self._on_event = state, tasks, on_event
        self._slots: dict[str, _Slot] = {}
        self._readiness = Readiness()
        self._waits = Waits()
        self._saving: asyncio.Task[None] | None = None
        """Writes the records once the disk has space."""

    async def close(self) -> None:
        """Close the readiness probe; the slots must have been stopped."""
        if self._saving is not None:
            self._saving.cancel()
        await self._readiness.close()

    # --- starting -----------------------------------------------------------------------------------------------------

    def launch(self, spec: ProcessSpec) -> None:
        """Start a process and supervise it.

        Raises:
            Conflict: the name is in use or was used.

        """
        if spec.name in self._slots:
            raise Conflict(f"there is already a process {spec.name}")
        slot = self._slots[spec.name] = _Slot(spec, Child(spec))
        slot.keeper = self._tasks.create_task(self._keep(slot), name=f"keep {spec.name}")
        self._emit("started", slot, f"pid {slot.child.pid}")

    async def _keep(self, slot: _Slot) -> None:
        backoff = Backoff()
        try:
            while True:
                end = await slot.child.wait()
                if self._is_final(slot, end):
                    return
                wait_s = backoff.after(math.inf if slot.killed else end.alive_s)
                last_exit = KILLED_ON_REQUEST if slot.killed else str(end)
                slot.killed, slot.note = False, str(end)
                if backoff.is_loop and not slot.was_ready:
                    last = next(iter(slot.child.output(1)), "it wrote nothing")
                    slot.note = f"crash loop: {backoff.deaths} short lives in a row; the last {end}: {last}"
                    self._emit("gave_up", slot, slot.note)
                    return
                self._emit("died", slot, f"{end}; starts again in {wait_s:g} s")
                if await until_stop(slot.stop_requested, wait_s):
                    slot.note = slot.stop_reason
                    self._emit("left", slot, slot.note)
                    return
                slot.cpu_s += end.cpu_s
                restarted = replace(slot.spec, env={**slot.spec.env, LAST_EXIT: last_exit})
                slot.child = Child(restarted)
                slot.restarts += 1
                self._emit("started", slot, f"pid {slot.child.pid}")
        finally:
            slot.child.send(signal.SIGKILL)  # only if this task was cancelled: otherwise the child is dead

    def _is_final(self, slot: _Slot, end: Exit) -> bool:
        if slot.stop_reason or self._state.drained(slot.spec.name):
            slot.note = slot.stop_reason or "drained"
            self._emit("left", slot, f"{slot.note}: {end}")
            return True
        if end.code == EXIT_OK and not slot.spec.restart_after_success:
            slot.ended_well, slot.note = True, str(end)
            self._emit("left", slot, slot.note)
            return True
        if end.code == EXIT_CONFIG:
            slot.note = next(iter(slot.child.output(1)), str(end))
            self._emit("refused", slot, slot.note)
            return True
        return False

    async def until_ready(self, name: str) -> None:
        """Wait until a process is ready, or has exited with 0 where that is final: a worker that was drained at once.

        Raises:
            StartFailed: it exceeded its limit, is in a crash loop, or rejected its settings.

        """
        slot = self._slot(name)
        reason: str | None = "not probed yet"
        began = shown_at = time.monotonic()
        try:
            async with self._waits.on(name, because="it is starting", limit_s=slot.spec.ready_limit_s):
                while (reason := await self._readiness.not_ready_reason(slot.spec.ready)) is not None:
                    if slot.ended_well:
                        return
                    if slot.over or (slot.restarts >= _MAX_STARTS - 1 and not slot.child.alive):
                        raise StartFailed(_exit_report(slot, f"{name} did not start: {slot.note}"))
                    if time.monotonic() - shown_at >= _WAITING_INTERVAL_S:
                        shown_at = time.monotonic()
                        limit_s = slot.spec.ready_limit_s
                        self._emit("waiting", slot, f"for {shown_at - began:.0f} s, {limit_s:.0f} at most: {reason}")
                    await asyncio.sleep(_POLL_INTERVAL_S)
        except WaitTimedOut as error:
            limit_s = slot.spec.ready_limit_s
            since = time.strftime("%H:%M:%S", time.localtime(time.time() - (time.monotonic() - began)))
            what = f"{name} was not ready in {limit_s:.0f} s: {reason} (it waits since {since})"
            raise StartFailed(_exit_report(slot, what)) from error
        slot.was_ready = True
        self._emit("ready", slot, f"after {time.time() - slot.child.started_at:.1f} s")

    # --- stopping -----------------------------------------------------------------------------------------------------

    def kill(self, name: str) -> None:
        """Send SIGKILL. A spot worker is not restarted, as its machine is gone; other processes are."""
        slot = self._slot(name)
        if slot.over:
            return
        if slot.spec.role == "preemptible":
            slot.request_stop("preempted without notice")
        slot.killed = True
        slot.child.send(signal.SIGKILL)
        self._emit("killed", slot)

    def notice(self, name: str) -> None:
        """Send SIGTERM to a spot worker, and SIGKILL if it still runs `NOTICE_LEAD_S` later.

        Raises:
            Conflict: the process is not a spot worker.

        """
        slot = self._slot(name)
        if slot.spec.role != "preemptible":
            raise Conflict(f"{name} is not a spot worker: notices go to those only")
        if slot.over:
            return
        self._emit("noticed", slot)
        stopping = self.stop([name], why="preempted with notice", grace_s=NOTICE_LEAD_S)
        self._tasks.create_task(stopping, name=f"notice {name}")

    async def stop(self, names: Iterable[str], *, why: str, grace_s: float) -> None:
        """Send SIGTERM to these processes, and SIGKILL after the grace period. Returns when they are dead."""
        slots = [self._slot(name) for name in names]
        keepers = [slot.keeper for slot in slots if slot.keeper is not None and not slot.keeper.done()]
        for slot in slots:
            slot.request_stop(why)
            slot.child.send(signal.SIGTERM)
        if keepers:
            await asyncio.wait(keepers, timeout=grace_s)
        for slot in slots:
            if not slot.over:
                slot.child.send(signal.SIGKILL)
                self._emit("killed", slot, f"it did not end within {grace_s:.0f} s")
        if keepers:
            await asyncio.wait(keepers, timeout=_KILL_LIMIT_S)

    # --- state -------------------------------------------------------------------------------------------------------

    def specs(self) -> list[ProcessSpec]:
        """Return the launched processes."""
        return [slot.spec for slot in self._slots.values()]

    def records(self) -> list[ProcessRecord]:
        """Return the records of running and past processes."""
        return [slot.record() for slot in self._slots.values()]

    def cpu_seconds(self) -> dict[str, float]:
        """Return the CPU seconds by name over all restarts, descendants included."""
        return {name: slot.cpu_s + slot.child.cpu_s() for name, slot in self._slots.items()}

    def _slot(self, name: str) -> _Slot:
        if name not in self._slots:
            raise Conflict(f"there is no process {name!r}; there are: {', '.join(self._slots)}")
        return self._slots[name]

    def _emit(self, kind: EventKind, slot: _Slot, detail: str = "") -> None:
        if not self._save() and (self._saving is None or self._saving.done()):
            self._saving = self._tasks.create_task(self._save_later(), name="save the records")
            self._on_event(ClusterEvent("disk_full", str(self._state.path), time.time(), _DISK_FULL))
        self._on_event(ClusterEvent(kind, slot.spec.name, time.time(), detail))

    def _save(self) -> bool:
        """Write the records; return False if the disk is full."""
        try:
            self._state.write_processes(self.records())
        except OSError as error:
            if not is_full(error):
                raise
            return False
        return True

    async def _save_later(self) -> None:
        while True:
            await asyncio.sleep(_SAVE_INTERVAL_S)
            if self._save():
                return


def _exit_report(slot: _Slot, what: str) -> str:
    lines: Sequence[str] = slot.child.output(_SHOWN_LINES) or ["(nothing: it ended before it wrote a line)"]
    return "\n".join([what, f"the end of {slot.spec.log}:", *(f"  {line}" for line in lines)])
