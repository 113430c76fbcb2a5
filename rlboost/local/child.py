"""One child process: runs in its own session, dies with its parent, and records its CPU time and exit."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from rlboost.local import die_with_parent
from rlboost.local.cpu_time import session_cpu_s
from rlboost.local.fork_server import ForkServer, is_forkable
from rlboost.local.processes import ProcessSpec


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

    def __init__(self, spec: ProcessSpec, forks: ForkServer | None = None) -> None:
        """Start the process, forked where that is possible; its output is appended to the log."""
        self.spec = spec
        self.started_at = time.time()
        self._loop = asyncio.get_running_loop()
        self._exited: asyncio.Future[Exit] = self._loop.create_future()
        spec.log.touch(mode=0o600)
        with spec.log.open("ab") as log, Path(os.devnull).open("rb") as nothing:
            self._log_offset = log.tell()
            env = {**os.environ, **spec.env}
            forked = None
            if forks is not None and is_forkable(spec.argv, env):
                forked = forks.fork(spec.argv, env, stdin=nothing.fileno(), stdout=log.fileno(), stderr=log.fileno())
            self.pid = forked or _execute(spec.argv, env, nothing, log)
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
            log.seek(max(self._log_offset, log.seek(0, os.SEEK_END) - 64 * 1024))
            lines = log.read().decode(errors="replace").splitlines()
        return [line for line in lines if line.strip()][-n_lines:]


def _execute(argv: Sequence[str], env: Mapping[str, str], stdin: BinaryIO, out: BinaryIO) -> int:
    process = subprocess.Popen(  # noqa: S603 - the specs are ours
        die_with_parent.guarded(*argv),
        env=env,
        stdin=stdin,
        stdout=out,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    process.returncode = 0  # the caller reaps it
    return process.pid
