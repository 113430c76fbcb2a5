"""What notices a leader's death: one contract for the fake and for a connection."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import NamedTuple

import pytest

from rlboost.services.rollout_manager.leadership import LeaderConnection
from rlboost.services.rollout_manager.ports import LeaderWatch
from tests.support.manager_fakes import FakeLeaderWatch

LIMIT_S = 0.05
LONG_S = 60.0


class Site(NamedTuple):
    """A watch, and a leader that can die."""

    watch: LeaderWatch
    url: str
    die: Callable[[], None]


@pytest.fixture(params=["fake", "connection"])
async def site(request: pytest.FixtureRequest) -> AsyncIterator[Site]:
    if request.param == "fake":
        fake = FakeLeaderWatch()
        yield Site(fake, "http://leader", lambda: setattr(fake, "dies_before", 1))
        return
    writers: list[asyncio.StreamWriter] = []
    server = await asyncio.start_server(lambda _, writer: writers.append(writer), "127.0.0.1")
    connection = LeaderConnection()

    def die() -> None:
        server.close()
        for writer in writers:
            writer.close()

    yield Site(connection, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", die)
    die()
    await connection.close()


async def test_leader_lives_until_its_process_ends(site: Site) -> None:
    for _ in range(2):
        assert not await site.watch.has_died(site.url, LIMIT_S)
    site.die()
    async with asyncio.timeout(LONG_S / 2):
        assert await site.watch.has_died(site.url, LONG_S)
