"""The format of messages to ranks, trainer machines and processes of user code: length-prefixed msgpack maps.

Nothing is pickled.
"""

from __future__ import annotations

import asyncio
from typing import Any

import msgpack

LENGTH_BYTES = 8
"""Size of the head: the length of the body, big-endian."""


def pack(body: dict[str, Any]) -> bytes:
    """Return a message as it is sent."""
    packed: bytes = msgpack.packb(body)
    return len(packed).to_bytes(LENGTH_BYTES, "big") + packed


def length_of(head: bytes | bytearray) -> int:
    """Return the length of the body that follows a head."""
    return int.from_bytes(head, "big")


def send(writer: asyncio.StreamWriter, data: bytes) -> None:
    """Write to a connection or a pipe.

    Raises:
        ConnectionResetError: the other side has closed it; uvloop itself raises a `RuntimeError` then.

    """
    if writer.is_closing():
        raise ConnectionResetError("the other side has closed the connection")
    writer.write(data)
