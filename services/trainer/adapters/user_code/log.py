"""The output of user code: what its processes write to standard output and standard error, in a file of its own.

The processes write to one pipe, which this process reads, so that a function that prints without end fills no disk and
cannot slow the trainer down: output beyond a rate is discarded, and the file is rotated.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path

MAX_FILE_BYTES = 8 << 20
"""Size at which the file is renamed to `NAME.1`, replacing an older one; so up to twice as much is retained."""
RATE_BYTES_PER_S = 64 << 10
BURST_BYTES = 1 << 20
_READ_BYTES = 64 << 10
_MAX_READS = 64
"""Reads per wake-up, so that the event loop's other work is not delayed."""
_TAIL_BYTES = 1_000


class UserCodeLog:
    """The log of some processes of one job."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        """Write to `path`, created with the first output. `clock` returns seconds."""
        self.path = path
        self._clock = clock
        self._pipe: tuple[int, int] | None = None
        self._allowance = float(BURST_BYTES)
        self._filled_at = clock()
        self._n_discarded = 0
        self._tail = b""

    def open(self) -> int:
        """Return the file descriptor that processes write to. Needs a running event loop; close the log at the end."""
        if self._pipe is None:
            self._pipe = os.pipe()
            os.set_blocking(self._pipe[0], False)
            asyncio.get_running_loop().add_reader(self._pipe[0], self.drain)
        return self._pipe[1]

    def close(self) -> None:
        """Write what is left, and stop reading: a process that still runs gets an error when it prints."""
        if self._pipe is None:
            return
        self.drain()
        self.write(b"")  # how much was discarded at last
        asyncio.get_running_loop().remove_reader(self._pipe[0])
        for descriptor in self._pipe:
            os.close(descriptor)
        self._pipe = None

    def drain(self) -> None:
        """Write the output that is in the pipe."""
        if self._pipe is None:
            return
        for _ in range(_MAX_READS):
            try:
                data = os.read(self._pipe[0], _READ_BYTES)
            except BlockingIOError:
                return
            self.write(data)

    def write(self, data: bytes) -> None:
        """Append output, as far as the rate allows. A full disk loses it."""
        self._tail = (self._tail + data)[-_TAIL_BYTES:]
        now = self._clock()
        self._allowance = min(BURST_BYTES, self._allowance + (now - self._filled_at) * RATE_BYTES_PER_S)
        self._filled_at = now
        if len(data) > self._allowance:
            self._n_discarded += len(data)
            return
        self._allowance -= len(data)
        if self._n_discarded:
            note = f"\n[{self._n_discarded} bytes discarded: more than {RATE_BYTES_PER_S} bytes/s]\n"
            data, self._n_discarded = note.encode() + data, 0
        if data:
            with contextlib.suppress(OSError):
                self._append(data)

    def _append(self, data: bytes) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.path.exists() and self.path.stat().st_size + len(data) > MAX_FILE_BYTES:
            self.path.replace(self.path.with_name(self.path.name + ".1"))
        with self.path.open("ab") as file:
            file.write(data)

    def last_line(self) -> str:
        """Return the last line of output so far, an empty text if there is none."""
        lines = self._tail.decode(errors="replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "")
