"""Capacity of a dense KV cache of shape [slots, columns]: every slot is as long as the longest running sample.

A slot is counted with the length at which its sample ends at the latest, so an admitted sample can run to its end.
"""

from __future__ import annotations

from dataclasses import dataclass

QUANTUM = 16
"""Columns come in multiples of this: kernels want aligned masks, and neighboring lengths come out equal."""


def round_up(length: int) -> int:
    """Return the number of columns for this many tokens."""
    return -(-length // QUANTUM) * QUANTUM


@dataclass(frozen=True, slots=True)
class KvCapacity:
    """The limits of a KV cache."""

    slots: int
    """Largest number of slots."""
    max_len: int
    """Largest number of tokens in one slot."""
    tokens: int
    """Largest number of tokens in all slots together."""

    def fits(self, slots: int, longest: int) -> bool:
        """Return True if this many samples can run at once when the longest of them ends at this length."""
        return slots <= self.tokens // max(QUANTUM, round_up(longest))

    @property
    def max_request_tokens(self) -> int:
        """Return the length above which no sample fits, 0 if every length up to `max_len` fits."""
        return 0 if self.fits(1, self.max_len) else self.tokens // QUANTUM * QUANTUM

    def shape(self, slots: int, columns: int) -> tuple[int, int]:
        """Return the (slots, columns) to allocate for this many slots and columns in use, which `fits`.

        Allocates up to twice the columns, so that the cache seldom grows, then as many slots as the memory holds.
        """
        needed = round_up(columns)
        spare = min(2 * needed, round_up(self.max_len), self.tokens // slots // QUANTUM * QUANTUM)
        wide = max(needed, spare)
        return min(self.slots, self.tokens // wide), wide
