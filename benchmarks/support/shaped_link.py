"""A link of limited speed: a TCP proxy that sends to its clients through a token bucket."""

from __future__ import annotations

import socket
import threading
import time
from types import TracebackType
from typing import Self

_BLOCK_BYTES = 64 << 10


class TokenBucket:
    """Limits bytes per second, over all connections together."""

    def __init__(self, bytes_per_s: float, burst_bytes: int) -> None:
        """Start with a full bucket."""
        self._bytes_per_s = bytes_per_s
        self._burst_s = burst_bytes / bytes_per_s
        self._lock = threading.Lock()
        self._empty_at = time.monotonic() - self._burst_s

    def take(self, n_bytes: int) -> None:
        """Block until `n_bytes` may pass."""
        with self._lock:
            now = time.monotonic()
            self._empty_at = max(self._empty_at, now - self._burst_s) + n_bytes / self._bytes_per_s
            wait_s = self._empty_at - now
        if wait_s > 0:
            time.sleep(wait_s)


class ShapedLink:
    """Forwards connections to `127.0.0.1:target_port`; replies are shaped and counted. Use as a context manager."""

    def __init__(self, target_port: int, *, bits_per_s: float) -> None:
        """Listen on a free port."""
        self._target_port = target_port
        self._down = TokenBucket(bits_per_s / 8, 4 * _BLOCK_BYTES)
        self._server = socket.create_server(("127.0.0.1", 0))
        self._sockets: set[socket.socket] = set()
        self._counting = threading.Lock()
        self.bytes_down = 0
        """Bytes sent to clients, headers included."""

    @property
    def url(self) -> str:
        """Return the URL to dial."""
        return f"http://127.0.0.1:{self._server.getsockname()[1]}"

    def __enter__(self) -> Self:
        threading.Thread(target=self._accept, name="link", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.close()
        for sock in list(self._sockets):
            sock.close()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._server.accept()
                far = socket.create_connection(("127.0.0.1", self._target_port))
            except OSError:
                return
            self._sockets |= {near, far}
            for source, target, down in ((near, far, False), (far, near, True)):
                threading.Thread(target=self._pass, args=(source, target, down), name="link-pass", daemon=True).start()

    def _pass(self, source: socket.socket, target: socket.socket, down: bool) -> None:
        buffer = memoryview(bytearray(_BLOCK_BYTES))
        try:
            while n_bytes := source.recv_into(buffer):
                if down:
                    self._down.take(n_bytes)
                    with self._counting:
                        self.bytes_down += n_bytes
                target.sendall(buffer[:n_bytes])
            target.shutdown(socket.SHUT_WR)
        except OSError:
            return
