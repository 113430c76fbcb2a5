"""The entries of streams, and their order."""

from __future__ import annotations

from dataclasses import dataclass, field

from rlboost.shared.messages import Message

START = "0-0"
"""The position before the first entry of any stream."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One message in a stream. Positions order entries: compare them with `position`."""

    stream: str
    id: str
    message: Message
    n_bytes: int = field(default=0, compare=False)
    """Size of the encoded message."""


@dataclass(frozen=True, slots=True)
class RawEntry:
    """One entry of a stream whose message is not decoded."""

    stream: str
    id: str
    body: bytes

    @property
    def n_bytes(self) -> int:
        """Return the size of the encoded message."""
        return len(self.body)


def after(entry_id: str) -> str:
    """Return the smallest id after `entry_id`."""
    ms, seq = position(entry_id)
    return f"{ms}-{seq + 1}"


def position(entry_id: str) -> tuple[int, int]:
    """Return an entry id as (milliseconds, sequence), which compares in stream order."""
    ms, _, seq = entry_id.partition("-")
    return int(ms), int(seq or 0)
