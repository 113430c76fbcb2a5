"""Answers downloads of files with sendfile(2), and uploads, in threads, on the same port as an ASGI app.

An ASGI server copies every byte of a body through its event loop. Here the kernel copies from its page cache to the
socket, or from the socket to a buffer, and threads call it, so throughput grows with the cores.

A new connection starts with a `TransferConnection`. It answers the plain downloads of files that `TransferServer`
finds, and the plain uploads that its `BodyReceiver` accepts. The first other request, and everything after it, goes to
the ASGI server, as does an upload that failed: ranges, errors and redirects have one implementation, in the app.
"""

from __future__ import annotations

import asyncio
import os
import re
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from typing import BinaryIO, NamedTuple

import structlog
from prometheus_client import Counter

from rlboost.shared.errors import RLBoostError

log = structlog.get_logger(__name__)

# --- Receives the bodies of uploads in threads, into buffers that later uploads use again -----------------------------


_STALL_S = 30.0
"""How long a client may send or accept no byte."""
_SLOWEST_BYTES_PER_S = 64 << 10
"""A slower transfer is broken off: the other side may hold a thread or a slot with a byte now and then."""
_MAX_UPLOADS = 32
"""Maximum number of uploads at a time, until they are stored. Each occupies a thread and a buffer; the app receives
those beyond it."""


def transfer_limit_s(n_bytes: int) -> float:
    """Return how long a transfer of this many bytes may take in all."""
    return _STALL_S + n_bytes / _SLOWEST_BYTES_PER_S


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
            OSError: the connection broke, or the client sent nothing for too long, or too slowly.
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
    ends_at = time.monotonic() + transfer_limit_s(len(rest))
    while rest:
        left_s = ends_at - time.monotonic()
        if left_s <= 0:
            raise TimeoutError(f"the client sends too slowly: {len(rest)} bytes are missing")
        sock.settimeout(min(_STALL_S, left_s))
        n_bytes = sock.recv_into(rest)
        if not n_bytes:
            raise EOFError("the client closed the connection before the end of the body")
        rest = rest[n_bytes:]


# --- The server -------------------------------------------------------------------------------------------------------


_REQUEST = re.compile(rb"(GET|PUT) ([!-~]+) HTTP/1\.1\r\n((?:[!#-'*-.0-9A-Z^-z|~]+:[^\r\n]*\r\n)*)\r\n")
_FOR_THE_APP = re.compile(r"range|if-.*|transfer-encoding|expect|upgrade|te|content-(range|encoding)")
"""Headers that change the response."""
_LENGTH = re.compile(r"[0-9]{1,18}")
_MAX_HEAD_BYTES = 16 << 10
_IDLE_S = 60.0
"""How long a connection may wait for its next request."""
_STOP_S = 5.0
"""How long responses may take after the stop."""
_MAX_THREADS = 8


class TransferRequest(NamedTuple):
    """A plain download or upload."""

    path: str
    authorization: str
    """The header's value, empty without one."""
    upload_bytes: int | None = None
    """Size of an upload's body; None for a download."""


class FoundFile(NamedTuple):
    """An open file, and the tag that identifies its content."""

    file: BinaryIO
    etag: str


Find = Callable[[TransferRequest], FoundFile | None]
"""Opens the file to respond with; None if the app must respond. Called in a thread."""


class TransferServer:
    """The connections of one server that transfer files and uploads, and the threads that send files on them."""

    def __init__(
        self,
        find: Find,
        sent: Counter,
        *,
        slots: asyncio.Semaphore | None = None,
        uploads: BodyReceiver | None = None,
    ) -> None:
        """Respond to downloads with the files that `find` opens.

        Args:
            find: opens a request's file.
            sent: counts bytes.
            slots: limits concurrent downloads; the app responds while it is locked.
            uploads: receives uploads; None if the app does.

        """
        self.find = find
        self.sent = sent
        self.slots = slots or asyncio.Semaphore(1 << 30)
        self.uploads = uploads
        self.threads = ThreadPoolExecutor(min(_MAX_THREADS, os.cpu_count() or 1), thread_name_prefix="send-file")
        self.connections: set[TransferConnection] = set()
        self.is_closed = False

    async def close(self) -> None:
        """Let active responses finish within some seconds, and close all connections."""
        self.is_closed = True
        sending = [connection.task for connection in self.connections if connection.task]
        if sending:
            await asyncio.wait(sending, timeout=_STOP_S)
        for connection in list(self.connections):
            connection.abort()
        await asyncio.gather(*sending, return_exceptions=True)
        self.threads.shutdown()
        if self.uploads:
            self.uploads.close()


class TransferConnection(asyncio.Protocol):
    """One connection, until its first request that is not a plain download of a known file or a plain upload."""

    def __init__(self, server: TransferServer, make_app_protocol: Callable[[], asyncio.Protocol]) -> None:
        """Hand the connection over to a protocol from `make_app_protocol` when the app must respond."""
        self._server = server
        self._make_app_protocol = make_app_protocol
        self._received = b""
        self._sock: socket.socket | None = None
        self.task: asyncio.Task[None] | None = None
        """The response in progress."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport
        self._server.connections.add(self)
        self._idle = asyncio.get_running_loop().call_later(_IDLE_S, transport.close)
        if self._server.is_closed:
            self.abort()

    def connection_lost(self, _: Exception | None) -> None:
        self._idle.cancel()
        self._server.connections.discard(self)
        if self._sock:
            # Ends the response, which may be in a thread and cannot be cancelled there.
            with suppress(OSError):
                self._sock.shutdown(socket.SHUT_RDWR)

    def abort(self) -> None:
        """Close the connection at once."""
        self._transport.abort()

    def data_received(self, data: bytes) -> None:
        self._received += data
        if self.task is None:
            self._respond()

    def _respond(self) -> None:
        """Respond to the request received so far, once it is complete."""
        if self._server.is_closed:
            self._transport.close()
            return
        if b"\r\n\r\n" not in self._received and len(self._received) < _MAX_HEAD_BYTES:
            return
        request = parse(self._received)
        if request is None or not self._may_start(request):
            self._hand_over()
            return
        self._idle.cancel()
        self._transport.pause_reading()
        self.task = asyncio.create_task(self._complete(request), name="transfer-file")

    def _may_start(self, request: TransferRequest) -> bool:
        if request.upload_bytes is None:
            return not self._server.slots.locked()
        uploads = self._server.uploads
        return uploads is not None and uploads.try_reserve(request.path, request.authorization, request.upload_bytes)

    def _hand_over(self) -> None:
        self._idle.cancel()
        self._server.connections.discard(self)
        protocol = self._make_app_protocol()
        self._transport.set_protocol(protocol)
        protocol.connection_made(self._transport)
        protocol.data_received(self._received)

    async def _complete(self, request: TransferRequest) -> None:
        head, end, _ = self._received.partition(b"\r\n\r\n")
        n_head = len(head + end)
        is_download = request.upload_bytes is None
        try:
            is_done = await (self._send_file(request) if is_download else self._receive_body(request, n_head))
        except (OSError, EOFError) as error:  # includes TimeoutError
            event = "download_broken_off" if is_download else "upload_broken_off"
            log.info(event, path=request.path, error=str(error) or type(error).__name__)
            self._transport.abort()
            return
        except Exception:
            log.exception("transfer_failed", path=request.path)
            self._transport.abort()
            return
        finally:
            self.task = None
        if self._transport.is_closing():
            return
        self._transport.resume_reading()
        if not is_done:
            self._hand_over()
            return
        self._idle = asyncio.get_running_loop().call_later(_IDLE_S, self._transport.close)
        self._received = self._received[n_head:]
        self._respond()

    async def _receive_body(self, request: TransferRequest, n_head: int) -> bool:
        uploads, n_bytes = self._server.uploads, request.upload_bytes
        assert uploads is not None
        assert n_bytes is not None
        head, start = self._received[:n_head], self._received[n_head:]
        with self._own_socket() as self._sock:
            async with uploads.receive(self._sock, start, n_bytes) as body:
                try:
                    await uploads.store(request.path, body)
                except Exception as error:
                    if not isinstance(error, RLBoostError):
                        log.exception("upload_failed", path=request.path)
                    self._received = head + body  # the app tries again, and reports the error
                    return False
        self._received = head
        self._transport.write(b"HTTP/1.1 204 No Content\r\n\r\n")
        return True

    async def _send_file(self, request: TransferRequest) -> bool:
        async with self._server.slots:
            return await self._send_found(request)

    async def _send_found(self, request: TransferRequest) -> bool:
        loop = asyncio.get_running_loop()
        found = await loop.run_in_executor(self._server.threads, self._server.find, request)
        if found is None:
            return False
        with found.file as file, self._own_socket() as self._sock:
            n_bytes = os.fstat(file.fileno()).st_size
            await loop.sock_sendall(self._sock, _head(n_bytes, found.etag))
            at, ends_at = 0, loop.time() + transfer_limit_s(n_bytes)
            while at < n_bytes:
                end = await loop.run_in_executor(self._server.threads, _send_some, self._sock, file, at, n_bytes)
                self._server.sent.inc(end - at)
                at = end
                if at < n_bytes:
                    async with asyncio.timeout_at(min(loop.time() + _STALL_S, ends_at)):
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


def parse(received: bytes) -> TransferRequest | None:
    """Return the plain download, or upload, that these bytes are (the start of), None if they are another request."""
    found = _REQUEST.match(received)
    if found is None or found.end() > _MAX_HEAD_BYTES:
        return None
    headers: dict[str, str] = {}
    for line in found[3].decode("latin-1").split("\r\n")[:-1]:
        name, _, value = line.partition(":")
        if _FOR_THE_APP.fullmatch(name.lower()) or name.lower() in headers:
            return None
        headers[name.lower()] = value.strip(" \t")
    if headers.get("connection", "keep-alive").lower() != "keep-alive":
        return None
    path, authorization = found[2].decode("ascii"), headers.get("authorization", "")
    length = headers.get("content-length")
    n_body = len(received) - found.end()
    if found[1] == b"GET":
        return TransferRequest(path, authorization) if length is None and not n_body else None
    if length is None or not _LENGTH.fullmatch(length) or n_body > int(length):
        return None
    return TransferRequest(path, authorization, int(length))


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
    ready = asyncio.Event()
    loop.add_writer(sock, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_writer(sock)
