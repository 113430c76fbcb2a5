"""The bus: the few operations on streams, keys and leases that the services use, as a protocol.

`shared.redis_bus.RedisBus` is the real one, `shared.fakes.MemoryBus` the fake; `tests/contract/test_bus_contract.py`
holds both to the same suite. A write whose reply was lost may or may not have taken place: every caller is idempotent
on ids of its own, and nothing below retries silently.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from shared.messages import Message

START = "0-0"
"""Position before the first entry of any stream."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One message in a stream. Positions order entries: compare them with `position`."""

    stream: str
    id: str
    message: Message


def after(entry_id: str) -> str:
    """Return the smallest id behind `entry_id`."""
    ms, seq = position(entry_id)
    return f"{ms}-{seq + 1}"


def position(entry_id: str) -> tuple[int, int]:
    """Return an entry id as numbers (milliseconds, sequence), which compare in stream order."""
    ms, _, seq = entry_id.partition("-")
    return int(ms), int(seq or 0)


# Operations of a transaction. All of one call happen, or none.


@dataclass(frozen=True, slots=True)
class Append:
    """Add a message to a stream; with `max_len`, drop about all but the newest so many."""

    stream: str
    message: Message
    max_len: int | None = None


@dataclass(frozen=True, slots=True)
class Ack:
    """Mark entries of a consumer group as done; they stay in the stream until it is trimmed."""

    stream: str
    group: str
    ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Trim:
    """Drop every entry of a stream before the id `first_kept`."""

    stream: str
    first_kept: str


@dataclass(frozen=True, slots=True)
class HashSet:
    """Set fields of a hash."""

    key: str
    fields: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class HashDelete:
    """Remove fields of a hash."""

    key: str
    fields: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Expire:
    """Let a key vanish after so many seconds."""

    key: str
    ttl_s: float


@dataclass(frozen=True, slots=True)
class Delete:
    """Remove a key."""

    key: str


@dataclass(frozen=True, slots=True)
class Renew:
    """Hold a lease for `ttl_s` more seconds, by the broker's clock."""

    lease: str
    value: str
    ttl_s: float


Op = Append | Ack | Trim | HashSet | HashDelete | Expire | Delete | Renew


@dataclass(frozen=True, slots=True)
class Fence:
    """Stands while the counter `key` is at `epoch`: whoever takes over raises the counter, see `Bus.take`."""

    key: str
    epoch: int


class Bus(Protocol):
    """Streams, small state and leases.

    Every method raises `BusUnavailable` when the broker does not answer in time.
    """

    async def transact(self, ops: Sequence[Op], fence: Fence | None = None) -> None:
        """Carry out all operations atomically, in order. An empty sequence does nothing.

        Raises:
            Fenced: the fence does not stand, as seen in the transaction itself; no operation took place.

        """

    async def append(self, stream: str, message: Message, max_len: int | None = None) -> str:
        """Add one message and return its entry id."""

    async def read(self, cursors: Mapping[str, str], *, count: int = 512, block_s: float = 0.0) -> list[Entry]:
        """Return up to `count` entries a stream after each cursor, waiting up to `block_s` for the first.

        An entry that does not decode is moved to the dead letters and left out.
        """

    async def consume(
        self, stream: str, group: str, consumer: str, *, count: int = 64, block_s: float = 0.0
    ) -> list[Entry]:
        """Return new entries of a consumer group, creating the group at the stream's start where it is missing."""

    async def claim(
        self, stream: str, group: str, consumer: str, *, min_idle_s: float, count: int = 64
    ) -> list[tuple[Entry, int]]:
        """Take over entries that some consumer has held unacknowledged for `min_idle_s`; with their delivery counts."""

    async def bury(self, stream: str, group: str, entry: Entry, reason: str) -> None:
        """Move an entry of a consumer group to the dead letters and acknowledge it, atomically."""

    async def trim(self, stream: str, first_kept: str) -> None:
        """Drop every entry before the id `first_kept`."""

    async def length(self, stream: str) -> int:
        """Return the number of entries."""

    async def first_id(self, stream: str) -> str | None:
        """Return the id of the oldest entry, None when the stream is empty."""

    async def last_id(self, stream: str) -> str:
        """Return the id of the newest entry ever added (`START` for none), even when it was trimmed since."""

    async def increment(self, key: str) -> int:
        """Add 1 to a counter and return it."""

    async def hash_get(self, key: str, field: str) -> str | None:
        """Return one field of a hash."""

    async def hash_all(self, key: str) -> dict[str, str]:
        """Return all fields of a hash."""

    async def renew(self, lease: str, value: str, ttl_s: float) -> None:
        """Hold a lease for `ttl_s` more seconds."""

    async def acquire(self, leases: Sequence[str], value: str, ttl_s: float) -> list[bool]:
        """Take each lease that nobody holds, for `ttl_s` seconds; tell of each whether it now has this value."""

    async def holders(self, leases: Sequence[str]) -> list[str | None]:
        """Return each lease's value, None for one that has run out."""

    async def take(self, lease: str, value: str, ttl_s: float, *, epoch: str, instead_of: str | None) -> int | None:
        """Take a lease and raise its epoch, atomically; from then on no fence of an earlier epoch stands.

        Args:
            lease: what to take.
            value: who takes it.
            ttl_s: how long it lasts unless it is renewed, by the broker's clock.
            epoch: a counter that never runs out.
            instead_of: a value of the lease that may be replaced; None when nobody may hold it.

        Returns:
            The new epoch; None when somebody else holds the lease, and nothing changed.

        """

    async def close(self) -> None:
        """Release connections."""
