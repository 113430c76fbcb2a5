"""Decides which calls of an environment process run at the same time.

All may, up to a limit. If the process ends while several run, it is unknown which of them ended it. They are suspects
and are repeated first, a quarter of their number at a time. If the process ends again, fewer run, until one call that
ran alone is known to be the cause; it fails, and all others may run again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection

_NARROWING = 4


class Admission:
    """The calls of one process, by id, in the order of their arrival."""

    def __init__(self, limit: int) -> None:
        """Let at most `limit` calls run at the same time."""
        self._limit = self._width = limit
        self._waiting: OrderedDict[int, None] = OrderedDict()
        """Suspects come first."""
        self._running: set[int] = set()
        self._suspects: set[int] = set()

    def enter(self, call: int) -> None:
        """Add a call."""
        self._waiting[call] = None

    def admit(self) -> list[int]:
        """Return the calls that start now."""
        admitted = []
        while self._waiting and len(self._running) < self._width:
            call, _ = self._waiting.popitem(last=False)
            self._running.add(call)
            admitted.append(call)
        return admitted

    def leave(self, call: int) -> None:
        """Remove a call that is over, whether it started or not."""
        self._running.discard(call)
        self._waiting.pop(call, None)
        self._clear({call})

    def process_ended(self, begun: Collection[int], *, blames: bool = True) -> int | None:
        """Let all running calls wait to be repeated; return the one that ended the process, if it is known.

        Args:
            begun: running calls whose code had begun.
            blames: whether one of them may be the cause.

        """
        culprit = next(iter(begun)) if blames and len(begun) == 1 else None
        if culprit is not None:
            self._clear(self._suspects | {culprit})
        elif blames and begun:
            self._suspects.update(begun)
            self._width = max(1, len(begun) // _NARROWING)
        repeated = [*sorted(self._running), *self._waiting]
        self._running.clear()
        self._waiting = OrderedDict.fromkeys(sorted(repeated, key=lambda call: call not in self._suspects))
        return culprit

    def _clear(self, calls: set[int]) -> None:
        self._suspects -= calls
        if not self._suspects:
            self._width = self._limit
