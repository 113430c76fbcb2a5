"""What the services rely on of the bus, held to Redis and to the in-memory fake alike."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from shared.bus import START, Ack, Append, Bus, Delete, Expire, HashDelete, HashSet, Trim, after, position
from shared.errors import BusUnavailable
from shared.fakes import MemoryBus
from shared.messages import DeadLetter, Event, Resume, Suspend
from shared.names import DEAD_LETTERS
from shared.redis_bus import RedisBus
from tests.support.eventually import eventually

S = "test:stream"


@pytest.fixture(params=["memory", "redis"])
async def bus(request: pytest.FixtureRequest) -> AsyncIterator[Bus]:
    bus: Bus = MemoryBus() if request.param == "memory" else RedisBus(request.getfixturevalue("redis_url"))
    yield bus
    await bus.close()


async def raw_append(bus: Bus, stream: str, body: bytes) -> None:
    if isinstance(bus, MemoryBus):
        await bus.append_raw(stream, body)
    else:
        assert isinstance(bus, RedisBus)
        await bus._redis.xadd(stream, {b"m": body})


async def test_entries_come_back_in_order_behind_the_cursor(bus: Bus) -> None:
    ids = [await bus.append(S, Resume(step=i)) for i in range(5)]
    entries = await bus.read({S: START})
    assert [e.message for e in entries] == [Resume(step=i) for i in range(5)]
    assert [e.id for e in entries] == ids == sorted(ids, key=position)
    assert [e.message.step for e in await bus.read({S: ids[2]})] == [3, 4]
    assert await bus.read({S: ids[4]}) == []


async def test_several_streams_are_read_at_once_up_to_a_count_each(bus: Bus) -> None:
    for i in range(4):
        await bus.append("a", Resume(step=i))
        await bus.append("b", Suspend(step=i))
    entries = await bus.read({"a": START, "b": START, "missing": START}, count=3)
    assert sorted(e.stream for e in entries) == ["a"] * 3 + ["b"] * 3


async def test_a_blocking_read_wakes_up_when_an_entry_comes(bus: Bus) -> None:
    reading = asyncio.create_task(bus.read({S: START}, block_s=2.0))
    await eventually(lambda: not reading.done())
    await bus.append(S, Resume(step=1))
    assert [e.message for e in await reading] == [Resume(step=1)]


async def test_a_transaction_does_all_its_operations_in_order(bus: Bus) -> None:
    await bus.transact([HashSet("h", {"a": "1", "b": "2"}), Append(S, Resume(step=1))])
    await bus.transact([HashDelete("h", ("a",)), Append(S, Resume(step=2)), Trim(S, START), Append(S, Resume(step=3))])
    assert await bus.hash_all("h") == {"b": "2"}
    assert [e.message.step for e in await bus.read({S: START})] == [1, 2, 3]
    await bus.transact([Delete("h"), Delete(S), Expire("nothing", 1.0)])
    assert await bus.hash_all("h") == {}
    assert await bus.length(S) == 0
    await bus.transact([])


async def test_a_group_gives_each_entry_to_one_consumer_from_the_stream_s_start(bus: Bus) -> None:
    for i in range(3):
        await bus.append(S, Resume(step=i))
    first = await bus.consume(S, "g", "one", count=2)
    second = await bus.consume(S, "g", "two")
    assert [e.message.step for e in first] == [0, 1]
    assert [e.message.step for e in second] == [2]
    assert [e.message.step for e in await bus.consume(S, "other", "one")] == [0, 1, 2]


async def test_what_a_dead_consumer_held_can_be_claimed_until_it_is_acknowledged(bus: Bus) -> None:
    await bus.append(S, Resume(step=0))
    await bus.append(S, Resume(step=1))
    held = await bus.consume(S, "g", "dead")
    await bus.transact([Ack(S, "g", (held[0].id,))])
    assert await bus.claim(S, "g", "heir", min_idle_s=60.0) == []
    claimed = await bus.claim(S, "g", "heir", min_idle_s=0.0)
    assert [(entry.message.step, times) for entry, times in claimed] == [(1, 2)]
    await bus.transact([Ack(S, "g", (held[1].id,))])
    assert await bus.claim(S, "g", "heir", min_idle_s=0.0) == []
    assert await bus.length(S) == 2


async def test_claiming_on_a_stream_that_is_not_there_finds_nothing(bus: Bus) -> None:
    assert await bus.claim("nowhere", "g", "c", min_idle_s=0.0) == []


async def test_a_buried_entry_is_a_dead_letter_with_its_reason_and_is_not_pending(bus: Bus) -> None:
    await bus.append(S, Resume(step=5))
    (entry,) = await bus.consume(S, "g", "c")
    await bus.bury(S, "g", entry, "no use")
    assert await bus.claim(S, "g", "c", min_idle_s=0.0) == []
    (letter,) = await bus.read({DEAD_LETTERS: START})
    assert isinstance(letter.message, DeadLetter)
    assert (letter.message.reason, letter.message.stream, letter.message.entry_id) == ("no use", S, entry.id)


@pytest.mark.parametrize("grouped", [False, True])
async def test_bytes_that_are_no_message_are_moved_to_the_dead_letters(bus: Bus, *, grouped: bool) -> None:
    await raw_append(bus, S, b"\xff nonsense")
    await bus.append(S, Resume(step=1))
    entries = await (bus.consume(S, "g", "c") if grouped else bus.read({S: START}))
    assert [e.message for e in entries] == [Resume(step=1)]
    (letter,) = await bus.read({DEAD_LETTERS: START})
    assert isinstance(letter.message, DeadLetter)
    assert letter.message.body == b"\xff nonsense"
    assert await bus.length(S) == 1


async def test_trimming_keeps_what_is_asked_and_the_last_id(bus: Bus) -> None:
    assert await bus.last_id(S) == START
    assert await bus.first_id(S) is None
    ids = [await bus.append(S, Resume(step=i)) for i in range(4)]
    await bus.trim(S, ids[2])
    assert await bus.first_id(S) == ids[2]
    await bus.transact([Trim(S, after(ids[3]))])
    assert await bus.length(S) == 0
    assert await bus.last_id(S) == ids[3]


async def test_a_stream_with_a_length_limit_keeps_about_the_newest(bus: Bus) -> None:
    for start in range(0, 1000, 100):
        await bus.transact([Append(S, Resume(step=start + i), max_len=100) for i in range(100)])
    steps = [entry.message.step for entry in await bus.read({S: START}, count=1000)]
    assert steps[-100:] == list(range(900, 1000))
    assert len(steps) <= 300


async def test_counters_and_fields_are_set_once(bus: Bus) -> None:
    assert [await bus.increment("n"), await bus.increment("n")] == [1, 2]
    assert await bus.hash_set_new("h", "k", "first")
    assert not await bus.hash_set_new("h", "k", "second")
    assert await bus.hash_get("h", "k") == "first"
    assert await bus.hash_get("h", "none") is None


async def test_a_lease_that_is_not_renewed_runs_out(bus: Bus) -> None:
    await bus.renew("lease:a", "me", 0.2)
    await bus.renew("lease:b", "you", 60.0)
    assert await bus.holders(["lease:a", "lease:b", "lease:c"]) == ["me", "you", None]

    async def gone() -> bool:
        return await bus.holders(["lease:a"]) == [None]

    await eventually(gone, within_s=5.0)
    assert await bus.holders([]) == []


async def test_events_carry_nested_fields(bus: Bus) -> None:
    event = Event(kind="k", at=1.5, source="s", fields={"a": [1, {"b": None}], "c": "✓"})
    await bus.append(S, event)
    (entry,) = await bus.read({S: START})
    assert entry.message == event


async def test_a_server_that_is_away_is_said_to_be_unavailable() -> None:
    bus = RedisBus("redis://127.0.0.1:1/0")
    with pytest.raises(BusUnavailable, match=r"127\.0\.0\.1:1"):
        await bus.append(S, Resume(step=1))
    await bus.close()
