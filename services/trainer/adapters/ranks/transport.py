"""Sends and receives the messages between the trainer and its ranks, errors among them; blocks."""

from __future__ import annotations

import socket
from typing import Any

import msgpack

from rlboost.shared import errors
from rlboost.shared.errors import RLBoostError
from rlboost.shared.wire.framing import LENGTH_BYTES, length_of, pack


def send(channel: socket.socket, body: dict[str, Any]) -> None:
    """Send one message.

    Raises:
        OSError: the peer's process has ended.

    """
    channel.sendall(pack(body))


def receive(channel: socket.socket) -> dict[str, Any]:
    """Wait for one message.

    Raises:
        EOFError: the peer has closed the connection.
        OSError: the peer's process has ended.

    """
    length = length_of(_read_exactly(channel, LENGTH_BYTES))
    body: dict[str, Any] = msgpack.unpackb(_read_exactly(channel, length))
    return body


def _read_exactly(channel: socket.socket, n_bytes: int) -> bytearray:
    data = bytearray(n_bytes)
    unread = memoryview(data)
    while unread:
        n = channel.recv_into(unread)
        if not n:
            raise EOFError
        unread = unread[n:]
    return data


def encode_error(error: BaseException, trace: str) -> dict[str, str]:
    """Return an error as a message: the project's own by class and text, any other by its traceback."""
    known = isinstance(error, RLBoostError)
    return {"error": type(error).__name__ if known else "", "text": str(error) if known else trace}


def decode_error(rank: int, body: dict[str, Any]) -> Exception:
    """Return a rank's error, as the same class if it is one of the project's, else as `RuntimeError`."""
    kind = getattr(errors, body["error"], None) if body["error"] else None
    if isinstance(kind, type) and issubclass(kind, RLBoostError):
        return kind(body["text"])
    return RuntimeError(f"rank {rank} of the trainer failed:\n{body['text']}")
