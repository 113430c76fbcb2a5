"""Redis users of workers: one contract for the fake and for Redis."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator

import pytest

from rlboost.services.rollout_manager.access import RedisWorkerUsers
from rlboost.services.rollout_manager.ports import WorkerUsers
from rlboost.shared.redis.bus import connect
from tests.support.manager_fakes import FakeWorkerUsers

DIGEST = hashlib.sha256(b"a password").hexdigest()


@pytest.fixture(params=["fake", "redis"])
async def users(request: pytest.FixtureRequest) -> AsyncIterator[WorkerUsers]:
    if request.param == "fake":
        yield FakeWorkerUsers()
        return
    bus = await connect(request.getfixturevalue("redis_url"), "a-test")
    users = RedisWorkerUsers(bus)
    await users.check()
    yield users
    await users.remove(["w-1", "w-2", "unknown"])
    await bus.close()


async def test_users_that_were_put_are_present_until_they_are_removed(users: WorkerUsers) -> None:
    assert await users.present() == set()
    for worker in ("w-1", "w-2", "w-1"):
        await users.put(worker, DIGEST)
    assert await users.present() == {"w-1", "w-2"}
    await users.remove(["w-1"])
    assert await users.present() == {"w-2"}


async def test_user_that_does_not_exist_is_removed_without_an_error(users: WorkerUsers) -> None:
    await users.put("w-1", DIGEST)
    await users.remove(["unknown", "w-1"])
    await users.remove(["w-1"])
    assert await users.present() == set()
