"""How many samples a KV cache of so many tokens holds at once, and which shape it has.

The cache is a rectangle of rows by columns: see `shared.kv_rows`, by which the manager counts as well.
"""

from __future__ import annotations

from dataclasses import dataclass

from shared.kv_rows import QUANTUM, round_up, rows_in


@dataclass(frozen=True, slots=True)
class Room:
    """What bounds a KV cache."""

    slots: int
    """Rows at most."""
    max_len: int
    """Tokens of a row at most."""
    tokens: int
    """Tokens of all rows at most."""

    def fits(self, rows: int, longest: int) -> bool:
        """Tell whether so many rows may run at once of which the longest ends at this length."""
        return rows <= rows_in(self.tokens, longest)

    def shape(self, rows: int, columns: int) -> tuple[int, int]:
        """Return how many rows and columns to have for so many rows that have come so far, which `fits`.

        Up to twice the columns, so that the cache seldom grows; then as many rows as there is room for.
        """
        needed = round_up(columns)
        spare = min(2 * needed, round_up(self.max_len), self.tokens // rows // QUANTUM * QUANTUM)
        wide = max(needed, spare)
        return min(self.slots, self.tokens // wide), wide
