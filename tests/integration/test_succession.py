"""Two real manager processes on a real Redis: one leads, the other takes over, and no sample is lost or doubled."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from rlboost.client import Client
from rlboost.services.rollout_worker.adapters.manager_http import join
from rlboost.shared.redis.bus import RedisBus
from rlboost.shared.streams import names
from rlboost.shared.wire import I32, ints
from tests.support.eventually import eventually
from tests.support.played_job import SPEC, PlayedJob
from tests.support.redis_server import RedisServer
from tests.support.service_process import TOKEN, ServiceProcess
from tests.support.stopwatch import Stopwatch

LEASE_S = 3.0
NEVER_S = 3600.0
"""A lease that does not expire during a test."""
HEADERS = {"Authorization": f"Bearer {TOKEN}"}


class Pair(PlayedJob):
    """Two managers, a Redis, workers, and a trainer that only asks."""

    def __init__(self, redis: RedisServer, directory: Path, **env: str) -> None:
        super().__init__(RedisBus(redis.url))
        self.redis = redis
        self.http = httpx.AsyncClient(headers=HEADERS)
        self.one, self.two = (self._manager(directory / name, env) for name in ("one", "two"))

    def _manager(self, directory: Path, env: dict[str, str]) -> ServiceProcess:
        directory.mkdir()
        # A worker, which is a task of this process, may be starved for seconds and is not lost.
        env = {"RLBOOST_MANAGER_LEASE_S": "30", **env}
        return ServiceProcess("rollout_manager", "RLBOOST_MANAGER_", directory, self.redis.url, env)

    async def start(self) -> None:
        """The first leads, the second stands by, and a job runs."""
        self.one.start()
        self.two.launch()
        await eventually(lambda: self.stands_by(self.two, behind=self.one))
        await self.create(self.http, self.one.url)

    async def stop(self) -> None:
        await self.stop_workers()
        await self.http.aclose()
        await self.bus.close()
        for manager in (self.one, self.two):
            manager.kill()

    async def generated(self, n: int) -> bool:
        stored = await self.bus.hash_get(names.job_audit(self.id), "counters")
        return stored is not None and int(httpx.Response(200, text=stored).json()["tokens_generated"]) >= n

    async def delivered_whole(self, n: int, n_tokens: int) -> None:
        """Each of so many samples has come once, with so many tokens."""
        assert {len(ints(sample.tokens, I32)) for sample in await self.delivered(n)} == {n_tokens}

    async def leads(self, manager: ServiceProcess) -> bool:
        with contextlib.suppress(httpx.TransportError):
            return (await self.http.get(f"{manager.url}/readyz")).status_code == 200
        return False

    async def stands_by(self, manager: ServiceProcess, *, behind: ServiceProcess) -> bool:
        with contextlib.suppress(httpx.TransportError):
            ready = await self.http.get(f"{manager.url}/readyz")
            return ready.status_code == 503 and ready.json()["detail"] == f"standby; {behind.url} leads"
        return False

    async def epoch(self) -> int:
        epoch: Any = await self.bus._redis.get(names.MANAGER_EPOCH)
        return int(epoch)

    async def everything(self) -> dict[bytes, Any]:
        """All that Redis holds but the lease, which is renewed and runs out by itself, and log lines."""
        keys: list[Any] = await self.bus._redis.keys("*")
        keys = [key for key in keys if key != names.MANAGER_LEASE.encode() and not key.endswith(b":logs")]
        return {key: await self.bus._redis.dump(key) for key in keys}


@pytest.fixture
async def pair(tmp_path: Path) -> AsyncIterator[Pair]:
    redis = RedisServer(tmp_path / "redis", aof=True)
    redis.start()
    pair = Pair(redis, tmp_path)
    try:
        await pair.start()
        yield pair
    finally:
        await pair.stop()
        redis.stop()


async def test_standby_leads_within_the_lease_after_the_leader_is_killed(
    pair: Pair,
) -> None:
    pair.start_worker("w1")
    pair.start_worker("w2")
    await pair.request(groups=4, max_tokens=120)
    await eventually(lambda: pair.generated(500))
    before = await pair.epoch()
    pair.one.kill()
    since_death = Stopwatch()
    await eventually(lambda: pair.leads(pair.two))
    assert since_death.read() < LEASE_S + 1.0
    assert await pair.epoch() == before + 1
    await pair.delivered_whole(32, 120)
    audit = (await pair.http.get(f"{pair.two.url}/v1/jobs/{pair.id}/audit")).json()
    assert audit["requested"] == audit["delivered"] == 32
    assert (
        audit["tokens_generated"] - sum(audit["tokens_regenerated"].values()) == audit["tokens_delivered"] == 32 * 120
    )


async def test_standby_leads_without_waiting_for_a_dead_leaders_lease(
    tmp_path: Path, redis_server: RedisServer
) -> None:
    redis_server.flush()
    pair = Pair(redis_server, tmp_path, RLBOOST_MANAGER_LEADER_LEASE_S=str(NEVER_S))
    try:
        await pair.start()
        await eventually(lambda: "leader_watched" in pair.two.log())
        pair.one.kill()
        await eventually(lambda: pair.leads(pair.two))
        assert await pair.epoch() == 2
    finally:
        await pair.stop()


async def test_paused_leader_is_superseded_and_writes_nothing(pair: Pair) -> None:
    pair.start_worker("w1")
    await pair.request(groups=2, max_tokens=100)
    await eventually(lambda: pair.generated(100))
    os.kill(pair.one.pid, signal.SIGSTOP)
    await eventually(lambda: pair.leads(pair.two))
    await pair.delivered_whole(16, 100)
    await pair.stop_workers()
    # The second is stopped too, so that whatever changes now was done by the first; and there is something to do.
    os.kill(pair.two.pid, signal.SIGSTOP)
    await pair.bus._redis.persist(names.MANAGER_LEASE)  # or the first would rightly lead again, once it had run out
    await pair.request(groups=1, max_tokens=100)
    everything = await pair.everything()
    os.kill(pair.one.pid, signal.SIGCONT)
    await eventually(lambda: "leadership_lost" in pair.one.log())
    assert await pair.everything() == everything
    os.kill(pair.two.pid, signal.SIGCONT)
    await eventually(lambda: pair.stands_by(pair.one, behind=pair.two))
    pair.start_worker("w1")  # under another name it would wait until the lease of the first has expired
    await pair.delivered_whole(24, 100)
    assert await pair.leads(pair.two)


async def test_stopped_leader_hands_over_within_a_second(pair: Pair) -> None:
    pair.start_worker("w1")
    await pair.request(groups=2, max_tokens=100)
    await eventually(lambda: pair.generated(100))
    os.kill(pair.one.pid, signal.SIGTERM)
    since_asked = Stopwatch()
    await eventually(lambda: pair.leads(pair.two))
    assert since_asked.read() < 1.0
    assert pair.one.wait() == 0
    await pair.delivered_whole(16, 100)


async def test_one_manager_leads_with_a_higher_epoch_after_a_redis_restart(pair: Pair) -> None:
    pair.start_worker("w1")
    await pair.request(groups=1, max_tokens=20)
    await pair.delivered_whole(8, 20)
    await pair.stop_workers()
    before = await pair.epoch()
    pair.redis.restart()
    await pair.bus._redis.connection_pool.disconnect()

    async def raised() -> bool:
        return await pair.epoch() > before

    async def one_leads() -> bool:
        return [await pair.leads(manager) for manager in (pair.one, pair.two)].count(True) == 1

    await eventually(raised)
    await eventually(one_leads)
    pair.start_worker("w2")
    await pair.request(groups=1, max_tokens=20)
    await pair.delivered_whole(16, 20)
    assert await one_leads()


async def test_clients_and_workers_reach_the_leader_through_the_standby(pair: Pair) -> None:
    def ask() -> tuple[list[str], str, set[str]]:
        with Client(pair.two.url, TOKEN) as client:
            created = client.jobs.create({**SPEC, "name": "second"})["id"]
            jobs = [job["id"] for job in client.jobs.list()]
            client.jobs.cancel(created)
            return jobs, created, {event.kind for event in client.jobs.events(created)}

    jobs, created, kinds = await asyncio.to_thread(ask)
    assert jobs == [pair.id, created]
    assert "job_state_changed" in kinds
    joined = await join(pair.two.url, TOKEN, "w", "preemptible")
    assert await joined.bus.length(names.worker_reports(joined.worker)) == 0
    await joined.bus.close()
    stranger = await pair.http.get(f"{pair.two.url}/v1/jobs", headers={"Authorization": "Bearer wrong"})
    assert stranger.status_code == 401


async def test_restarted_manager_does_not_wait_for_its_own_lease(
    tmp_path: Path,
) -> None:
    redis = RedisServer(tmp_path / "redis")
    redis.start()
    pair = Pair(redis, tmp_path, RLBOOST_MANAGER_LEADER_LEASE_S="600")
    try:
        pair.one.start()
        before = await pair.epoch()
        pair.one.kill()
        pair.one.start()  # ready long before the lease of its predecessor ends
        assert await pair.epoch() == before + 1
    finally:
        await pair.stop()
        redis.stop()


async def test_managers_wait_while_redis_has_no_memory(pair: Pair) -> None:
    pair.forgives_outages()
    pair.start_worker("w1", slots=16)
    await pair.request(groups=2, max_tokens=60)

    def refusals() -> int:
        return sum(manager.log().count("used memory > 'maxmemory'") for manager in (pair.one, pair.two))

    for window in range(3):
        await eventually(partial(pair.generated, 100 + 100 * window))
        before = refusals()
        await pair.bus._redis.config_set("maxmemory", 1)
        await eventually(lambda before=before: refusals() > before)  # type: ignore[misc]
        await pair.bus._redis.config_set("maxmemory", 0)
    await pair.delivered_whole(16, 60)
    assert [await pair.leads(manager) for manager in (pair.one, pair.two)].count(True) == 1
