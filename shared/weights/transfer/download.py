"""A resumable download of one blob, into a buffer that later downloads use again."""

from __future__ import annotations

from typing import Protocol

from rlboost.shared.errors import Corrupt
from rlboost.shared.weights.manifest import CHUNK_BYTES, ChunkRef

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
        """Start with none."""
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
        """Start with no bytes."""
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
