"""The system under test: `rlboost up` in its own folder, and a worker that joins from a network of its own."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from benchmarks.chaos.clock import Clocks
from benchmarks.chaos.schedule import Kind
from rlboost.local.state import StateDir
from tests.support.black_box import RLBOOST, BlackBox
from tests.support.dial_out_only import Outside, possible

TOKEN = "chaos"
DISK_BYTES = 1 << 30
_DIALED = ("manager", "standby", "redis", "weight-store")
"""The processes that a worker connects to."""


class Site:
    """Use with `with`."""

    def __init__(self, directory: Path, *, workers: int, kinds: set[Kind]) -> None:
        """Prepare; `kinds` loses the faults that this machine does not permit."""
        self._directory, self._workers = directory, workers
        self.skipped: dict[str, str] = {}
        """Kind of fault -> why it is not possible here."""
        self._kinds = kinds
        self._mounted = False
        self._environment: dict[str, str | None] = {}
        """What this process's variables were."""
        self.clocks: Clocks | None = None
        self.remote: Outside | None = None
        self.restarts = 0
        """How often the whole system was started again after it had ended by itself."""

    def __enter__(self) -> Self:
        self._set_variables({"RLBOOST_TOKEN": TOKEN})
        state = self._directory / "state"
        state.mkdir()
        if "disk_full" in self._kinds:
            mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "rlboost-chaos", str(state)]
            self._mounted = subprocess.run(mount, check=False, capture_output=True).returncode == 0
            if not self._mounted:
                self._skip("disk_full", "this user may not mount a small disk")
        if "partition" in self._kinds and not possible():
            self._skip("partition", "this machine lets no process have a network of its own")
        if "step_clock" in self._kinds:
            try:
                self.clocks = Clocks(self._directory)
                self._set_variables(self.clocks.env)
            except OSError as error:
                self._skip("step_clock", f"this machine cannot build a library for it: {error}")
        try:
            # A spot worker that was terminated does not come back: autoscaling replaces it.
            self.box = BlackBox(state, workers=self._workers, autoscale=self._workers, standby=True)
            self.box.command("scale", str(self._workers))
            self.restart_ended()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def _set_variables(self, variables: Mapping[str, str]) -> None:
        """Set variables for what this process starts, until the end."""
        self._environment = {name: os.environ.get(name) for name in variables} | self._environment
        os.environ.update(variables)

    def _skip(self, kind: str, why: str) -> None:
        self._kinds.discard(kind)
        self.skipped[kind] = why

    @property
    def chunks(self) -> Path:
        """The folder of the weight store's chunks."""
        return self.box.state / "weights" / "chunks"

    def restart_ended(self) -> None:
        """Start what has ended, as a user or an orchestrator would: the system after a full disk, the remote worker."""
        if not StateDir(self.box.state).running():
            self.restarts += 1
            self.box.up()
        if "partition" not in self._kinds or (self.remote is not None and self.remote.process.poll() is None):
            return
        if self.remote is not None:
            self.remote.close()
        ports = StateDir(self.box.state).ports()
        dialed = [port for name, port in ports.items() if name in _DIALED]
        command = [*RLBOOST, "worker", "join", "--url", self.box.url, "--token", TOKEN]
        self.remote = Outside(command, dialed, self.box.state / "logs" / "remote.log")

    def kill_all(self) -> None:
        """SIGKILL all processes at once, the supervisor first, and start the system again on the same folder."""
        state = StateDir(self.box.state)
        pids = [state.supervisor(), *(process["pid"] for process in self.box.processes())]
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.box.up()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.remote is not None:
            self.remote.close()
        if hasattr(self, "box"):
            self.box.down()
        for name, value in self._environment.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        if self._mounted:
            subprocess.run(["umount", "--lazy", str(self._directory / "state")], check=True)
