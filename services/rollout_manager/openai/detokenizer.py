"""Streaming detokenization of one completion: whole characters only, and no text from a stop string on."""

from __future__ import annotations

from collections.abc import Callable, Sequence

REPLACEMENT_CHARACTER = "\ufffd"
"""A decoder's output for bytes that are no character, or an incomplete one."""
MAX_PENDING_TOKENS = 8
"""Tokens held back until a character is complete. It has four bytes at most, so more tokens do not complete it."""
CONTEXT_TOKENS = 4
"""Tokens at the end of the prompt that are decoded with the first ones: some decoders strip a leading space."""


class Detokenizer:
    """The text of one completion."""

    def __init__(self, decode: Callable[[Sequence[int]], str], prompt: Sequence[int], stops: Sequence[str]) -> None:
        """Start after the prompt.

        Args:
            decode: token ids to text without special tokens.
            prompt: the prompt's token ids.
            stops: the text ends before the first of these strings.

        """
        self._decode = decode
        self._window = list(prompt[-CONTEXT_TOKENS:])
        self._n_decoded = len(self._window)
        """How many tokens of the window have been returned as text; the others wait for a complete character."""
        self._stops = stops
        self._held = ""
        """The end of the text so far, which may be the beginning of a stop string."""
        self.stopped = False

    def add(self, token: int) -> str:
        """Add the next token and return the text that is now certain."""
        self._window.append(token)
        text = self._decode(self._window)
        if text.endswith(REPLACEMENT_CHARACTER) and len(self._window) - self._n_decoded < MAX_PENDING_TOKENS:
            return ""
        return self._until_stop(self._advance(text))

    def flush(self) -> str:
        """Return the text that is held back, after the last token."""
        if self.stopped:
            return ""
        text = self._until_stop(self._advance(self._decode(self._window)))
        held, self._held = self._held, ""
        return text + held

    def _advance(self, text: str) -> str:
        new = text[len(self._decode(self._window[: self._n_decoded])) :]
        if new:
            self._window = self._window[self._n_decoded :]
        self._n_decoded = len(self._window)
        return new

    def _until_stop(self, new: str) -> str:
        text = self._held + new
        found = [at for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)]
        n_held = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - n_held :]
        return text[: len(text) - n_held]


def _overlap(text: str, stop: str) -> int:
    """Return how many characters at the end of the text could begin the stop string."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)
