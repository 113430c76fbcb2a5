"""Ports that stay a process's own, also while it is dead."""

from __future__ import annotations

import socket
import sys
from types import TracebackType
from typing import Self

from rlboost.local.processes import LOOPBACK
from shared.http import bind


class Ports:
    """Loopback ports by process name, kept until closed.

    A port is kept by a socket that is bound but does not listen. On Linux the kernel then gives the port to nobody who
    asks for any free one, while the process itself, which sets SO_REUSEADDR, can listen on it. Elsewhere that second
    bind would fail, so the port is only chosen, not kept.
    """

    def __init__(self) -> None:
        """Start with none."""
        self._ports: dict[str, int] = {}
        self._sockets: dict[str, socket.socket] = {}

    def of(self, name: str, wanted: int = 0) -> int:
        """Return the port of `name`: the one it has, else `wanted`, else a free one.

        Raises:
            ConfigError: the wanted port is in use.

        """
        if name not in self._ports:
            sock = bind(LOOPBACK, wanted)
            self._ports[name] = sock.getsockname()[1]
            if sys.platform == "linux":
                self._sockets[name] = sock
            else:
                sock.close()
        return self._ports[name]

    def release(self, name: str) -> None:
        """Give the port of `name` back."""
        del self._ports[name]
        if sock := self._sockets.pop(name, None):
            sock.close()

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Give all ports back."""
        for name in list(self._ports):
            self.release(name)
