"""Managers of two releases in the middle of a step, with workers and a trainer of either, played by the test."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest

from rlboost.shared.errors import ConfigError
from rlboost.shared.messages.codec import PROTOCOL
from rlboost.shared.redis.bus import RedisBus
from rlboost.shared.streams import names
from rlboost.shared.streams.bus import START
from rlboost.shared.streams.state_protocol import check_leader
from tests.support.eventually import eventually
from tests.support.played_job import PlayedJob
from tests.support.redis_server import RedisServer
from tests.support.releases import ADDED, encode_as_next_release, environment, next_release
from tests.support.service_process import TOKEN, ServiceProcess
from tests.support.sim_worker import SimWorker

pytestmark = pytest.mark.timeout(600)


class System(PlayedJob):
    """A job, with a manager and a weight store that are replaced by those of other releases."""

    def __init__(self, redis: RedisServer, directory: Path) -> None:
        super().__init__(RedisBus(redis.url), forgives_outages=True)
        self.manager = self._service("rollout_manager", "RLBOOST_MANAGER_", directory, redis.url, {})
        where = {"RLBOOST_WEIGHT_STORE_DIR": str(directory / "store")}
        self.store = self._service("weight_store", "RLBOOST_WEIGHT_STORE_", directory, redis.url, where)
        self.http = httpx.AsyncClient(base_url=self.manager.url, headers={"Authorization": f"Bearer {TOKEN}"})

    def _service(self, name: str, prefix: str, folder: Path, redis_url: str, env: Mapping[str, str]) -> ServiceProcess:
        return ServiceProcess(name, prefix, folder, redis_url, {**environment(), **env}, imports=True)

    async def replace_manager(self, release: Mapping[str, str]) -> None:
        """Kill the manager, and start that of another release in its place."""
        self.manager.kill()
        self.manager.env |= release
        await asyncio.to_thread(self.manager.start)

    async def until_generated(self, tokens: int) -> None:
        """Wait until the manager has seen this number of tokens."""
        await eventually(lambda: self._has_generated(tokens))

    async def _has_generated(self, tokens: int) -> bool:
        return bool((await self.audit())["tokens_generated"] >= tokens)

    async def audit(self) -> dict[str, Any]:
        answer = await self.http.get(f"/v1/jobs/{self.id}/audit")
        assert answer.status_code == 200, answer.text
        audit: dict[str, Any] = answer.json()
        return audit

    async def writers(self) -> set[bool]:
        """Return whether finished samples were written by the next release, of all of them."""
        _, entries = await self.bus.read_with_raw({}, [names.rollouts_finished(self.id)], count=10_000)
        return {ADDED.encode() in entry.body for entry in entries}


@pytest.fixture
async def system(tmp_path: Path) -> AsyncIterator[System]:
    redis = RedisServer(tmp_path / "redis", aof=True)
    redis.start()
    system = System(redis, tmp_path)
    try:
        await asyncio.to_thread(system.manager.start)
        await system.create(system.http, system.manager.url)
        yield system
    finally:
        await system.stop_workers()
        await system.http.aclose()
        await system.bus.close()
        system.manager.kill()
        system.store.kill()
        redis.stop()


@pytest.mark.long
async def test_releases_of_one_protocol_work_together_in_any_mix(
    system: System, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    newer = next_release(tmp_path / "newer")
    system.start_worker("older")
    await system.request(groups=2, n=8, max_tokens=60)
    await system.until_generated(100)
    await system.replace_manager(newer)
    await system.delivered(16)
    await system.request(groups=4, n=8, max_tokens=60)
    await system.until_generated(16 * 60 + 100)
    monkeypatch.setattr("rlboost.shared.redis.bus.encode", encode_as_next_release)
    system.start_worker("newer")
    system.kill_worker("older")
    await system.until_generated(16 * 60 + 500)
    await system.replace_manager(environment())
    await system.request(groups=2, n=8, max_tokens=60)
    await system.delivered(64)
    audit = await system.audit()
    assert audit["requested"] == audit["delivered"] == 64
    assert audit["tokens_generated"] - sum(audit["tokens_regenerated"].values()) == 64 * 60
    assert await system.writers() == {False, True}
    assert await system.bus.length(names.DEAD_LETTERS) == 0


@pytest.mark.long
async def test_manager_of_a_newer_protocol_continues_without_older_services(system: System, tmp_path: Path) -> None:
    older = system.start_worker("older")
    await asyncio.to_thread(system.store.start)
    await check_leader(system.bus)
    await system.request(groups=2, n=8, max_tokens=60)
    await system.until_generated(100)
    await system.replace_manager(next_release(tmp_path / "newer", protocol=PROTOCOL + 1))
    await eventually(lambda: older.dismissed)
    assert await asyncio.to_thread(system.store.wait) == 2
    assert f"the manager has protocol {PROTOCOL + 1} and this process {PROTOCOL}" in system.store.log()
    with pytest.raises(ConfigError, match="install the same version"):
        await check_leader(system.bus)
    system.run_worker(SimWorker(system.bus, "newer", slots=8, protocol=PROTOCOL + 1))
    samples = await system.delivered(16)
    assert {worker for sample in samples for worker, _, _ in sample.spans} == {"older", "newer"}

    log = await system.bus.read({names.TOKEN_LOG: START}, count=10_000)
    system.manager.kill()
    system.manager.env |= environment()
    system.manager.launch()
    assert await asyncio.to_thread(system.manager.wait) == 2
    assert f"the state in Redis has protocol {PROTOCOL + 1}" in system.manager.log()
    assert await system.bus.read({names.TOKEN_LOG: START}, count=10_000) == log, "it has changed nothing"
