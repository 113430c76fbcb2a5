"""From the tokens of one completion to its text, as they come: whole characters, and nothing from a stop string on."""

from __future__ import annotations

from collections.abc import Callable, Sequence

BROKEN = "\ufffd"
"""What a decoder makes of bytes that are no character, or not one yet."""
MAX_HELD = 8
"""Tokens held back for the rest of a character; it has four bytes at most, so more of them is no character at all."""
PROMPT_TOKENS = 4
"""Of the prompt's end, with which the first tokens are decoded: some decoders drop a space at the beginning."""


class Text:
    """The text of one completion."""

    def __init__(self, decode: Callable[[Sequence[int]], str], prompt: Sequence[int], stops: Sequence[str]) -> None:
        """Begin behind the prompt.

        Args:
            decode: token ids to text, special tokens left out.
            prompt: its token ids.
            stops: the text ends before the first of them.

        """
        self._decode = decode
        self._window = list(prompt[-PROMPT_TOKENS:])
        self._read = len(self._window)
        """How many tokens of the window were read; the others wait for the rest of a character."""
        self._stops = stops
        self._held = ""
        """The end of the text so far, which may be the beginning of a stop string."""
        self.stopped = False

    def add(self, token: int) -> str:
        """Take the next token and return the text that is certain by it."""
        self._window.append(token)
        text = self._decode(self._window)
        if text.endswith(BROKEN) and len(self._window) - self._read < MAX_HELD:
            return ""
        return self._scan(self._advance(text))

    def end(self) -> str:
        """Return what was held back, now that nothing follows."""
        if self.stopped:
            return ""
        shown = self._scan(self._advance(self._decode(self._window)))
        held, self._held = self._held, ""
        return shown + held

    def _advance(self, text: str) -> str:
        new = text[len(self._decode(self._window[: self._read])) :]
        if new:
            self._window = self._window[self._read :]
        self._read = len(self._window)
        return new

    def _scan(self, new: str) -> str:
        text = self._held + new
        found = [at for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)]
        held = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]


def _overlap(text: str, stop: str) -> int:
    """Return how many characters at the end of the text could begin the stop string."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)
