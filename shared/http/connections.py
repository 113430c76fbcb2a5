"""Limits of a server's connections: how many there are, and how long a client may be silent.

uvicorn closes a connection that is idle after a response, but not one that sends no request or half of one, nor one
whose client reads no response. Without a token anyone could open connections until the process may open no more files.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any, Protocol

import structlog

from rlboost.shared.http.transfer_server import TransferConnection, TransferServer

log = structlog.get_logger(__name__)

HEAD_LIMIT_S = 10.0
"""How long a request's line and headers may take, from the connection or from their first byte."""
KEEP_ALIVE_S = 75
"""How long a connection may be idle: longer than clients' tools take between two requests, and than load balancers
keep connections. uvicorn closes them then, and `Connections` replaces idle ones when all places are taken."""
STALL_S = 60.0
"""How long a client may send no byte of a body, or accept no byte of a response."""
MAX_HEAD_BYTES = 64 << 10
"""The most bytes of a request's line and headers."""
RESERVED_FILES = 256
"""Open files that connections of clients leave to everything else."""
MAX_CONNECTIONS = 8192
_SWEEP_S = 1.0
_LOG_S = 10.0
"""How often a full server is logged."""
_FULL = b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


class Connection(Protocol):
    """One connection of a server."""

    address: str
    """The client's, empty if unknown."""

    @property
    def has_request(self) -> bool:
        """Return True from the end of a request's headers to the end of its response."""

    def is_overdue(self, now: float) -> bool:
        """Return True if the client has been silent for too long."""

    def abort(self) -> None:
        """Close the connection at once."""


class Connections:
    """The connections of one server, at most `limit` in all, and three quarters of them from one address.

    A new connection beyond a limit takes the place of the oldest one that has no request, if there is one.
    """

    def __init__(self, limit: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.limit, self.limit_of_address = limit, max(1, limit * 3 // 4)
        self.clock = clock
        self._all: dict[Connection, None] = {}
        """In the order in which they were opened."""
        self._of_address: dict[str, int] = {}
        self._logged_at = -_LOG_S

    def __len__(self) -> int:
        return len(self._all)

    def add(self, connection: Connection) -> bool:
        """Count a new connection; return False if there is no place for it."""
        address = connection.address
        if self._of_address.get(address, 0) >= self.limit_of_address:
            found = self._oldest_without_request(address)
        elif len(self._all) >= self.limit:
            found = self._oldest_without_request(None)
        else:
            self._count(connection)
            return True
        now = self.clock()
        if now - self._logged_at >= _LOG_S:
            self._logged_at = now
            log.warning("connections_full", connections=len(self._all), limit=self.limit, address=address)
        if found is None:
            return False
        self.remove(found)
        found.abort()
        self._count(connection)
        return True

    def remove(self, connection: Connection) -> None:
        """Forget a connection that is closed; one that is unknown is ignored."""
        if connection not in self._all:
            return
        del self._all[connection]
        left = self._of_address[connection.address] - 1
        if left:
            self._of_address[connection.address] = left
        else:
            del self._of_address[connection.address]

    def sweep(self) -> None:
        """Close the connections whose clients have been silent for too long."""
        now = self.clock()
        for connection in [each for each in self._all if each.is_overdue(now)]:
            connection.abort()

    async def keep_swept(self) -> None:
        """Sweep until cancelled."""
        while True:
            await asyncio.sleep(_SWEEP_S)
            self.sweep()

    def _count(self, connection: Connection) -> None:
        self._all[connection] = None
        self._of_address[connection.address] = self._of_address.get(connection.address, 0) + 1

    def _oldest_without_request(self, address: str | None) -> Connection | None:
        return next(
            (each for each in self._all if not each.has_request and address in {None, each.address}),
            None,
        )


def max_connections(open_files_limit: int) -> int:
    """Return the number of connections that a process with this limit of open files has places for."""
    return max(16, min(MAX_CONNECTIONS, open_files_limit - RESERVED_FILES))


class LimitedProtocol(asyncio.Protocol):
    """`Connection` that `limited` puts before one of uvicorn's HTTP protocols."""

    places: Connections
    transport: asyncio.Transport
    cycle: Any
    """uvicorn's newest request and its response, None before the first one."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.address = _address(transport)
        self._progress_at = self.places.clock()
        self._n_waiting, self._n_head, self._n_unsent = 0, 0, 0
        self._is_in_head = False
        super().connection_made(transport)
        if not self.places.add(self):
            transport.write(_FULL)
            transport.close()

    def connection_lost(self, error: Exception | None) -> None:
        self.places.remove(self)
        super().connection_lost(error)

    @property
    def has_request(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def data_received(self, data: bytes) -> None:
        if self.has_request or not self._n_waiting:
            self._progress_at = self.places.clock()
        self._n_waiting += len(data)
        self._n_head += len(data) if self._is_in_head else 0
        super().data_received(data)
        if self.has_request:
            self._n_waiting = 0
        if self._is_in_head and self._n_head > MAX_HEAD_BYTES:
            self.abort()

    # Called by httptools, which limits no header. h11 does not call them, and has a limit.

    def on_message_begin(self) -> None:
        """Start to count the bytes of a request's headers."""
        self._is_in_head, self._n_head = True, 0
        super().on_message_begin()  # type: ignore[misc]

    def on_headers_complete(self) -> None:
        """Stop to count."""
        self._is_in_head = False
        super().on_headers_complete()  # type: ignore[misc]

    def on_header(self, name: bytes, value: bytes) -> None:
        """Drop what follows a chunked body: uvicorn would add it to the request's headers, without a limit."""
        if self._is_in_head:
            super().on_header(name, value)  # type: ignore[misc]
            return
        self._n_head += len(name) + len(value) + 4
        if self._n_head > MAX_HEAD_BYTES:
            self.abort()

    def is_overdue(self, now: float) -> bool:
        n_unsent = self.transport.get_write_buffer_size()
        if n_unsent != self._n_unsent:
            self._n_unsent, self._progress_at = n_unsent, now
        if n_unsent or (self.has_request and self.cycle.more_body):
            return now - self._progress_at > STALL_S
        if self.has_request:
            self._progress_at = now
            return False
        is_idle = self.cycle is not None and not self._n_waiting  # uvicorn closes it after KEEP_ALIVE_S
        return not is_idle and now - self._progress_at > HEAD_LIMIT_S

    def abort(self) -> None:
        self.transport.abort()


def limited(protocol: type[asyncio.Protocol], connections: Connections) -> type[asyncio.Protocol]:
    """Return one of uvicorn's HTTP protocols with the limits of `connections`."""
    return type("Limited", (LimitedProtocol, protocol), {"places": connections})


class LimitedTransfer(TransferConnection):
    """A connection for transfers that has a place among `connections` until the app takes it over.

    It closes by itself when its client is silent.
    """

    def __init__(
        self, server: TransferServer, make_app_protocol: Callable[[], asyncio.Protocol], connections: Connections
    ) -> None:
        super().__init__(server, make_app_protocol)
        self._connections = connections

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.address = _address(transport)
        super().connection_made(transport)
        if not self._connections.add(self):
            transport.write(_FULL)
            transport.close()

    def connection_lost(self, error: Exception | None) -> None:
        self._connections.remove(self)
        super().connection_lost(error)

    def _hand_over(self) -> None:
        self._connections.remove(self)
        super()._hand_over()

    @property
    def has_request(self) -> bool:
        """Return True while a file or a body is transferred."""
        return self.task is not None

    def is_overdue(self, now: float) -> bool:  # noqa: ARG002 - it has timers of its own
        """Return False."""
        return False


def _address(transport: asyncio.BaseTransport) -> str:
    peer = transport.get_extra_info("peername")
    return str(peer[0]) if isinstance(peer, tuple) else ""
