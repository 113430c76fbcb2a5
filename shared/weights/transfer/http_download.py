"""Downloads blobs over HTTP in threads: bytes go from the socket into the blob's buffer, not through the event loop."""

from __future__ import annotations

import asyncio
import http.client
import socket
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from urllib.parse import urljoin, urlsplit

from rlboost.shared.weights.transfer.download import Download
from rlboost.shared.weights.transfer.http_connection import connect

_FIRST_BLOCK_BYTES = 32 << 10
_LARGEST_BLOCK_BYTES = 256 << 10
"""Received between two calls of `on_block`, from a fast server: a block blocks until it is full."""
_FAST_BLOCK_S = 0.1
_MAX_THREADS = 64
MAX_ERROR_BYTES = 64 << 10
_REDIRECTS = frozenset({301, 302, 303, 307, 308})

_Opened = tuple[http.client.HTTPConnection, http.client.HTTPResponse]


class BadStatus(Exception):
    """The response is not the blob."""

    def __init__(self, status: int, body: bytes, *, redirected: bool) -> None:
        """Create an error with the response's status and body; `redirected` if another server sent it."""
        super().__init__(f"status {status}")
        self.status, self.body, self.redirected = status, body, redirected


class DownloadFailed(Exception):
    """The server did not answer, or the transfer broke off."""


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

    def __init__(self, *, connect_s: float, stall_s: float, follow_redirects: bool, use_proxies: bool) -> None:
        """Connect lazily.

        Args:
            connect_s: maximum time of a connection attempt.
            stall_s: maximum time without a byte.
            follow_redirects: follow one redirect, without the `Authorization` header.
            use_proxies: use the proxies in the environment, such as `HTTPS_PROXY`.

        """
        self._connect_s = connect_s
        self._stall_s = stall_s
        self._follow_redirects = follow_redirects
        self._use_proxies = use_proxies
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
    ) -> bool:
        """Receive the rest of a blob, and return the result of `keep`; call it again after a broken transfer.

        Args:
            url: the blob's URL.
            authorization: the request's `Authorization` header.
            download: continues after its last received byte.
            on_block: called in the thread from time to time; what it raises ends the transfer.
            keep: called in the same thread after the last byte, which saves switching threads for every blob.

        Raises:
            BadStatus: the response is not the blob.
            DownloadFailed: the server did not answer, or the transfer broke off.
            Corrupt: more bytes arrive than the blob has.

        """
        transfer = _Transfer(download, on_block)
        work = self._threads.submit(self._run, transfer, url, authorization, keep)
        try:
            return await asyncio.wrap_future(work)
        except asyncio.CancelledError:
            transfer.abort()
            raise

    def _run(self, transfer: _Transfer, url: str, authorization: str, keep: Callable[[], bool]) -> bool:
        with transfer_errors(url):
            if not transfer.download.is_complete:
                self._get(transfer, url, {"Authorization": authorization})
        return keep()

    def _get(self, transfer: _Transfer, url: str, headers: Mapping[str, str], *, redirected: bool = False) -> None:
        start = transfer.download.n_bytes
        connection, response = self._open(transfer, url, {**headers, "Range": f"bytes={start}-"} if start else headers)
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

    def _open(self, exchange: Exchange, url: str, headers: Mapping[str, str]) -> _Opened:
        """Send a request; again on a new connection if the server has closed the idle one meanwhile."""
        with self._lock:
            idle = self._idle[_server(url)]
            connection = idle.pop() if idle else None
        if connection is not None:
            with suppress(OSError, http.client.HTTPException):
                return connection, exchange.send(connection, url, headers)
            connection.close()
        try:
            connection = connect(url, timeout_s=self._connect_s, use_proxies=self._use_proxies)
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
        """Start without a connection."""
        self._sock: socket.socket | None = None
        self._is_aborted = False

    def abort(self) -> None:
        """End the exchange soon."""
        self._is_aborted = True
        sock = self._sock
        if sock is not None:
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def send(
        self, connection: http.client.HTTPConnection, url: str, headers: Mapping[str, str]
    ) -> http.client.HTTPResponse:
        """Send the request and return the response, whose body is still to be read."""
        self._sock = connection.sock
        if self._is_aborted:
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


def _server(url: str) -> str:
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc}"


def _target(url: str) -> str:
    """Return the exact characters of the path and query: a signature may cover them."""
    return url[len(_server(url)) :].partition("#")[0] or "/"
