"""Tracks whether the engine is paused, for which reasons, and what a pause has left in device memory.

The caller pauses and resumes the engine, and reports here what it has done.
"""

from __future__ import annotations

from typing import Literal

PauseReason = Literal["suspended", "loading", "unsent", "shutdown"]


class EnginePause:
    """The reasons to pause one engine, and the state of its memory while it is paused."""

    def __init__(self) -> None:
        self.reasons: set[PauseReason] = set()
        self.is_paused = False
        """True once the engine has confirmed that it has stopped decoding."""
        self.keeps_kv = False
        """While paused: True if the engine still has its KV cache."""
        self._took_memory = False
        """While paused: True if the engine has since allocated device memory, for a load or for the parity check."""

    def must_suspend(self, *, keep_kv: bool) -> bool:
        """Return True if the engine decodes or, without `keep_kv`, still has a KV cache or memory to free."""
        return not self.is_paused or (not keep_kv and (self.keeps_kv or self._took_memory))

    def on_suspended(self, *, keep_kv: bool) -> None:
        """Record that the engine was suspended, which frees its device memory, except for the KV cache if `keep_kv`."""
        self.is_paused, self.keeps_kv, self._took_memory = True, keep_kv, False

    def on_memory_taken(self) -> None:
        """Record that the paused engine allocates device memory."""
        self._took_memory = True

    def is_only(self, reason: PauseReason) -> bool:
        """Return True if this is the one reason to pause."""
        return self.reasons == {reason}

    def on_decoding(self) -> None:
        """Record that the engine is resumed, or that a new engine replaces it."""
        self.is_paused = False
