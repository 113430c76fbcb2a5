"""Many clients that follow events share one waiting read of the bus."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from functools import partial
from typing import Any

import pytest

from rlboost.services.rollout_manager.api import history
from rlboost.services.rollout_manager.api.history import MAX_READS, EventFollowers
from rlboost.shared.http.access import SYSTEM, Principal
from rlboost.shared.http.problem import Problem
from rlboost.shared.messages import Event
from rlboost.shared.streams.bus import START, Entry
from tests.support.eventually import eventually
from tests.support.memory_bus import MemoryBus

READER, OTHER = Principal("token 1", "read"), Principal("token 2", "read")


class CountingBus(MemoryBus):
    def __init__(self) -> None:
        super().__init__()
        self.reading = self.most_reading = self.most_waiting = self.waiting = 0

    async def read(self, cursors: Mapping[str, str], *, count: int = 512, block_s: float = 0.0) -> list[Entry]:
        self.reading += 1
        self.waiting += block_s > 0
        self.most_reading = max(self.most_reading, self.reading)
        self.most_waiting = max(self.most_waiting, self.waiting)
        try:
            await asyncio.sleep(0)
            return await super().read(cursors, count=count, block_s=block_s)
        finally:
            self.reading -= 1
            self.waiting -= block_s > 0


async def connected() -> bool:
    return False


async def always() -> bool:
    return True


def event(number: int) -> Event:
    return Event(kind="k", at=0.0, source="s", fields={"number": number})


async def test_followers_get_every_event_by_one_waiting_read() -> None:
    bus = CountingBus()
    followers, over = EventFollowers(bus), False
    seen: list[list[Any]] = [[] for _ in range(200)]

    async def is_over() -> bool:
        return over

    async def follow(i: int) -> None:
        async for entry in followers.follow(SYSTEM, {f"events-{i % 3}": START}, is_over, connected):
            if entry is not None and isinstance(entry.message, Event):
                seen[i].append(entry.message.fields["number"])

    def all_saw(number: int) -> bool:
        return all(numbers[-1:] == [number] for numbers in seen)

    async with asyncio.TaskGroup() as group:
        for i in range(200):
            group.create_task(follow(i), name=f"follower-{i}")
        for number in range(3):
            for stream in range(3):
                await bus.append(f"events-{stream}", event(number))
            await eventually(partial(all_saw, number))
        over = True
    assert all(numbers == [0, 1, 2] for numbers in seen)
    assert bus.most_waiting == 1
    assert bus.most_reading <= MAX_READS + 1


async def test_one_follower_too_many_is_rejected_until_another_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "MAX_FOLLOWERS", 1)
    bus = MemoryBus()
    followers = EventFollowers(bus)
    await bus.append("events", event(0))
    followers.check_limit(READER)
    following = followers.follow(READER, {"events": START}, always, connected)
    assert await anext(following)
    with pytest.raises(Problem) as rejected:
        followers.check_limit(READER)
    assert rejected.value.status == 429
    with pytest.raises(StopAsyncIteration):
        await anext(following)
    followers.check_limit(READER)


async def test_followers_of_one_token_leave_places_to_others_and_to_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "MAX_FOLLOWERS", 3)
    monkeypatch.setattr(history, "MAX_FOLLOWERS_OF_TOKEN", 2)
    bus = MemoryBus()
    followers = EventFollowers(bus)
    await bus.append("events", event(0))
    following: list[Any] = [
        followers.follow(who, {"events": START}, always, connected) for who in (READER, READER, OTHER)
    ]
    for each in following:
        assert await anext(each)
    with pytest.raises(Problem, match="2 clients with this token"):
        followers.check_limit(READER)
    with pytest.raises(Problem, match="3 clients follow"):
        followers.check_limit(OTHER)
    followers.check_limit(SYSTEM)
    for each in following:
        await each.aclose()
    followers.check_limit(READER)
