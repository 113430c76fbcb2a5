"""Bounds the memory of one read from streams whose entries take from 100 bytes to 64 MiB."""

from __future__ import annotations

from collections.abc import Iterable

from rlboost.shared.streams.entries import Entry, RawEntry

MAX_BYTES = 64 << 20
"""Target size of one read."""
_FIRST_BYTES = 1 << 20
"""Assumed size of the entries of the first read."""
_DECAY = 0.75
"""Factor by which each read of smaller entries lowers the assumed size."""


class ReadSize:
    """How many entries to read at once, so that a read of entries like the recent ones takes about `MAX_BYTES`."""

    def __init__(self, max_entries: int) -> None:
        """Read at most `max_entries` at once, however small they are."""
        self._max_entries = max_entries
        self._entry_bytes = float(_FIRST_BYTES)

    @property
    def count(self) -> int:
        """Return the number of entries for the next read, at least 1."""
        return max(1, min(self._max_entries, int(MAX_BYTES / self._entry_bytes)))

    def update(self, *reads: Iterable[Entry | RawEntry]) -> None:
        """Take the sizes of the entries that have been read."""
        largest = max((entry.n_bytes for entries in reads for entry in entries), default=0)
        if largest:
            self._entry_bytes = max(_DECAY * self._entry_bytes, largest)
