"""Messages between the trainer and its ranks: msgpack maps, each behind its length. Nothing is pickled."""

from __future__ import annotations

import socket
from typing import Any

import msgpack

from shared import errors
from shared.errors import RLBoostError

_LENGTH_BYTES = 8


def send(channel: socket.socket, body: dict[str, Any]) -> None:
    """Send one message.

    Raises:
        OSError: the other side has gone.

    """
    data = msgpack.packb(body)
    channel.sendall(len(data).to_bytes(_LENGTH_BYTES, "big"))
    channel.sendall(data)


def receive(channel: socket.socket) -> dict[str, Any]:
    """Wait for one message.

    Raises:
        EOFError: the other side has closed.
        OSError: it has gone.

    """
    length = int.from_bytes(_exactly(channel, _LENGTH_BYTES), "big")
    body: dict[str, Any] = msgpack.unpackb(_exactly(channel, length))
    return body


def _exactly(channel: socket.socket, n_bytes: int) -> bytearray:
    data = bytearray(n_bytes)
    rest = memoryview(data)
    while rest:
        n = channel.recv_into(rest)
        if not n:
            raise EOFError
        rest = rest[n:]
    return data


def failure(error: BaseException, trace: str) -> dict[str, str]:
    """Return an error as a message; of one that is not the project's the traceback goes along."""
    known = isinstance(error, RLBoostError)
    return {"error": type(error).__name__ if known else "", "text": str(error) if known else trace}


def as_error(rank: int, body: dict[str, Any]) -> Exception:
    """Return the error that a rank's message tells of, of the same class where it is one of the project's."""
    kind = getattr(errors, body["error"], None) if body["error"] else None
    if isinstance(kind, type) and issubclass(kind, RLBoostError):
        return kind(body["text"])
    return RuntimeError(f"rank {rank} of the trainer failed:\n{body['text']}")
