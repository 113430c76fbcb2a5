"""One blob's bytes out of one place, by HTTP."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager

from shared.errors import Corrupt
from shared.weights.manifest import ChunkRef

Opened = AbstractAsyncContextManager[tuple[int, AsyncIterator[bytes]]]
"""The position of the first byte that comes, and the blocks."""


class Download:
    """The bytes of a blob as far as they have come; not verified."""

    def __init__(self, blob: ChunkRef) -> None:
        """Have nothing yet."""
        self.blob = blob
        self.data = bytearray(blob.n_bytes)
        self.n_bytes = 0
        """How many of them have come."""
        self.n_received = 0
        """The same, those that came twice counted twice."""

    async def resume(self, opened: Callable[[str, int], Opened]) -> None:
        """Go on from the last byte that came: call it again when a transfer has broken.

        Raises:
            Corrupt: more comes than the blob has.

        """
        if self.n_bytes == len(self.data):
            return
        async with opened(self.blob.digest, self.n_bytes) as (first, blocks):
            self.n_bytes = first
            async for block in blocks:
                end = self.n_bytes + len(block)
                if end > len(self.data):
                    raise Corrupt(f"blob {self.blob.digest} is longer than its {len(self.data)} bytes")
                self.data[self.n_bytes : end] = block
                self.n_bytes = end
                self.n_received += len(block)
