"""Receives the bodies of uploads in threads, into buffers that later uploads use again; for `transfer_server`."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager

_STALL_S = 30.0
"""How long a client may send no byte."""
_MAX_UPLOADS = 32
"""Maximum number of uploads at a time, until they are stored. Each occupies a thread and a buffer; the app receives
those beyond it."""


class BodyReceiver:
    """The buffers and threads for the uploads to one server."""

    def __init__(
        self,
        accepts: Callable[[str, str], bool],
        store: Callable[[str, memoryview], Awaitable[None]],
        *,
        max_bytes: int,
    ) -> None:
        """Receive bodies of at most `max_bytes`.

        Args:
            accepts: takes path and `Authorization` header; returns False if the app must respond.
            store: takes path and body, which is valid during the call.
            max_bytes: maximum size of a body.

        """
        self.store = store
        self._accepts = accepts
        self._max_bytes = max_bytes
        self._n_active = 0
        self._free: list[bytearray] = []
        self._threads = ThreadPoolExecutor(_MAX_UPLOADS, thread_name_prefix="receive-body")

    def close(self) -> None:
        """End the threads; no upload may be in progress."""
        self._threads.shutdown()

    def try_reserve(self, path: str, authorization: str, n_bytes: int) -> bool:
        """Reserve a place for an upload, which `receive` must follow; return False if the app must respond."""
        if n_bytes > self._max_bytes or self._n_active >= _MAX_UPLOADS or not self._accepts(path, authorization):
            return False
        self._n_active += 1
        return True

    @asynccontextmanager
    async def receive(self, sock: socket.socket, received: bytes, n_bytes: int) -> AsyncIterator[memoryview]:
        """Receive the body of a reserved upload, which starts with `received`; it is valid in the context.

        Raises:
            OSError: the connection broke, or the client sent nothing for too long.
            EOFError: the client closed the connection.

        """
        try:
            buffer = self._free.pop() if self._free else bytearray(self._max_bytes)
            try:
                body = memoryview(buffer)[:n_bytes]
                body[: len(received)] = received
                work = asyncio.get_running_loop().run_in_executor
                await work(self._threads, _receive_all, sock, body[len(received) :])
                yield body
            finally:
                self._free.append(buffer)
        finally:
            self._n_active -= 1


def _receive_all(sock: socket.socket, rest: memoryview) -> None:
    sock.settimeout(_STALL_S)
    while rest:
        n_bytes = sock.recv_into(rest)
        if not n_bytes:
            raise EOFError("the client closed the connection before the end of the body")
        rest = rest[n_bytes:]
