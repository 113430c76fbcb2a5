"""The message bus as a protocol: the operations on streams, keys and leases that the services use.

`redis.bus.RedisBus` is the real one, `tests.support.memory_bus.MemoryBus` the fake;
`tests/contract/shared/test_bus_contract.py` runs one suite against both. A write whose reply was lost may or may not
have taken effect, and no implementation retries silently, so every caller is idempotent on its own ids.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import structlog
from prometheus_client import Counter

from rlboost.shared.errors import Fatal
from rlboost.shared.messages import DeadLetter, Message
from rlboost.shared.streams import names

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


log = structlog.get_logger(__name__)

# --- Bounds memory and time of one read from streams whose entries take from 100 bytes to 64 MiB ----------------------


MAX_BYTES = 64 << 20
"""Target size of one read."""
_FIRST_BYTES = 1 << 20
"""Assumed size of the entries of the first read."""
_DECAY = 0.75
"""Factor by which each read of smaller entries lowers the assumed size."""
WORK_S = 0.02
"""Target time of what is done with the entries of one read."""
_MANY = 64
"""Entries of a read that show what one costs; also the least that are read for the sake of time."""


class ReadSize:
    """How many entries to read at once, so that entries like the recent ones take about `MAX_BYTES` and `WORK_S`."""

    def __init__(self, max_entries: int, first_entry_s: float = 0.0) -> None:
        """Read at most `max_entries` at once, however small they are.

        Args:
            max_entries: the limit.
            first_entry_s: assumed time of the work with one entry, until it is known; 0 to read without regard to time.

        """
        self._max_entries = max_entries
        self._entry_bytes = float(_FIRST_BYTES)
        self._entry_s = first_entry_s

    @property
    def count(self) -> int:
        """Return the number of entries for the next read, at least 1."""
        in_time = max(_MANY, int(WORK_S / self._entry_s)) if self._entry_s else self._max_entries
        return max(1, min(self._max_entries, in_time, int(MAX_BYTES / self._entry_bytes)))

    def update(self, *reads: Iterable[Entry | RawEntry]) -> None:
        """Take the sizes of the entries that have been read."""
        largest = max((entry.n_bytes for entries in reads for entry in entries), default=0)
        if largest:
            self._entry_bytes = max(_DECAY * self._entry_bytes, largest)

    def took(self, n_entries: int, seconds: float) -> None:
        """Take how long the work with the entries of one read took."""
        if n_entries >= _MANY:
            self._entry_s = max(_DECAY * self._entry_s, seconds / n_entries)


# --- The bus ----------------------------------------------------------------------------------------------------------


LONGEST_LEASE_S = 120.0
"""The longest time for which a process takes a lease.

A lease with more time left was taken before the broker's clock was set back: `cap_and_read_leases` and `acquire_fenced`
shorten it. Otherwise a dead holder would count as alive for as long as the clock was set back.
"""

# Operations of a transaction: either all of one call take effect, or none does.


class WrongType(Fatal):
    """A key has another type than the command needs; the other commands of a transaction took effect."""


@dataclass(frozen=True, slots=True)
class Append:
    """Add a message to a stream; with `max_len`, trim the stream to about that many of its newest entries."""

    stream: str
    message: Message
    max_len: int | None = None


@dataclass(frozen=True, slots=True)
class AppendRaw:
    """Like `Append`, for an encoded message."""

    stream: str
    body: bytes
    max_len: int | None = None


@dataclass(frozen=True, slots=True)
class Remove:
    """Delete these entries of a stream."""

    stream: str
    ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Ack:
    """Mark entries of a consumer group as done; they stay in the stream until it is trimmed."""

    stream: str
    group: str
    ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Trim:
    """Delete every entry of a stream before the id `min_id`."""

    stream: str
    min_id: str


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
    """Delete a key after `ttl_s` seconds."""

    key: str
    ttl_s: float


@dataclass(frozen=True, slots=True)
class Delete:
    """Remove a key."""

    key: str


@dataclass(frozen=True, slots=True)
class Renew:
    """Set a lease to `value` for `ttl_s` more seconds, by the broker's clock, regardless of its holder."""

    lease: str
    value: str
    ttl_s: float


Op = Append | AppendRaw | Remove | Ack | Trim | HashSet | HashDelete | Expire | Delete | Renew


@dataclass(frozen=True, slots=True)
class Fence:
    """Valid while the counter `key` is at `epoch`; `Bus.acquire_fenced` increments the counter."""

    key: str
    epoch: int


class Bus(Protocol):
    """Streams, small state and leases.

    Every method raises `BusUnavailable` when the broker does not answer in time.
    """

    async def transact(self, ops: Sequence[Op], fence: Fence | None = None) -> None:
        """Apply all operations atomically, in order. An empty sequence does nothing.

        Raises:
            Fenced: the fence is no longer valid, as checked within the transaction; no operation took effect.

        """

    async def append(self, stream: str, message: Message, max_len: int | None = None) -> str:
        """Add one message and return its entry id."""

    async def read(self, cursors: Mapping[str, str], *, count: int = 512, block_s: float = 0.0) -> list[Entry]:
        """Return up to `count` entries per stream after each cursor, waiting up to `block_s` for the first.

        An entry that does not decode is omitted, and copied to the dead-letter stream once per reader. It stays in its
        stream, where a newer release can read it.
        """

    async def read_with_raw(
        self, cursors: Mapping[str, str], raw_streams: Collection[str], *, count: int = 512, block_s: float = 0.0
    ) -> tuple[list[Entry], list[RawEntry]]:
        """Read like `read`, together with the entries of `raw_streams` from their start on, which are not decoded."""

    async def consume(
        self, stream: str, group: str, consumer: str, *, count: int = 64, block_s: float = 0.0
    ) -> list[Entry]:
        """Return new entries of a consumer group; a missing group is created at the start of the stream."""

    async def claim(
        self, stream: str, group: str, consumer: str, *, min_idle_s: float, count: int = 64
    ) -> list[tuple[Entry, int]]:
        """Claim entries that are unacknowledged for at least `min_idle_s`; return each with its delivery count."""

    async def dead_letter(self, stream: str, group: str, entry: Entry, reason: str) -> None:
        """Move an entry of a consumer group to the dead-letter stream and acknowledge it, atomically."""

    async def length(self, stream: str) -> int:
        """Return the number of entries."""

    async def increment(self, key: str) -> int:
        """Add 1 to a counter and return the new value."""

    async def counter(self, key: str) -> int:
        """Return the value of a counter, 0 if there is none."""

    async def hash_get(self, key: str, field: str) -> str | None:
        """Return one field of a hash."""

    async def hash_some(self, key: str, fields: Sequence[str]) -> list[str | None]:
        """Return these fields of a hash, in their order."""

    async def hash_all(self, key: str) -> dict[str, str]:
        """Return all fields of a hash."""

    async def acquire(self, lease: str, value: str, ttl_s: float) -> bool:
        """Take a lease for `ttl_s` seconds if it is free; return True if it has this value afterwards."""

    async def lease_values(self, leases: Sequence[str]) -> list[str | None]:
        """Return the value of each lease, None for one that is free or has expired."""

    async def cap_and_read_leases(self, leases: Sequence[str]) -> list[str | None]:
        """Shorten leases beyond `LONGEST_LEASE_S`, and return the leases' values as `lease_values` does."""

    async def acquire_fenced(
        self, lease: str, value: str, ttl_s: float, *, epoch: str, replacing: str | None
    ) -> int | None:
        """Take a lease and increment its epoch, atomically; every fence of an earlier epoch becomes invalid.

        Args:
            lease: the lease to take.
            value: identifies the new holder.
            ttl_s: the lease's lifetime unless it is renewed, by the broker's clock.
            epoch: the key of a counter that does not expire.
            replacing: a value of the lease that may be overwritten; None to take only a free lease.

        Returns:
            The new epoch; None if the lease has another value, in which case nothing changed.

        """

    async def close(self) -> None:
        """Release connections."""


# --- Dead letters: entries that a service cannot use, with the reason. Each is logged at error level and counted ------


MAX_DEAD_LETTERS = 10_000
"""The newest that are retained."""
MAX_LETTER_BYTES = 1 << 20
"""What a dead letter retains of an entry."""
_COUNT = Counter("rlboost_dead_letters", "Entries of streams that this process could not use")


def report_dead_letter(stream: str, entry_id: str, reason: str) -> None:
    """Log and count one entry."""
    log.error("dead_lettered", stream=stream, entry=entry_id, reason=reason)
    _COUNT.inc()


def dead_letter_op(
    stream: str, entry_id: str, consumer: str, reason: str, body: bytes, at: float, to: str = names.DEAD_LETTERS
) -> Append:
    """Return the operation that stores an entry among the dead letters.

    Args:
        stream: where the entry was read.
        entry_id: the entry's id there.
        consumer: the service that cannot use it.
        reason: why it cannot.
        body: the entry's bytes; the first `MAX_LETTER_BYTES` are stored.
        at: the time, in Unix seconds.
        to: the stream of dead letters, or one from which they are relayed to it.

    """
    body = body[:MAX_LETTER_BYTES]
    letter = DeadLetter(stream=stream, entry_id=entry_id, consumer=consumer, reason=reason, body=body, at=at)
    return Append(to, letter, MAX_DEAD_LETTERS if to == names.DEAD_LETTERS else None)
