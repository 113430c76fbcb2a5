"""Whether an engine that has something to do gets on with it.

A hanging engine cannot say so, and its process beats on: only the tokens that do not come show it. How long they may
take depends on what the engine has to do before the next one, never on the clock of the wall: time in which the whole
process stood still is nobody's fault.
"""

from __future__ import annotations

FIRST_STEPS = 5.0
"""The first token after a standstill may take so many times the limit: kernels are compiled, caches made anew."""
READ_IN_PER_S = 100.0
"""Tokens a second that any engine reads in, by caution."""


class Progress:
    """Looked at regularly, it adds up how long no token has come."""

    def __init__(self) -> None:
        self.silent_s = 0.0
        """For how long the engine has had something to do and has made nothing."""
        self._made = 0
        self._first = True
        self._longest = 0

    def given(self, tokens: int) -> None:
        """Note a request of so many tokens, which the engine must read in before it makes the first."""
        self._longest = max(self._longest, tokens)

    def went_on(self) -> None:
        """Note that the engine begins, or goes on after it stood still."""
        self.silent_s, self._first = 0.0, True

    def look(self, *, busy: bool, made: int, elapsed_s: float) -> None:
        """Take the engine's state now.

        Args:
            busy: whether it has requests, and does not stand still.
            made: tokens that it has made so far.
            elapsed_s: since the last look.

        """
        if made != self._made:
            self._made, self.silent_s, self._first, self._longest = made, 0.0, False, 0
        elif busy:
            self.silent_s += elapsed_s
        else:
            self.silent_s = 0.0

    def hangs(self, limit_s: float) -> bool:
        """Tell whether this is too long where a token may take `limit_s`."""
        return self.silent_s > limit_s * (FIRST_STEPS if self._first else 1.0) + self._longest / READ_IN_PER_S
