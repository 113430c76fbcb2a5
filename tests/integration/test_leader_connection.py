"""What a standby concludes from its connection to the leader, with real sockets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from rlboost.services.rollout_manager.leadership import LeaderConnection

LIMIT_S = 0.05
LONG_S = 60.0


@pytest.fixture
async def connection() -> AsyncIterator[LeaderConnection]:
    connection = LeaderConnection()
    yield connection
    await connection.close()


class Leader:
    """A server that accepts connections and says nothing."""

    def __init__(self) -> None:
        self.port = 0
        self.url = ""
        self.accepted = 0
        self._writers: list[asyncio.StreamWriter] = []

    async def listen(self) -> None:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"

    async def _accept(self, _: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.accepted += 1
        self._writers.append(writer)

    async def refuse(self) -> None:
        self._server.close()

    def hang_up(self) -> None:
        for writer in self._writers:
            writer.close()
        self._writers.clear()


@pytest.fixture
async def leader() -> AsyncIterator[Leader]:
    leader = Leader()
    await leader.listen()
    yield leader
    await leader.refuse()
    leader.hang_up()


async def test_leader_that_closes_and_refuses_has_died(connection: LeaderConnection, leader: Leader) -> None:
    assert not await connection.has_died(leader.url, LIMIT_S)
    waiting = asyncio.create_task(connection.has_died(leader.url, LONG_S))
    await leader.refuse()
    leader.hang_up()
    async with asyncio.timeout(LONG_S / 2):
        assert await waiting


async def test_reconnect_that_times_out_once_does_not_hide_the_death(
    connection: LeaderConnection, leader: Leader, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not await connection.has_died(leader.url, LIMIT_S)
    attempts = 0

    async def open_connection(*arguments: Any) -> Any:
        nonlocal attempts
        attempts += 1
        if attempts == 1:
            raise TimeoutError
        return await real(*arguments)

    real = asyncio.open_connection
    monkeypatch.setattr(asyncio, "open_connection", open_connection)
    await leader.refuse()
    leader.hang_up()
    assert await connection.has_died(leader.url, LONG_S)
    assert attempts == 2


async def test_leader_that_closes_and_still_listens_lives(connection: LeaderConnection, leader: Leader) -> None:
    assert not await connection.has_died(leader.url, LIMIT_S)
    leader.hang_up()
    assert not await connection.has_died(leader.url, LIMIT_S)
    assert leader.accepted == 2


async def test_silent_leader_lives_on_one_connection(connection: LeaderConnection, leader: Leader) -> None:
    for _ in range(3):
        assert not await connection.has_died(leader.url, LIMIT_S)
    assert leader.accepted == 1


@pytest.mark.parametrize("url", ["", "http://127.0.0.1:1", "http://[", "http://host.invalid:80", "http://127.0.0.1:x"])
async def test_address_that_never_answered_proves_nothing(connection: LeaderConnection, url: str) -> None:
    for _ in range(2):
        assert not await connection.has_died(url, LIMIT_S)
