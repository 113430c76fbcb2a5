"""Transfers of chunks over HTTP: many over few connections, in threads, each verified and tried again."""

from __future__ import annotations

import asyncio
import http.client
import socket
import threading
import time
from base64 import b64encode
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any, Protocol, TypeVar
from urllib.parse import SplitResult, unquote, urljoin, urlsplit

from rlboost.shared.errors import Corrupt
from rlboost.shared.http.transfer_server import transfer_limit_s
from rlboost.shared.proxies import Proxy, Route, external
from rlboost.shared.tls import verifying_context
from rlboost.shared.weights.manifest import CHUNK_BYTES, ChunkRef

# --- A resumable download of one blob, into a buffer that later downloads use again -----------------------------------


_MAX_FREE = 16


class Body(Protocol):
    """The body of a response."""

    def readinto(self, buffer: memoryview, /) -> int:
        """Fill the buffer; return fewer bytes only at the end of the body."""


class Buffers:
    """Free buffers of `CHUNK_BYTES`.

    A new buffer costs more than the copy into it: its pages must be zeroed and mapped.
    """

    def __init__(self) -> None:
        self._free: list[bytearray] = []

    def take(self, n_bytes: int) -> bytearray:
        """Return a buffer of at least that size; its content is arbitrary."""
        if n_bytes > CHUNK_BYTES:
            return bytearray(n_bytes)
        return self._free.pop() if self._free else bytearray(CHUNK_BYTES)

    def give_back(self, buffer: bytearray) -> None:
        """Let a later `take` return a buffer that nothing else uses any more."""
        if len(buffer) == CHUNK_BYTES and len(self._free) < _MAX_FREE:
            self._free.append(buffer)


class Download:
    """The bytes of a blob received so far; not verified. Only one thread at a time may receive."""

    def __init__(self, blob: ChunkRef, buffers: Buffers) -> None:
        self.blob = blob
        self.n_bytes = 0
        """Length of the received prefix."""
        self.n_received = 0
        """Bytes received in total, including repeated ones."""
        self._buffers = buffers
        self._buffer = buffers.take(blob.n_bytes)
        self.data = memoryview(self._buffer)[: blob.n_bytes]

    @property
    def is_complete(self) -> bool:
        """Return True if every byte was received."""
        return self.n_bytes == self.blob.n_bytes

    def receive(self, first: int, body: Body, n_bytes: int) -> bool:
        """Receive up to `n_bytes` of a body that starts at position `first` of the blob; return True if more may come.

        Raises:
            Corrupt: the body is longer than the blob.

        """
        free = self.data[first : first + n_bytes]
        n = body.readinto(free or memoryview(bytearray(1)))  # one byte more must not come
        if n > len(free):
            raise Corrupt(f"blob {self.blob.digest} is longer than its {self.blob.n_bytes} bytes")
        self.n_bytes = first + n
        self.n_received += n
        return n > 0

    def release(self) -> None:
        """Let another download use the buffer. Not after a cancelled transfer: its thread may still receive."""
        self.data.release()
        self._buffers.give_back(self._buffer)


# --- Opens blocking HTTP connections, directly or through a proxy -----------------------------------------------------


def connect(url: str, *, timeout_s: float, proxy: Proxy | None) -> http.client.HTTPConnection:
    """Return an open connection for requests to the server of `url`.

    Raises:
        OSError: there is no connection within `timeout_s`.

    """
    parts = urlsplit(url)
    host = parts.hostname or ""
    connection: http.client.HTTPConnection
    if proxy is None:
        connection = _connection(parts.scheme, host, parts.port, timeout_s)
        connection.connect()
        return connection
    via = urlsplit(proxy.url)
    if parts.scheme == "https":
        connection = _connection("https", via.hostname or "", via.port, timeout_s)
        connection.set_tunnel(host, parts.port, _credential(via))
    else:
        connection = _ProxiedConnection(via.hostname or "", via.port, timeout=timeout_s)
        connection.origin, connection.credential = f"{parts.scheme}://{parts.netloc}", _credential(via)
    try:
        connection.connect()
    except OSError as error:
        raise OSError(f"{error or type(error).__name__}, through the proxy {proxy}") from error
    return connection


class _ProxiedConnection(http.client.HTTPConnection):
    """A connection to a proxy, which takes requests with whole URLs."""

    origin = ""
    credential: dict[str, str]

    def putrequest(self, method: str, url: str, *args: Any, **options: Any) -> None:
        super().putrequest(method, f"{self.origin}{url}", *args, **options)
        for name, value in self.credential.items():
            self.putheader(name, value)


def _connection(scheme: str, host: str, port: int | None, timeout_s: float) -> http.client.HTTPConnection:
    if scheme == "https":
        return http.client.HTTPSConnection(host, port, timeout=timeout_s, context=_tls())
    return http.client.HTTPConnection(host, port, timeout=timeout_s)


_tls = cache(verifying_context)


def _credential(proxy: SplitResult) -> dict[str, str]:
    if not proxy.username:
        return {}
    pair = f"{unquote(proxy.username)}:{unquote(proxy.password or '')}"
    return {"Proxy-Authorization": f"Basic {b64encode(pair.encode()).decode()}"}


# --- Downloads blobs over HTTP in threads: bytes go from the socket into the blob's buffer, not through the event loop


_FIRST_BLOCK_BYTES = 32 << 10
_LARGEST_BLOCK_BYTES = 256 << 10
"""Received between two calls of `on_block`, from a fast server: a block blocks until it is full."""
_FAST_BLOCK_S = 0.1
_MAX_THREADS = 64
MAX_ERROR_BYTES = 64 << 10
_REDIRECTS = frozenset({301, 302, 303, 307, 308})

_ABORT_S = 5.0
"""How long an aborted thread is waited for."""
T = TypeVar("T")
_Opened = tuple[http.client.HTTPConnection, http.client.HTTPResponse]


class BadStatus(Exception):
    """The response is not the blob."""

    def __init__(self, status: int, body: bytes, *, redirected: bool) -> None:
        """Create an error with the response's status and body; `redirected` if another server sent it."""
        super().__init__(f"status {status}")
        self.status, self.body, self.redirected = status, body, redirected


class DownloadFailed(Exception):
    """The server did not answer, or the transfer broke off."""


class TransferTimedOut(DownloadFailed):
    """The transfer took too long in all, whether bytes arrived or not."""


class Unreachable(DownloadFailed):
    """No connection could be made."""


@contextmanager
def transfer_errors(url: str) -> Iterator[None]:
    """Translate the errors of a transfer from or to a URL into `DownloadFailed`."""
    try:
        yield
    except (OSError, http.client.HTTPException) as error:
        raise DownloadFailed(str(error) or type(error).__name__) from error
    except ValueError as error:
        raise Unreachable(f"{url}: {error}") from error


class BlobDownloader:
    """Connections that are kept open, and the threads that download on them."""

    def __init__(self, *, connect_s: float, stall_s: float, follow_redirects: bool, route: Route) -> None:
        """Connect lazily.

        Args:
            connect_s: maximum time of a connection attempt.
            stall_s: maximum time without a byte.
            follow_redirects: follow one redirect, without the `Authorization` header.
            route: which proxy connects to the server; to an object store that it redirects to, `external`.

        """
        self._connect_s = connect_s
        self._stall_s = stall_s
        self._follow_redirects = follow_redirects
        self._route = route
        self._threads = ThreadPoolExecutor(_MAX_THREADS, thread_name_prefix="weights-download")
        self._idle: defaultdict[str, list[http.client.HTTPConnection]] = defaultdict(list)
        self._lock = threading.Lock()
        self._is_closed = False

    def close(self) -> None:
        """Close idle connections. Downloads in progress must have ended or been cancelled."""
        with self._lock:
            self._is_closed = True
            idle = [connection for connections in self._idle.values() for connection in connections]
            self._idle.clear()
        for connection in idle:
            connection.close()
        self._threads.shutdown(wait=False)

    async def download(
        self,
        url: str,
        authorization: str,
        download: Download,
        on_block: Callable[[], None] = lambda: None,
        keep: Callable[[], bool] = lambda: True,
        limit_s: float | None = None,
    ) -> bool:
        """Receive the rest of a blob, and return the result of `keep`; call it again after a broken transfer.

        Args:
            url: the blob's URL.
            authorization: the request's `Authorization` header.
            download: continues after its last received byte.
            on_block: called in the thread from time to time; what it raises ends the transfer.
            keep: called in the same thread after the last byte, which saves switching threads for every blob.
            limit_s: maximum time of the transfer; None: by its size.

        Raises:
            BadStatus: the response is not the blob.
            DownloadFailed: the server did not answer, or the transfer broke off.
            Corrupt: more bytes arrive than the blob has.

        """
        transfer = _Transfer(download, on_block)
        work = self._threads.submit(self._run, transfer, url, authorization, keep)
        return await within(limit_s or transfer_limit_s(download.blob.n_bytes), work, transfer)

    def _run(self, transfer: _Transfer, url: str, authorization: str, keep: Callable[[], bool]) -> bool:
        with transfer_errors(url):
            if not transfer.download.is_complete:
                self._get(transfer, url, {"Authorization": authorization})
        return keep()

    def _get(self, transfer: _Transfer, url: str, headers: Mapping[str, str], *, redirected: bool = False) -> None:
        start = transfer.download.n_bytes
        ranged = {**headers, "Range": f"bytes={start}-"} if start else headers
        connection, response = self._open(transfer, url, ranged, is_redirected=redirected)
        try:
            if response.status in {200, 206}:
                transfer.receive(start if response.status == 206 else 0, response)
                return
            body = response.read(MAX_ERROR_BYTES)
        finally:
            self._give_back(url, connection, response)
        if response.status not in _REDIRECTS or not self._follow_redirects or redirected:
            raise BadStatus(response.status, body, redirected=redirected)
        # A signed URL has a credential of its own. Ours is not for the object store.
        self._get(transfer, urljoin(url, response.headers.get("Location", "")), {}, redirected=True)

    def _open(
        self, exchange: Exchange, url: str, headers: Mapping[str, str], *, is_redirected: bool = False
    ) -> _Opened:
        """Send a request; again on a new connection if the server has closed the idle one meanwhile."""
        with self._lock:
            idle = self._idle[_server(url)]
            connection = idle.pop() if idle else None
        if connection is not None:
            with suppress(OSError, http.client.HTTPException):
                return connection, exchange.send(connection, url, headers)
            connection.close()
        try:
            route = external if is_redirected else self._route
            connection = connect(url, timeout_s=self._connect_s, proxy=route(url))
        except OSError as error:
            raise Unreachable(str(error) or type(error).__name__) from error
        connection.sock.settimeout(self._stall_s)
        try:
            return connection, exchange.send(connection, url, headers)
        except (OSError, http.client.HTTPException):
            connection.close()
            raise

    def _give_back(self, url: str, connection: http.client.HTTPConnection, response: http.client.HTTPResponse) -> None:
        if response.isclosed() and not response.will_close:  # the body was read to its end
            with self._lock:
                if not self._is_closed:
                    self._idle[_server(url)].append(connection)
                    return
        response.close()
        connection.close()


class Exchange:
    """A request in a thread, which another thread may abort."""

    def __init__(self) -> None:
        self._sock: socket.socket | None = None
        self.is_aborted = False

    def abort(self) -> None:
        """End the exchange soon."""
        self.is_aborted = True
        sock = self._sock
        if sock is not None:
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def send(
        self, connection: http.client.HTTPConnection, url: str, headers: Mapping[str, str]
    ) -> http.client.HTTPResponse:
        """Send the request and return the response, whose body is still to be read."""
        self._sock = connection.sock
        if self.is_aborted:
            raise ConnectionAbortedError("the transfer was cancelled")
        self.request(connection, _target(url), headers)
        return connection.getresponse()

    def request(self, connection: http.client.HTTPConnection, target: str, headers: Mapping[str, str]) -> None:
        """Send the request."""
        connection.request("GET", target, headers=dict(headers))


class _Transfer(Exchange):
    def __init__(self, download: Download, on_block: Callable[[], None]) -> None:
        super().__init__()
        self.download = download
        self._on_block = on_block

    def receive(self, first: int, response: http.client.HTTPResponse) -> None:
        """Receive the body, which starts at position `first` of the blob."""
        began, block_bytes = time.monotonic(), _FIRST_BLOCK_BYTES
        while self.download.receive(first, response, block_bytes):
            first = self.download.n_bytes
            self._on_block()
            is_fast = time.monotonic() - began < _FAST_BLOCK_S
            began, block_bytes = time.monotonic(), _LARGEST_BLOCK_BYTES if is_fast else _FIRST_BLOCK_BYTES
        if response.length:
            raise http.client.IncompleteRead(b"", response.length)


async def within(limit_s: float, work: Future[T], exchange: Exchange) -> T:
    """Return the result of a thread that runs an exchange; abort the exchange when cancelled, or after the limit.

    Raises:
        TransferTimedOut: the limit is over. The thread does not use the exchange's buffer any more.

    """
    waited = asyncio.wrap_future(work)
    try:
        done, _ = await asyncio.wait({waited}, timeout=limit_s)
        if done:
            return waited.result()
        exchange.abort()
        # A thread that is still connecting may take longer: it finds the exchange aborted.
        done, _ = await asyncio.wait({waited}, timeout=_ABORT_S)
    except asyncio.CancelledError:
        exchange.abort()
        waited.cancel()
        raise
    # Whatever the thread returns: to it, the aborted response ended early, and looks complete without a length.
    if done:
        waited.exception()
    else:
        waited.cancel()
    raise TransferTimedOut(f"the transfer took longer than {limit_s:.0f} s")


def _server(url: str) -> str:
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc}"


def _target(url: str) -> str:
    """Return the exact characters of the path and query: a signature may cover them."""
    return url[len(_server(url)) :].partition("#")[0] or "/"


# --- Uploads blobs over HTTP in threads: bytes go from the caller's memory into the socket, not through the event loop


_SENT_BLOCK_BYTES = 256 << 10
"""Sent within one timeout."""


class BlobTransfer(BlobDownloader):
    """A `BlobDownloader` that also uploads, on the same connections."""

    async def upload(self, url: str, authorization: str, data: memoryview) -> None:
        """Send a blob. After a cancelled upload a thread may still read `data` for a moment.

        Raises:
            BadStatus: the server rejected the blob.
            DownloadFailed: the server did not answer, or the transfer broke off.

        """
        upload = _Upload(data)
        work = self._threads.submit(self._send, upload, url, {"Authorization": authorization})
        await within(transfer_limit_s(len(data)), work, upload)

    def _send(self, upload: _Upload, url: str, headers: Mapping[str, str]) -> None:
        with transfer_errors(url):
            connection, response = self._open(upload, url, headers)
            try:
                body = response.read(MAX_ERROR_BYTES)
            finally:
                self._give_back(url, connection, response)
        if not 200 <= response.status < 300:
            raise BadStatus(response.status, body, redirected=False)


class _Upload(Exchange):
    def __init__(self, data: memoryview) -> None:
        super().__init__()
        self._data = data

    def request(self, connection: http.client.HTTPConnection, target: str, headers: Mapping[str, str]) -> None:
        connection.putrequest("PUT", target)
        for name, value in {**headers, "Content-Length": str(len(self._data))}.items():
            connection.putheader(name, value)
        connection.endheaders()
        # A server that rejects the request may close the connection after its response.
        with suppress(BrokenPipeError, ConnectionResetError):
            for start in range(0, len(self._data), _SENT_BLOCK_BYTES):
                connection.send(self._data[start : start + _SENT_BLOCK_BYTES])
