"""An in-memory bus for unit tests: same contract as Redis, with fault injection."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TypeVar

from rlboost.shared.errors import BusUnavailable, Fenced, Undecodable
from rlboost.shared.messages import DeadLetter, Message
from rlboost.shared.messages.codec import decode, encode
from rlboost.shared.streams.bus import (
    LONGEST_LEASE_S,
    Ack,
    Append,
    AppendRaw,
    Delete,
    Entry,
    Expire,
    Fence,
    HashDelete,
    HashSet,
    Op,
    RawEntry,
    Remove,
    Renew,
    Trim,
    position,
)
from rlboost.shared.streams.names import DEAD_LETTERS

T = TypeVar("T")


@dataclass
class _Pending:
    consumer: str
    since: float
    deliveries: int


@dataclass
class _Stream:
    entries: dict[str, bytes] = field(default_factory=dict)
    last: int = 0
    cursors: dict[str, int] = field(default_factory=dict)
    pending: dict[str, dict[str, _Pending]] = field(default_factory=lambda: defaultdict(dict))

    def add(self, body: bytes) -> str:
        self.last += 1
        entry_id = f"{self.last}-0"
        self.entries[entry_id] = body
        return entry_id


class MemoryBus:
    """`shared.streams.bus.Bus` in one process. Entry ids count from `1-0`."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Start empty; `clock` drives leases, expiries and idle times."""
        self._clock = clock
        self._streams: dict[str, _Stream] = defaultdict(_Stream)
        self._hashes: dict[str, dict[str, str]] = defaultdict(dict)
        self._counters: dict[str, int] = defaultdict(int)
        self._leases: dict[str, tuple[str, float]] = {}
        self._expires_at: dict[str, float] = {}
        """Stream, hash or counter -> when it expires, by the bus's clock."""
        self._undecodable: set[tuple[str, str]] = set()
        self._changed = asyncio.Condition()
        self.down = False
        """While true, every call raises `BusUnavailable`."""
        self.lose_next_reply = False
        """The next transaction or lease acquisition takes effect, and its caller gets `BusUnavailable`."""
        self.before_next_transaction: Callable[[], None] | None = None
        """Called once, after a transaction was sent and before it takes effect."""

    def lose_data(self) -> None:
        """Be as empty as a broker that was restarted without its files."""
        for kept in (self._streams, self._hashes, self._counters, self._leases, self._expires_at):
            kept.clear()

    def _check(self) -> None:
        if self.down:
            raise BusUnavailable("the fake broker is down")
        now = self._clock()
        for key in [key for key, at in self._expires_at.items() if at <= now]:
            self._delete(key)

    def _delete(self, key: str) -> None:
        self._streams.pop(key, None)
        self._hashes.pop(key, None)
        self._leases.pop(key, None)
        self._counters.pop(key, None)
        self._expires_at.pop(key, None)

    def _expire(self, key: str, at: float) -> None:
        if key in self._leases:
            self._leases[key] = (self._leases[key][0], at)
        elif self._streams[key].last or self._hashes[key] or self._counters[key]:
            self._expires_at[key] = at

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def transact(self, ops: Sequence[Op], fence: Fence | None = None) -> None:
        if hook := self.before_next_transaction:
            self.before_next_transaction = None
            hook()
        self._check()
        if ops and fence is not None and self._counters[fence.key] != fence.epoch:
            raise Fenced(f"{fence.key} is at {self._counters[fence.key]}, not at {fence.epoch}")
        for op in ops:
            self._apply(op)
        await self._notify()
        self._reply()

    def _reply(self) -> None:
        if self.lose_next_reply:
            self.lose_next_reply = False
            raise BusUnavailable("the reply was lost")

    def _apply(self, op: Op) -> None:  # noqa: C901, PLR0912 - one flat table
        match op:
            case Append(stream, message, max_len):
                self._apply(AppendRaw(stream, encode(message), max_len))
            case AppendRaw(stream, body, max_len):
                entries = self._streams[stream].entries
                self._streams[stream].add(body)
                while max_len is not None and len(entries) > max_len:
                    entries.pop(next(iter(entries)))
            case Remove(stream, ids):
                for entry_id in ids:
                    self._streams[stream].entries.pop(entry_id, None)
            case Ack(stream, group, ids):
                for entry_id in ids:
                    self._streams[stream].pending[group].pop(entry_id, None)
            case Trim(stream, min_id):
                entries = self._streams[stream].entries
                for entry_id in [i for i in entries if position(i) < position(min_id)]:
                    del entries[entry_id]
            case HashSet(key, fields):
                self._hashes[key].update(fields)
            case HashDelete(key, names):
                for name in names:
                    self._hashes[key].pop(name, None)
            case Expire(key, ttl_s):
                self._expire(key, self._clock() + ttl_s)
            case Delete(key):
                self._delete(key)
            case Renew(lease, value, ttl_s):
                self._leases[lease] = (value, self._clock() + ttl_s)

    async def append(self, stream: str, message: Message, max_len: int | None = None) -> str:
        await self.transact([Append(stream, message, max_len)])
        return f"{self._streams[stream].last}-0"

    async def append_raw(self, stream: str, body: bytes) -> None:
        """Add bytes that may not decode to a message."""
        self._streams[stream].add(body)
        await self._notify()

    async def _wait(self, find: Callable[[], list[T]], block_s: float) -> list[T]:
        self._check()
        found = find()
        if found or block_s <= 0:
            return found
        try:
            async with asyncio.timeout(block_s), self._changed:
                while not found:
                    await self._changed.wait()
                    self._check()
                    found = find()
        except TimeoutError:
            return []
        return found

    def _decode(self, stream: str, entry_id: str, group: str | None) -> Entry | None:
        body = self._streams[stream].entries[entry_id]
        try:
            return Entry(stream, entry_id, decode(body), len(body))
        except Undecodable as error:
            if group is not None:
                self._streams[stream].pending[group].pop(entry_id, None)
            if (stream, entry_id) not in self._undecodable:
                self._undecodable.add((stream, entry_id))
                self._streams[DEAD_LETTERS].add(encode(self._letter(stream, entry_id, body, str(error))))
            return None

    @staticmethod
    def _letter(stream: str, entry_id: str, body: bytes, reason: str) -> DeadLetter:
        return DeadLetter(stream=stream, entry_id=entry_id, consumer="memory", reason=reason, body=body, at=0.0)

    async def read(self, cursors: Mapping[str, str], *, count: int = 512, block_s: float = 0.0) -> list[Entry]:
        entries, _ = await self.read_with_raw(cursors, (), count=count, block_s=block_s)
        return entries

    async def read_with_raw(
        self, cursors: Mapping[str, str], raw_streams: Collection[str], *, count: int = 512, block_s: float = 0.0
    ) -> tuple[list[Entry], list[RawEntry]]:
        def find() -> list[Entry | RawEntry]:
            found: list[Entry | RawEntry] = []
            for stream, cursor in cursors.items():
                after = position(cursor)
                ids = [entry_id for entry_id in self._streams[stream].entries if position(entry_id) > after]
                found += islice((entry for i in ids if (entry := self._decode(stream, i, None))), count)
            for stream in raw_streams:
                entries = islice(self._streams[stream].entries.items(), count)
                found += [RawEntry(stream, entry_id, body) for entry_id, body in entries]
            return found

        found = await self._wait(find, block_s)
        return [e for e in found if isinstance(e, Entry)], [e for e in found if isinstance(e, RawEntry)]

    async def consume(
        self, stream: str, group: str, consumer: str, *, count: int = 64, block_s: float = 0.0
    ) -> list[Entry]:
        def find() -> list[Entry]:
            state = self._streams[stream]
            seen = state.cursors.setdefault(group, 0)
            ids = [entry_id for entry_id in state.entries if position(entry_id)[0] > seen][:count]
            for entry_id in ids:
                state.cursors[group] = position(entry_id)[0]
                state.pending[group][entry_id] = _Pending(consumer, self._clock(), 1)
            return [entry for i in ids if (entry := self._decode(stream, i, group))]

        return await self._wait(find, block_s)

    async def claim(
        self, stream: str, group: str, consumer: str, *, min_idle_s: float, count: int = 64
    ) -> list[tuple[Entry, int]]:
        self._check()
        claimed = []
        for entry_id, held in list(self._streams[stream].pending[group].items())[:count]:
            if self._clock() - held.since < min_idle_s:
                continue
            held.consumer, held.since, held.deliveries = consumer, self._clock(), held.deliveries + 1
            if entry := self._decode(stream, entry_id, group):
                claimed.append((entry, held.deliveries))
        return claimed

    async def dead_letter(self, stream: str, group: str, entry: Entry, reason: str) -> None:
        letter = self._letter(stream, entry.id, encode(entry.message), reason)
        await self.transact([Append(DEAD_LETTERS, letter), Ack(stream, group, (entry.id,))])

    async def length(self, stream: str) -> int:
        self._check()
        return len(self._streams[stream].entries)

    async def increment(self, key: str) -> int:
        self._check()
        self._counters[key] += 1
        return self._counters[key]

    async def counter(self, key: str) -> int:
        self._check()
        return self._counters.get(key, 0)

    async def hash_get(self, key: str, field: str) -> str | None:
        self._check()
        return self._hashes[key].get(field)

    async def hash_some(self, key: str, fields: Sequence[str]) -> list[str | None]:
        self._check()
        return [self._hashes[key].get(field) for field in fields]

    async def hash_all(self, key: str) -> dict[str, str]:
        self._check()
        return dict(self._hashes[key])

    async def acquire(self, lease: str, value: str, ttl_s: float) -> bool:
        (held,) = await self.lease_values([lease])
        if held is None:
            self._leases[lease] = (value, self._clock() + ttl_s)
        self._reply()
        return held in (None, value)

    async def lease_values(self, leases: Sequence[str]) -> list[str | None]:
        self._check()
        now = self._clock()
        held = [self._leases.get(lease, ("", -1.0)) for lease in leases]
        return [value if until > now else None for value, until in held]

    async def cap_and_read_leases(self, leases: Sequence[str]) -> list[str | None]:
        latest = self._clock() + LONGEST_LEASE_S
        for lease in leases:
            if lease in self._leases:
                value, until = self._leases[lease]
                self._leases[lease] = value, min(until, latest)
        return await self.lease_values(leases)

    async def acquire_fenced(
        self, lease: str, value: str, ttl_s: float, *, epoch: str, replacing: str | None
    ) -> int | None:
        (held,) = await self.cap_and_read_leases([lease])
        if held not in (None, replacing):
            return None
        self._leases[lease] = (value, self._clock() + ttl_s)
        self._counters[epoch] += 1
        self._reply()
        return self._counters[epoch]

    async def close(self) -> None:
        """See `Bus.close`."""
