"""Ports for servers that need to know theirs before they start."""

from __future__ import annotations

import socket
import weakref
from collections.abc import Iterator
from contextlib import contextmanager


def reserve_port(owner: object) -> int:
    """Return a port that the system gives to no one else for as long as `owner` exists.

    A server with SO_REUSEADDR can listen on it, again and again; while none does, connections are refused.
    """
    reservation = _reservation()
    weakref.finalize(owner, reservation.close)
    return _port_of(reservation)


@contextmanager
def reserved_port() -> Iterator[int]:
    """A port that refuses connections, unless a server of the caller listens on it; see `reserve_port`."""
    with _reservation() as reservation:
        yield _port_of(reservation)


def _reservation() -> socket.socket:
    reservation = socket.socket()
    reservation.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reservation.bind(("127.0.0.1", 0))
    return reservation


def _port_of(bound: socket.socket) -> int:
    port: int = bound.getsockname()[1]
    return port
