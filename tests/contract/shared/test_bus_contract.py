"""What the services rely on of the bus, held to Redis and to the in-memory fake alike."""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import AsyncIterator

import pytest

from rlboost.shared.errors import BusUnavailable, ConfigError, Fatal, Fenced
from rlboost.shared.messages import DeadLetter, Event, Resume, Suspend
from rlboost.shared.messages.codec import encode
from rlboost.shared.redis.bus import RedisBus
from rlboost.shared.streams.bus import (
    LONGEST_LEASE_S,
    START,
    Ack,
    Append,
    AppendRaw,
    Bus,
    Delete,
    Entry,
    Expire,
    Fence,
    HashDelete,
    HashSet,
    Remove,
    Renew,
    Trim,
    after,
    position,
)
from rlboost.shared.streams.fakes import MemoryBus
from rlboost.shared.streams.names import DEAD_LETTERS
from tests.support.eventually import eventually

S = "test:stream"


@pytest.fixture(params=["memory", "redis"])
async def bus(request: pytest.FixtureRequest) -> AsyncIterator[Bus]:
    bus: Bus = MemoryBus() if request.param == "memory" else RedisBus(request.getfixturevalue("redis_url"))
    yield bus
    await bus.close()


def step_of(entry: Entry) -> int:
    assert isinstance(entry.message, Resume)
    return entry.message.step


async def raw_append(bus: Bus, stream: str, body: bytes) -> None:
    await bus.transact([AppendRaw(stream, body)])


async def seconds_left(bus: Bus, lease: str) -> float:
    if isinstance(bus, MemoryBus):
        return bus._leases[lease][1] - bus._clock()
    assert isinstance(bus, RedisBus)
    return int(await bus.command("PTTL", lease)) / 1000


async def test_read_returns_entries_after_the_cursor_in_order(bus: Bus) -> None:
    ids = [await bus.append(S, Resume(step=i)) for i in range(5)]
    entries = await bus.read({S: START})
    assert [e.message for e in entries] == [Resume(step=i) for i in range(5)]
    assert [e.id for e in entries] == ids == sorted(ids, key=position)
    assert [step_of(e) for e in await bus.read({S: ids[2]})] == [3, 4]
    assert await bus.read({S: ids[4]}) == []


async def test_read_returns_up_to_count_entries_per_stream(bus: Bus) -> None:
    for i in range(4):
        await bus.append("a", Resume(step=i))
        await bus.append("b", Suspend(step=i))
    entries = await bus.read({"a": START, "b": START, "missing": START}, count=3)
    assert sorted(e.stream for e in entries) == ["a"] * 3 + ["b"] * 3


async def test_read_with_raw_returns_raw_streams_from_their_start(bus: Bus) -> None:
    await bus.append(S, Resume(step=1))
    await raw_append(bus, "raw", b"not a message")
    await bus.append("raw", Resume(step=2))
    entries, raw = await bus.read_with_raw({S: START}, ["raw", "empty"])
    assert [(e.stream, e.message) for e in entries] == [(S, Resume(step=1))]
    assert [(e.stream, e.body) for e in raw] == [("raw", b"not a message"), ("raw", encode(Resume(step=2)))]
    assert await bus.read({DEAD_LETTERS: START}) == []


async def test_blocking_read_returns_when_a_raw_entry_arrives(bus: Bus) -> None:
    reading = asyncio.create_task(bus.read_with_raw({S: START}, ["raw"], block_s=2.0))
    await asyncio.sleep(0)  # the read begins
    assert not reading.done()
    await bus.append("raw", Resume(step=1))
    assert [e.body for e in (await reading)[1]] == [encode(Resume(step=1))]


async def test_raw_entry_moves_to_another_stream_unchanged(bus: Bus) -> None:
    ids = [await bus.append("raw", Resume(step=i)) for i in range(3)]
    await bus.transact([AppendRaw(S, encode(Resume(step=0))), Remove("raw", (ids[0], ids[2]))])
    assert [e.message for e in await bus.read({S: START})] == [Resume(step=0)]
    assert [e.id for e in await bus.read({"raw": START})] == [ids[1]]


async def test_blocking_read_returns_when_an_entry_arrives(bus: Bus) -> None:
    reading = asyncio.create_task(bus.read({S: START}, block_s=2.0))
    await asyncio.sleep(0)  # the read begins
    assert not reading.done()
    await bus.append(S, Resume(step=1))
    assert [e.message for e in await reading] == [Resume(step=1)]


async def test_transaction_applies_all_operations_in_order(bus: Bus) -> None:
    await bus.transact([HashSet("h", {"a": "1", "b": "2"}), Append(S, Resume(step=1))])
    await bus.transact([HashDelete("h", ("a",)), Append(S, Resume(step=2)), Trim(S, START), Append(S, Resume(step=3))])
    assert await bus.hash_all("h") == {"b": "2"}
    assert [step_of(e) for e in await bus.read({S: START})] == [1, 2, 3]
    await bus.transact([Delete("h"), Delete(S), Expire("nothing", 1.0)])
    assert await bus.hash_all("h") == {}
    assert await bus.length(S) == 0
    await bus.transact([])


async def test_consumer_group_delivers_each_entry_to_one_consumer(bus: Bus) -> None:
    for i in range(3):
        await bus.append(S, Resume(step=i))
    first = await bus.consume(S, "g", "one", count=2)
    second = await bus.consume(S, "g", "two")
    assert [step_of(e) for e in first] == [0, 1]
    assert [step_of(e) for e in second] == [2]
    assert [step_of(e) for e in await bus.consume(S, "other", "one")] == [0, 1, 2]


async def test_entries_of_a_dead_consumer_can_be_claimed(bus: Bus) -> None:
    await bus.append(S, Resume(step=0))
    await bus.append(S, Resume(step=1))
    held = await bus.consume(S, "g", "dead")
    await bus.transact([Ack(S, "g", (held[0].id,))])
    assert await bus.claim(S, "g", "heir", min_idle_s=60.0) == []
    claimed = await bus.claim(S, "g", "heir", min_idle_s=0.0)
    assert [(step_of(entry), times) for entry, times in claimed] == [(1, 2)]
    await bus.transact([Ack(S, "g", (held[1].id,))])
    assert await bus.claim(S, "g", "heir", min_idle_s=0.0) == []
    assert await bus.length(S) == 2


async def test_claim_on_a_missing_stream_returns_nothing(bus: Bus) -> None:
    assert await bus.claim("nowhere", "g", "c", min_idle_s=0.0) == []


async def test_dead_letter_moves_an_entry_with_its_reason(bus: Bus) -> None:
    await bus.append(S, Resume(step=5))
    (entry,) = await bus.consume(S, "g", "c")
    await bus.dead_letter(S, "g", entry, "no use")
    assert await bus.claim(S, "g", "c", min_idle_s=0.0) == []
    (letter,) = await bus.read({DEAD_LETTERS: START})
    assert isinstance(letter.message, DeadLetter)
    assert (letter.message.reason, letter.message.stream, letter.message.entry_id) == ("no use", S, entry.id)


@pytest.mark.parametrize("grouped", [False, True])
async def test_undecodable_entries_are_dead_lettered(bus: Bus, *, grouped: bool) -> None:
    await raw_append(bus, S, b"\xff nonsense")
    await bus.append(S, Resume(step=1))
    entries = await (bus.consume(S, "g", "c") if grouped else bus.read({S: START}))
    assert [e.message for e in entries] == [Resume(step=1)]
    (letter,) = await bus.read({DEAD_LETTERS: START})
    assert isinstance(letter.message, DeadLetter)
    assert letter.message.body == b"\xff nonsense"
    assert await bus.length(S) == 2  # a newer release may read both


async def test_undecodable_entry_read_again_is_dead_lettered_once(bus: Bus) -> None:
    await raw_append(bus, S, b"\xff nonsense")
    for _ in range(3):
        assert await bus.read({S: START}) == []
    assert await bus.length(DEAD_LETTERS) == 1
    assert await bus.length(S) == 1


async def test_read_continues_after_a_batch_of_undecodable_entries(bus: Bus) -> None:
    for _ in range(6):
        await raw_append(bus, S, b"\xff nonsense")
    await bus.append(S, Resume(step=1))
    assert [e.message for e in await bus.read({S: START}, count=3)] == [Resume(step=1)]
    assert await bus.length(DEAD_LETTERS) == 6


async def test_trim_retains_newer_entries_and_ids_keep_increasing(bus: Bus) -> None:
    ids = [await bus.append(S, Resume(step=i)) for i in range(4)]
    await bus.transact([Trim(S, ids[2])])
    assert [entry.id for entry in await bus.read({S: START})] == ids[2:]
    await bus.transact([Trim(S, after(ids[3]))])
    assert await bus.length(S) == 0
    await bus.append(S, Resume(step=4))
    assert [entry.message for entry in await bus.read({S: ids[3]})] == [Resume(step=4)]


async def test_stream_with_max_len_retains_about_the_newest(bus: Bus) -> None:
    for start in range(0, 1000, 100):
        await bus.transact([Append(S, Resume(step=start + i), max_len=100) for i in range(100)])
    steps = [step_of(entry) for entry in await bus.read({S: START}, count=1000)]
    assert steps[-100:] == list(range(900, 1000))
    assert len(steps) <= 300


async def test_counters_and_hash_fields(bus: Bus) -> None:
    assert await bus.counter("n") == 0
    assert [await bus.increment("n"), await bus.increment("n"), await bus.counter("n")] == [1, 2, 2]
    await bus.transact([HashSet("h", {"k": "first"})])
    assert await bus.hash_get("h", "k") == "first"
    assert await bus.hash_get("h", "none") is None
    assert await bus.hash_some("h", ["none", "k", "k"]) == [None, "first", "first"]


async def test_lease_expires_without_renewal(bus: Bus) -> None:
    await bus.transact([Renew("lease:a", "me", 60.0)])
    await bus.transact([Renew("lease:b", "you", 60.0)])
    assert await bus.lease_values(["lease:a", "lease:b", "lease:c"]) == ["me", "you", None]
    await bus.transact([Renew("lease:a", "me", 0.1)])

    async def gone() -> bool:
        return await bus.lease_values(["lease:a"]) == [None]

    await eventually(gone)
    assert await bus.lease_values([]) == []


async def test_lease_from_before_the_clock_stepped_back_is_shortened(bus: Bus) -> None:
    """Of a holder that took it for seconds when the clock showed a later hour."""
    await bus.transact([Renew("lease:a", "dead", 3600.0)])
    await bus.transact([Renew("lease:b", "dead", 3600.0)])
    assert await bus.cap_and_read_leases(["lease:a", "lease:x"]) == ["dead", None]
    assert await bus.cap_and_read_leases([]) == []
    assert await bus.acquire_fenced("lease:b", "me", 5.0, epoch="epoch", replacing=None) is None
    for lease in ("lease:a", "lease:b"):
        assert await seconds_left(bus, lease) <= LONGEST_LEASE_S


@pytest.mark.parametrize("kind", ["no_expiry", "far_expiry", "wrong_type"])
@pytest.mark.parametrize("script", ["cap_and_read", "acquire_fenced", "acquire"])
async def test_lease_that_its_holder_wrote_otherwise_ends(redis_url: str, kind: str, script: str) -> None:
    """A worker may write its own lease as it likes, and exit: nothing may then wait for it for ever."""
    bus, lease = RedisBus(redis_url), "lease:odd"
    write = {
        "no_expiry": ("SET", lease, "dead"),
        "far_expiry": ("SET", lease, "dead", "PX", "9000000000000"),
        "wrong_type": ("RPUSH", lease, "dead"),
    }[kind]
    await bus.command(*write)
    is_held = kind != "wrong_type"
    if script == "cap_and_read":
        assert await bus.cap_and_read_leases([lease, "lease:none"]) == ["dead" if is_held else None, None]
    elif script == "acquire_fenced":
        epoch = await bus.acquire_fenced(lease, "me", 5.0, epoch="epoch", replacing=None)
        assert epoch == (None if is_held else 1)
    else:  # as claims on blobs, whose readers have a limit of their own: see `peers.selection`
        assert not await bus.acquire(lease, "me", 5.0)
    if script != "acquire" and (is_held or script == "acquire_fenced"):
        assert 0 < await seconds_left(bus, lease) <= LONGEST_LEASE_S
    await bus.close()


async def test_lease_without_its_epoch_is_not_acquired_by_halves(redis_url: str) -> None:
    bus = RedisBus(redis_url)
    await bus.command("RPUSH", "epoch", "no number")
    with pytest.raises(Fatal, match="WRONGTYPE"):
        await bus.acquire_fenced("lease:a", "me", 5.0, epoch="epoch", replacing=None)
    assert await bus.lease_values(["lease:a"]) == [None]
    await bus.close()


async def test_expired_key_is_gone_and_a_new_one_stays(bus: Bus) -> None:
    await bus.transact([HashSet("h", {"k": "v"}), HashSet("other", {"k": "v"}), Append(S, Resume(step=1))])
    await bus.increment("n")
    # Long enough for the next line on a busy machine: what it writes must not be a new key.
    await bus.transact([*(Expire(key, 2.0) for key in ("h", S, "n", "missing")), Expire("other", 60.0)])
    await bus.transact([HashSet("h", {"k": "w"}), Append("missing", Resume(step=2))])

    async def gone() -> bool:
        return await bus.length(S) == 0 and await bus.hash_all("h") == {}

    await eventually(gone)
    assert await bus.increment("n") == 1
    await bus.transact([HashSet("h", {"k": "new"}), Append(S, Resume(step=3))])
    assert await bus.hash_all("h") == {"k": "new"}
    assert await bus.hash_all("other") == {"k": "v"}
    assert [step_of(e) for e in await bus.read({S: START, "missing": START})] == [3, 2]


async def test_deleted_key_no_longer_expires(bus: Bus) -> None:
    await bus.transact([HashSet("h", {"k": "v"}), Expire("h", 0.1), Delete("h"), HashSet("h", {"k": "w"})])
    await bus.transact([Renew("lease:a", "me", 60.0)])
    await bus.transact([Expire("lease:a", 0.1)])

    async def gone() -> bool:
        return await bus.lease_values(["lease:a"]) == [None]

    await eventually(gone)
    assert await bus.hash_all("h") == {"k": "w"}


async def test_lease_is_acquired_by_one_holder_until_it_expires(bus: Bus) -> None:
    assert await bus.acquire("lease:a", "me", 60.0)
    assert not await bus.acquire("lease:a", "you", 60.0)
    assert await bus.acquire("lease:b", "you", 60.0)
    assert await bus.acquire("lease:a", "me", 60.0), "it has this value already"
    assert await bus.lease_values(["lease:a", "lease:b"]) == ["me", "you"]
    assert await bus.acquire("lease:c", "me", 0.1)
    assert await eventually(lambda: bus.acquire("lease:c", "you", 60.0))


async def take(bus: Bus, who: str, *, ttl_s: float = 60.0, replacing: str | None = None) -> int | None:
    return await bus.acquire_fenced("lead", who, ttl_s, epoch="epoch", replacing=replacing)


async def test_acquire_fenced_has_one_holder_and_increments_the_epoch(bus: Bus) -> None:
    taken = await asyncio.gather(*(take(bus, f"m{i}") for i in range(8)))
    assert sorted(epoch for epoch in taken if epoch is not None) == [1]
    assert await bus.lease_values(["lead"]) == [f"m{taken.index(1)}"]
    assert await take(bus, "late") is None
    assert await take(bus, "late", replacing="nobody of that name") is None
    await bus.transact([Delete("lead")])
    assert await take(bus, "next") == 2
    assert await take(bus, "heir", replacing="next") == 3
    assert await take(bus, "heir", replacing="heir") == 4
    assert await bus.lease_values(["lead"]) == ["heir"]


async def test_fenced_lease_expires_without_renewal(bus: Bus) -> None:
    assert await take(bus, "a", ttl_s=0.2) == 1
    await bus.transact([Renew("lead", "a", 60.0)], Fence("epoch", 1))
    assert await bus.lease_values(["lead"]) == ["a"]
    await bus.transact([Renew("lead", "a", 0.1)], Fence("epoch", 1))
    assert await eventually(lambda: take(bus, "b")) == 2


async def test_transaction_under_a_valid_fence_takes_effect(bus: Bus) -> None:
    epoch = await take(bus, "a") or 0
    for step in range(3):
        await bus.transact([HashSet("h", {"k": str(step)}), Append(S, Resume(step=step))], Fence("epoch", epoch))
    assert await bus.hash_get("h", "k") == "2"
    assert [step_of(e) for e in await bus.read({S: START})] == [0, 1, 2]


@pytest.mark.parametrize("written_before", [False, True])
async def test_transaction_under_an_invalid_fence_has_no_effect(bus: Bus, *, written_before: bool) -> None:
    old = Fence("epoch", await take(bus, "a") or 0)
    if written_before:
        await bus.transact([Append(S, Resume(step=0))], old)
    new = Fence("epoch", await take(bus, "b", replacing="a") or 0)
    for _ in range(2):
        with pytest.raises(Fenced, match="epoch"):
            await bus.transact([HashSet("h", {"k": "v"}), Append(S, Resume(step=1)), Renew("lead", "a", 9.0)], old)
    assert await bus.hash_all("h") == {}
    assert await bus.length(S) == int(written_before)
    assert await bus.lease_values(["lead"]) == ["b"]
    await bus.transact([Append(S, Resume(step=2))], new)
    with pytest.raises(Fenced):
        await bus.transact([Append(S, Resume(step=3))], old)
    assert await bus.length(S) == 1 + written_before


async def test_concurrent_fenced_transactions_all_take_effect(bus: Bus) -> None:
    fence = Fence("epoch", await take(bus, "a") or 0)
    await asyncio.gather(*(bus.transact([Append(S, Resume(step=i))], fence) for i in range(50)))
    assert sorted(step_of(e) for e in await bus.read({S: START})) == list(range(50))


async def test_fence_of_a_missing_counter_is_at_zero(bus: Bus) -> None:
    await bus.transact([Append(S, Resume(step=0))], Fence("never", 0))
    with pytest.raises(Fenced):
        await bus.transact([Append(S, Resume(step=1))], Fence("never", 1))
    assert await bus.length(S) == 1


async def test_broken_fenced_connection_is_replaced(redis_url: str) -> None:
    bus, other = RedisBus(redis_url, "fenced"), RedisBus(redis_url)
    fence = Fence("epoch", await take(bus, "a") or 0)
    await bus.transact([Append(S, Resume(step=0))], fence)
    await kill_connections(other, "fenced")
    with pytest.raises(BusUnavailable):
        await bus.transact([Append(S, Resume(step=1))], fence)
    await bus.transact([Append(S, Resume(step=2))], fence)
    await other.increment("epoch")
    with pytest.raises(Fenced):
        await bus.transact([Append(S, Resume(step=3))], fence)
    assert [step_of(e) for e in await other.read({S: START})] == [0, 2]
    await bus.close()
    await other.close()


async def test_fence_is_checked_again_on_a_new_connection(redis_url: str) -> None:
    """The watch ended with the connection, so what it knew of the epoch counts no more."""
    bus, other = RedisBus(redis_url, "fenced"), RedisBus(redis_url)
    fence = Fence("epoch", await take(bus, "a") or 0)
    await bus.transact([Append(S, Resume(step=0))], fence)
    await kill_connections(other, "fenced")
    with pytest.raises(BusUnavailable):
        await bus.transact([Append(S, Resume(step=1))], fence)
    await take(other, "b", replacing="a")
    with pytest.raises(Fenced):
        await bus.transact([Append(S, Resume(step=2))], fence)
    assert [e.message for e in await other.read({S: START})] == [Resume(step=0)]
    await bus.close()
    await other.close()


async def kill_connections(bus: RedisBus, name: str) -> None:
    for client in await bus.command("CLIENT LIST"):
        if client["name"] == name:
            await bus.command("CLIENT", "KILL", client["addr"])


async def test_rejected_command_under_a_fence_raises_and_the_next_works(redis_url: str) -> None:
    bus = RedisBus(redis_url)
    fence = Fence("epoch", await take(bus, "a") or 0)
    await bus.transact([HashSet("h", {"k": "v"})], fence)
    with pytest.raises(Fatal, match="WRONGTYPE"):
        await bus.transact([Append("h", Resume(step=0))], fence)
    await bus.transact([HashSet("h", {"k": "w"})], fence)
    assert await bus.hash_all("h") == {"k": "w"}
    await bus.close()


async def test_cancelled_fenced_transaction_does_not_affect_the_next(redis_url: str) -> None:
    bus = RedisBus(redis_url)
    fence = Fence("epoch", await take(bus, "a") or 0)
    for step in range(20):
        sending = asyncio.create_task(bus.transact([Append("other", Resume(step=step))], fence))
        for _ in range(step):
            await asyncio.sleep(0)
        sending.cancel()
        await asyncio.wait({sending})
        await bus.transact([Append(S, Resume(step=step))], fence)
    assert [step_of(e) for e in await bus.read({S: START})] == list(range(20))
    await bus.close()


async def test_events_may_have_nested_fields(bus: Bus) -> None:
    event = Event(kind="k", at=1.5, source="s", fields={"a": [1, {"b": None}], "c": "✓"})
    await bus.append(S, event)
    (entry,) = await bus.read({S: START})
    assert entry.message == event


async def test_unreachable_server_raises_bus_unavailable() -> None:
    bus = RedisBus("redis://127.0.0.1:1/0")
    with pytest.raises(BusUnavailable, match=r"127\.0\.0\.1:1"):
        await bus.append(S, Resume(step=1))
    await bus.close()


@pytest.mark.parametrize(
    "url",
    [
        "http://:hunter2@redis:6379/0",
        "redis://:hunter2@redis:port/0",
        "redis://:hunter2/3@redis:6379/0",
        "redis://:hunter2#3@redis:6379/0",
        "redis://:hunter2@[redis:6379/0",
        "redis://:hunter2@redis:6379/production",
        "redis://:hunter2@redis:6379/0?sslcert=node.pem",
    ],
)
def test_invalid_redis_url_error_does_not_reveal_the_password(url: str) -> None:
    with pytest.raises(ConfigError, match="the Redis URL is invalid") as refused:
        RedisBus(url)
    assert "hunter2" not in "".join(traceback.format_exception(refused.value))
