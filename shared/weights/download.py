"""A resumable download of one blob over HTTP."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager

from rlboost.shared.errors import Corrupt
from rlboost.shared.weights.manifest import ChunkRef

Opened = AbstractAsyncContextManager[tuple[int, AsyncIterator[bytes]]]
"""Yields the position of the first byte, and the blocks from there on."""


class Download:
    """The bytes of a blob received so far; not verified."""

    def __init__(self, blob: ChunkRef) -> None:
        """Start with no bytes."""
        self.blob = blob
        self.data = bytearray(blob.n_bytes)
        self.n_bytes = 0
        """Length of the received prefix."""
        self.n_received = 0
        """Bytes received in total, including repeated ones."""

    async def resume(self, opened: Callable[[str, int], Opened]) -> None:
        """Continue after the last received byte; call it again after a broken transfer.

        Raises:
            Corrupt: more bytes arrive than the blob has.

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
