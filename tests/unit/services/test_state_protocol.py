"""No service works on data of a protocol that it cannot read: the number in Redis, and that of workers."""

from __future__ import annotations

import asyncio

import pytest

from rlboost.services.rollout_manager.leadership import manager_record
from rlboost.services.rollout_manager.loop import Manager
from rlboost.shared.errors import BusUnavailable, ConfigError
from rlboost.shared.messages import Dismissed
from rlboost.shared.messages.codec import OLDEST_STATE, PROTOCOL
from rlboost.shared.streams import names, state_protocol
from rlboost.shared.streams.bus import START, HashSet
from rlboost.shared.streams.state_protocol import check_leader, leader_check
from tests.support.builders import worker_joined
from tests.support.eventually import eventually
from tests.support.memory_bus import MemoryBus


def manager(bus: MemoryBus, port: int = 1) -> Manager:
    return Manager(bus, lease_s=2.0, redis_limit_s=9.0, record=manager_record("127.0.0.1", port, "here"))


async def stored(bus: MemoryBus) -> dict[str, str]:
    return await bus.hash_all(names.PROTOCOL)


class UnavailableAtFirst(MemoryBus):
    """Does not answer the first read of a hash."""

    is_unavailable = True

    async def hash_get(self, key: str, field: str) -> str | None:
        if self.is_unavailable:
            self.is_unavailable = False
            raise BusUnavailable("no answer")
        return await super().hash_get(key, field)


async def test_leader_writes_its_protocol() -> None:
    bus = MemoryBus()
    await check_leader(bus)
    assert await manager(bus).try_lead()
    assert await stored(bus) == {"number": str(PROTOCOL)}
    await check_leader(bus)


@pytest.mark.parametrize("number", [PROTOCOL + 1, OLDEST_STATE - 1])
async def test_manager_does_not_lead_over_state_it_cannot_continue(number: int) -> None:
    bus = MemoryBus()
    await bus.transact([HashSet(names.PROTOCOL, {"number": str(number)})])
    with pytest.raises(ConfigError, match=f"has protocol {number} and this manager continues"):
        await manager(bus).try_lead()
    assert await stored(bus) == {"number": str(number)}
    assert await bus.lease_values([names.MANAGER_LEASE]) == [None]
    assert await bus.increment(names.MANAGER_EPOCH) == 1, "it did not raise the epoch"


async def test_manager_overtaken_by_a_newer_one_gives_the_lease_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """A newer manager leads for a moment between the older one's check and its lease."""
    bus, acquire = MemoryBus(), MemoryBus.acquire_fenced

    async def overtaken(self: MemoryBus, *args: object, **more: object) -> object:
        await self.transact([HashSet(names.PROTOCOL, {"number": str(PROTOCOL + 1)})])
        return await acquire(self, *args, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(MemoryBus, "acquire_fenced", overtaken)
    with pytest.raises(ConfigError, match=f"has protocol {PROTOCOL + 1}"):
        await manager(bus).try_lead()
    assert await bus.lease_values([names.MANAGER_LEASE]) == [None]
    assert await stored(bus) == {"number": str(PROTOCOL + 1)}


async def test_newer_manager_continues_older_state_and_dismisses_its_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    bus = MemoryBus()
    await bus.transact([HashSet(names.PROTOCOL, {"number": str(PROTOCOL)})])
    for worker, protocol in (("older", PROTOCOL), ("newer", PROTOCOL + 1)):
        joined = worker_joined(worker, protocol=protocol)
        await bus.transact([HashSet(names.FLEET, {worker: joined.model_dump_json()})])
    monkeypatch.setattr(state_protocol, "PROTOCOL", PROTOCOL + 1)
    for module in ("workers", "stalls"):
        monkeypatch.setattr(f"rlboost.services.rollout_manager.domain.{module}.PROTOCOL", PROTOCOL + 1)
    leader = manager(bus)
    assert await leader.try_lead()
    await leader.turn()
    assert await stored(bus) == {"number": str(PROTOCOL + 1)}
    assert set(leader.world.fleet.workers) == {"newer"}
    (command,) = await bus.read({names.worker_commands("older"): START})
    assert isinstance(command.message, Dismissed)
    assert f"it has protocol {PROTOCOL} and the manager {PROTOCOL + 1}" in command.message.reason


async def test_trainer_stops_once_a_manager_of_another_protocol_leads(monkeypatch: pytest.MonkeyPatch) -> None:
    bus = UnavailableAtFirst()
    monkeypatch.setattr(state_protocol, "_CHECK_EVERY_S", 0.001)
    watching = asyncio.create_task(leader_check(bus)(asyncio.Event()))
    await eventually(lambda: not bus.is_unavailable)
    assert await manager(bus).try_lead()
    await bus.transact([HashSet(names.PROTOCOL, {"number": str(PROTOCOL + 1)})])
    with pytest.raises(ConfigError, match=f"the manager has protocol {PROTOCOL + 1} and this process {PROTOCOL}"):
        await watching
