"""The transport of a process that runs user code; `adapters.user_code` is the other side.

It reads requests from standard input and writes answers to standard output (`shared.framing`). The user's prints
go to standard error. The process ends with its input, or when its parent is gone. At SIGUSR1 it writes the stack of
each thread to standard error.
"""

from __future__ import annotations

import faulthandler
import io
import os
import signal
import sys
import threading
import time
from typing import Any, BinaryIO

import msgpack

from rlboost.shared.framing import LENGTH_BYTES, length_of, pack
from rlboost.shared.process.system import protect_process_memory

_PARENT_CHECK_S = 1.0


class Pipe:
    """Requests in, answers out."""

    def __init__(self) -> None:
        """Take over the standard streams: user code reads an empty input, and its prints go to standard error."""
        protect_process_memory()  # user code may run programs of others, and the environment may have its secrets
        threading.Thread(target=_exit_with_parent, args=(os.getppid(),), daemon=True).start()
        self._requests: BinaryIO = os.fdopen(os.dup(0), "rb")
        self._answers: BinaryIO = os.fdopen(os.dup(1), "wb")
        with open(os.devnull, "rb") as nothing:  # noqa: PTH123 - a device, not a path
            os.dup2(nothing.fileno(), 0)
        os.dup2(2, 1)
        self._lock = threading.Lock()
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(line_buffering=True)  # else a process that is killed takes its last prints along
        faulthandler.enable()
        faulthandler.register(signal.SIGUSR1)

    def read(self) -> dict[str, Any] | None:
        """Return the next request, None at the input's end."""
        packed = self.read_packed()
        return None if packed is None else unpack(packed)

    def read_packed(self) -> bytes | None:
        """Return the next request as `unpack` takes it, None at the input's end."""
        head = self._requests.read(LENGTH_BYTES)
        return None if len(head) < LENGTH_BYTES else self._requests.read(length_of(head))

    def write(self, body: dict[str, Any]) -> None:
        """Send an answer; from any thread."""
        packed = pack(body)
        with self._lock:
            self._answers.write(packed)
            self._answers.flush()


def unpack(packed: bytes) -> dict[str, Any]:
    """Return a request; user code that changes it changes no other copy."""
    body: dict[str, Any] = msgpack.unpackb(packed)
    return body


def _exit_with_parent(parent: int) -> None:
    # User code that hangs would not notice the end of the input.
    while os.getppid() == parent:
        time.sleep(_PARENT_CHECK_S)
    if os.getsid(0) == os.getpid():
        os.killpg(0, signal.SIGKILL)  # with all processes that it started
    os._exit(1)
