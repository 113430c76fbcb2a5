"""Reserve a port per process name, also while the process is dead."""

from __future__ import annotations

import socket
import sys
from collections.abc import Mapping
from types import TracebackType
from typing import Self

from rlboost.local.processes import LOOPBACK
from rlboost.shared.errors import ConfigError
from rlboost.shared.http.server import bind


class Ports:
    """Ports of one address by process name, reserved until closed.

    A bound socket that does not listen reserves the port. On Linux the kernel then does not hand out the port as a free
    one, while the process itself, which sets SO_REUSEADDR, can listen on it. On other systems the second bind would
    fail, so the port is chosen but not reserved.
    """

    def __init__(self, preferred: Mapping[str, int] | None = None, host: str = LOOPBACK) -> None:
        """Start with none; `preferred` are ports by name to take again if they are free."""
        self._preferred = dict(preferred or {})
        self._host = host
        self._ports: dict[str, int] = {}
        self._sockets: dict[str, socket.socket] = {}

    def of(self, name: str, requested: int = 0, given_by: str = "") -> int:
        """Return the port of `name`: its reserved one, else `requested`, else the preferred or another free one.

        Raises:
            ConfigError: the requested port is in use; `given_by` chooses another.

        """
        if name not in self._ports:
            sock = bind(self._host, requested, given_by) if requested else self._free(name)
            self._ports[name] = sock.getsockname()[1]
            if sys.platform == "linux":
                self._sockets[name] = sock
            else:
                sock.close()
        return self._ports[name]

    def _free(self, name: str) -> socket.socket:
        try:
            return bind(self._host, self._preferred.get(name, 0))
        except ConfigError:
            return bind(self._host, 0)

    def by_name(self) -> dict[str, int]:
        """Return all reserved ports."""
        return dict(self._ports)

    def release(self, name: str) -> None:
        """Release the port of `name`, if it has one."""
        self._ports.pop(name, None)
        if sock := self._sockets.pop(name, None):
            sock.close()

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Release all ports."""
        for name in list(self._ports):
            self.release(name)
