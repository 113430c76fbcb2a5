"""Steps the wall clocks of running processes; their monotonic clocks are left alone, as by a real step."""

from __future__ import annotations

import os
import struct
import subprocess
from collections.abc import Mapping
from pathlib import Path

_SOURCE = Path(__file__).with_name("clock.c")
_PID_MAX = Path("/proc/sys/kernel/pid_max")
_OFFSET = struct.Struct("=q")


class Clocks:
    """The clocks of all processes that run with `env`, each at first on time.

    Args:
        directory: an existing folder, for the library and its file.

    Raises:
        OSError: this machine cannot build or run the library; the text says why.

    """

    def __init__(self, directory: Path) -> None:
        library = directory / "clock.so"
        try:
            command = ["cc", "-shared", "-fPIC", "-O2", "-o", str(library), str(_SOURCE), "-ldl"]
            subprocess.run(command, check=True, capture_output=True, text=True)
            n_bytes = int(_PID_MAX.read_text()) * _OFFSET.size
        except subprocess.CalledProcessError as error:
            raise OSError(f"cc: {error.stderr.strip()}") from error
        self._offsets = directory / "clock.offsets"
        with self._offsets.open("wb") as file:
            os.truncate(file.fileno(), n_bytes)  # sparse
        self.env: Mapping[str, str] = {"LD_PRELOAD": str(library), "CHAOS_CLOCK": str(self._offsets)}

    def step(self, pid: int, offset_s: int) -> None:
        """Step the clock of a process forward by `offset_s`; a restarted process is on time."""
        with self._offsets.open("r+b", buffering=0) as file:
            (before,) = _OFFSET.unpack(os.pread(file.fileno(), _OFFSET.size, pid * _OFFSET.size))
            os.pwrite(file.fileno(), _OFFSET.pack(before + offset_s), pid * _OFFSET.size)
