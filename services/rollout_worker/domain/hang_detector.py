"""Detects a hanging engine: one that has requests and generates no tokens.

A hanging engine cannot report itself, and the process's heartbeats continue: only the missing tokens show it. The time
allowed for the next token depends on the engine's work. It is counted in `elapsed_s`, not by the wall clock, so that
time in which the whole process was stopped does not count.
"""

from __future__ import annotations

FIRST_TOKEN_FACTOR = 5.0
"""The first token after a start or a pause may take this multiple of the limit: kernels compile and caches fill."""
PREFILL_TOKENS_PER_S = 100.0
"""Lower bound of any engine's prefill speed, in tokens per second."""


class HangDetector:
    """Adds up the time without a new token. Call `update` regularly."""

    def __init__(self) -> None:
        self.silent_s = 0.0
        """Time for which the engine has had requests and generated no token."""
        self._n_generated = 0
        self._first = True
        self._longest_prefill = 0
        """The longest prefill that may be in progress."""
        self._longest_submitted = 0
        """The longest one submitted since the last token: that token may be of a request before it."""

    def on_submit(self, tokens: int) -> None:
        """Record a request whose first token needs a prefill of `tokens` tokens."""
        self._longest_submitted = max(self._longest_submitted, tokens)

    def on_resume(self) -> None:
        """Record that the engine starts, or resumes after a pause."""
        self.silent_s, self._first = 0.0, True

    def update(self, *, busy: bool, n_generated: int, elapsed_s: float) -> None:
        """Record the engine's state.

        Args:
            busy: True if it has requests and is not paused.
            n_generated: total tokens that it has generated.
            elapsed_s: time since the last call.

        """
        if n_generated != self._n_generated:
            self._n_generated, self.silent_s, self._first = n_generated, 0.0, False
            self._longest_prefill, self._longest_submitted = self._longest_submitted, 0
        elif busy:
            self.silent_s += elapsed_s
        else:
            self.silent_s = 0.0

    def hangs(self, limit_s: float) -> bool:
        """Return True if no token has come for longer than allowed, where a decode step may take `limit_s`."""
        prefill_s = max(self._longest_prefill, self._longest_submitted) / PREFILL_TOKENS_PER_S
        return self.silent_s > limit_s * (FIRST_TOKEN_FACTOR if self._first else 1.0) + prefill_s
