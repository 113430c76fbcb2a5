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
import math
import signal
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Literal

from rlboost.local.backoff import Backoff
from rlboost.local.child import Child, Exit
from rlboost.local.fork_server import ForkServer
from rlboost.local.processes import ProcessSpec
from rlboost.local.readiness import Readiness
from rlboost.local.state import ProcessRecord, StateDir
from rlboost.shared.disk_space import is_full
from rlboost.shared.errors import Conflict, Fatal, WaitTimedOut
from rlboost.shared.process.lifecycle import EXIT_CONFIG, EXIT_OK, until_stop
from rlboost.shared.process.waiting import Waits

NOTICE_LEAD_S = 30.0
"""Time from a preemption notice until SIGKILL, as clouds give it."""

_KILL_LIMIT_S = 10.0
_POLL_INTERVAL_S = 0.1
_SAVE_INTERVAL_S = 1.0
_MAX_STARTS = 3
"""Starts of a process that has never been ready: `until_ready` fails when the last one has died."""
_SHOWN_LINES = 15
_DISK_FULL = "the disk is full: free space; until then Redis rejects writes, and rlboost ps shows an earlier state"

EventKind = Literal[
    "started", "ready", "died", "refused", "gave_up", "left", "killed", "noticed", "joined", "disk_full"
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
        note = "" if alive else self.note
        spec, pid = self.spec, self.child.pid
        return ProcessRecord(spec.name, spec.role, pid, started_at, self.restarts, alive, note, spec.gpus)


class Supervisor:
    """Supervises all slots of one system.

    Args:
        state: receives the records at each change.
        tasks: owns the keepers; a keeper that fails ends the group.
        on_event: called in the event loop for every process event.
        forks: starts the services, as long as it can; without it, they are executed.

    """

    def __init__(
        self,
        state: StateDir,
        tasks: asyncio.TaskGroup,
        on_event: Callable[[ClusterEvent], None],
        forks: ForkServer | None = None,
    ) -> None:
        self._state, self._tasks, self._on_event, self._forks = state, tasks, on_event, forks
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
        slot = self._slots[spec.name] = _Slot(spec, Child(spec, self._forks))
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
                slot.child = Child(slot.spec, self._forks)
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
        try:
            async with self._waits.on(name, because="it is starting", limit_s=slot.spec.ready_limit_s):
                while (reason := await self._readiness.not_ready_reason(slot.spec.ready)) is not None:
                    if slot.ended_well:
                        return
                    if slot.over or (slot.restarts >= _MAX_STARTS - 1 and not slot.child.alive):
                        raise StartFailed(_exit_report(slot, f"{name} did not start: {slot.note}"))
                    await asyncio.sleep(_POLL_INTERVAL_S)
        except WaitTimedOut as error:
            limit_s = slot.spec.ready_limit_s
            raise StartFailed(_exit_report(slot, f"{name} was not ready in {limit_s:.0f} s: {reason}")) from error
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
    lines: Sequence[str] = slot.child.output(_SHOWN_LINES)
    return "\n".join([what, f"the end of {slot.spec.log}:", *(f"  {line}" for line in lines)])
