"""Answers downloads of files with sendfile(2) in threads, on the same port as an ASGI app.

An ASGI server copies every byte of a file through its event loop. Here the kernel copies from its page cache to the
socket, and threads call it, so throughput grows with the cores.

A new connection starts with a `FileConnection`. It answers the plain downloads of files that `FileSender` finds. The
first other request, and everything after it, goes to the ASGI server: ranges, errors and redirects have one
implementation, in the app.
"""

from __future__ import annotations

import asyncio
import os
import re
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import BinaryIO, NamedTuple

import structlog
from prometheus_client import Counter

log = structlog.get_logger(__name__)

_REQUEST = re.compile(rb"GET ([!-~]+) HTTP/1\.1\r\n((?:[!#-'*-.0-9A-Z^-z|~]+:[^\r\n]*\r\n)*)\r\n")
_FOR_THE_APP = re.compile(r"range|if-.*|content-length|transfer-encoding|expect|upgrade|te")
"""Headers that change the response to a download."""
_MAX_HEAD_BYTES = 16 << 10
_IDLE_S = 60.0
"""How long a connection may wait for its next request."""
_STALL_S = 30.0
"""How long a client may accept no byte."""
_STOP_S = 5.0
"""How long responses may take after the stop."""
_MAX_THREADS = 8


class FileRequest(NamedTuple):
    """A plain download."""

    path: str
    authorization: str
    """The header's value, empty without one."""


class FoundFile(NamedTuple):
    """An open file, and the tag that identifies its content."""

    file: BinaryIO
    etag: str


Find = Callable[[FileRequest], FoundFile | None]
"""Opens the file to respond with; None if the app must respond. Called in a thread."""


class FileSender:
    """The connections of one server, and the threads that send files on them."""

    def __init__(self, find: Find, sent: Counter, *, slots: asyncio.Semaphore | None = None) -> None:
        """Respond with the files that `find` opens.

        Args:
            find: opens a request's file.
            sent: counts bytes.
            slots: limits concurrent responses; the app responds while it is locked.

        """
        self.find = find
        self.sent = sent
        self.slots = slots or asyncio.Semaphore(1 << 30)
        self.threads = ThreadPoolExecutor(min(_MAX_THREADS, os.cpu_count() or 1), thread_name_prefix="send-file")
        self.connections: set[FileConnection] = set()
        self.is_closed = False

    async def close(self) -> None:
        """Let active responses finish within some seconds, and close all connections."""
        self.is_closed = True
        sending = [connection.task for connection in self.connections if connection.task]
        if sending:
            await asyncio.wait(sending, timeout=_STOP_S)
        for connection in list(self.connections):
            connection.abort()
        await asyncio.gather(*sending)
        self.threads.shutdown()


class FileConnection(asyncio.Protocol):
    """One connection, until its first request that is not a plain download of a known file."""

    def __init__(self, sender: FileSender, make_app_protocol: Callable[[], asyncio.Protocol]) -> None:
        """Hand the connection over to a protocol from `make_app_protocol` when the app must respond."""
        self._sender = sender
        self._make_app_protocol = make_app_protocol
        self._received = b""
        self._sock: socket.socket | None = None
        self.task: asyncio.Task[None] | None = None
        """The response in progress."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """See `asyncio.BaseProtocol`."""
        self._transport = transport
        self._sender.connections.add(self)
        self._idle = asyncio.get_running_loop().call_later(_IDLE_S, transport.close)
        if self._sender.is_closed:
            self.abort()

    def connection_lost(self, _: Exception | None) -> None:
        """See `asyncio.BaseProtocol`."""
        self._idle.cancel()
        self._sender.connections.discard(self)
        if self._sock:
            # Ends the response, which may be in a thread and cannot be cancelled there.
            with suppress(OSError):
                self._sock.shutdown(socket.SHUT_RDWR)

    def abort(self) -> None:
        """Close the connection at once."""
        self._transport.abort()

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        self._received += data
        if self.task is None:
            self._respond()

    def _respond(self) -> None:
        """Respond to the request received so far, once it is complete."""
        if b"\r\n\r\n" not in self._received and len(self._received) < _MAX_HEAD_BYTES:
            return
        request = parse(self._received)
        if request is None or self._sender.slots.locked():
            self._hand_over()
            return
        self._idle.cancel()
        self._transport.pause_reading()
        self.task = asyncio.create_task(self._send(request, len(self._received)), name="send-file")

    def _hand_over(self) -> None:
        self._idle.cancel()
        self._sender.connections.discard(self)
        protocol = self._make_app_protocol()
        self._transport.set_protocol(protocol)
        protocol.connection_made(self._transport)
        protocol.data_received(self._received)

    async def _send(self, request: FileRequest, n_head: int) -> None:
        try:
            async with self._sender.slots:
                is_sent = await self._send_file(request)
        except (OSError, EOFError) as error:  # includes TimeoutError
            log.info("download_broken_off", path=request.path, error=str(error) or type(error).__name__)
            self._transport.abort()
            return
        finally:
            self.task = None
        if self._transport.is_closing():
            return
        self._transport.resume_reading()
        if not is_sent:
            self._hand_over()
            return
        self._idle = asyncio.get_running_loop().call_later(_IDLE_S, self._transport.close)
        self._received = self._received[n_head:]
        self._respond()

    async def _send_file(self, request: FileRequest) -> bool:
        loop = asyncio.get_running_loop()
        found = await loop.run_in_executor(self._sender.threads, self._sender.find, request)
        if found is None:
            return False
        with found.file as file, self._own_socket() as self._sock:
            n_bytes = os.fstat(file.fileno()).st_size
            await loop.sock_sendall(self._sock, _head(n_bytes, found.etag))
            at = 0
            while at < n_bytes:
                end = await loop.run_in_executor(self._sender.threads, _send_some, self._sock, file, at, n_bytes)
                self._sender.sent.inc(end - at)
                at = end
                if at < n_bytes:
                    async with asyncio.timeout(_STALL_S):
                        await _writable(self._sock)
        return True

    def _own_socket(self) -> socket.socket:
        """Duplicate the descriptor: a thread may still use it after the transport has closed its own."""
        sock = socket.socket(fileno=os.dup(self._transport.get_extra_info("socket").fileno()))
        sock.setblocking(False)
        return sock


def _head(n_bytes: int, etag: str) -> bytes:
    lines = [
        "HTTP/1.1 200 OK",
        "Content-Type: application/octet-stream",
        f"Content-Length: {n_bytes}",
        "Accept-Ranges: bytes",
        f'ETag: "{etag}"',
    ]
    return "\r\n".join([*lines, "", ""]).encode()


def parse(head: bytes) -> FileRequest | None:
    """Return the plain download that these bytes are, None if they are another request."""
    found = _REQUEST.fullmatch(head)
    if found is None or len(head) > _MAX_HEAD_BYTES:
        return None
    headers: dict[str, str] = {}
    for line in found[2].decode("latin-1").splitlines():
        name, _, value = line.partition(":")
        if _FOR_THE_APP.fullmatch(name.lower()) or name.lower() in headers:
            return None
        headers[name.lower()] = value.strip()
    if headers.get("connection", "keep-alive").lower() != "keep-alive":
        return None
    return FileRequest(found[1].decode("ascii"), headers.get("authorization", ""))


def _send_some(sock: socket.socket, file: BinaryIO, at: int, end: int) -> int:
    """Send from position `at` until `end`, or until the socket is full; return the next position."""
    while at < end:
        try:
            n_bytes = os.sendfile(sock.fileno(), file.fileno(), at, end - at)
        except BlockingIOError:
            break
        if not n_bytes:
            raise EOFError("the file was truncated while it was sent")
        at += n_bytes
    return at


async def _writable(sock: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()
    loop.add_writer(sock, _set, ready)
    try:
        await ready
    finally:
        loop.remove_writer(sock)


def _set(ready: asyncio.Future[None]) -> None:
    if not ready.done():
        ready.set_result(None)
