"""Reserved workers that have a version before its commit: a real store, real workers, trainers that die."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from shared.errors import Fatal, StoreUnavailable
from shared.messages import UseVersion
from shared.redis_bus import RedisBus
from shared.waiting import Waits
from shared.weights.client import StoreClient
from shared.weights.drafts import DraftPart
from shared.weights.following import DraftFollower
from shared.weights.manifest import Part
from shared.weights.publisher import Publisher, Shard
from shared.weights.puller import Puller
from tests.support import published_model
from tests.support.eventually import eventually
from tests.support.mortal_publisher import MIB, shards
from tests.support.redis_server import RedisServer
from tests.support.service_process import TOKEN, ServiceProcess
from tests.support.worker_manager import JOB, JoinServer, WorkerManager

WIDE = 200_000
"""Vocabulary of a model of 26 MB: several chunks, and less than workers ask each other for."""
N_MIB = 24


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path / "redis")
    server.start()
    yield server
    server.stop()


@pytest.fixture
def store(tmp_path: Path, redis: RedisServer) -> Iterator[ServiceProcess]:
    env = {"RLBOOST_WEIGHT_STORE_DIR": str(tmp_path / "store")}
    process = ServiceProcess("weight_store", "RLBOOST_WEIGHT_STORE_", tmp_path, redis.url, env)
    process.start()
    yield process
    process.kill()


@pytest.fixture
def publisher(client: StoreClient) -> Publisher:
    return Publisher(client, Waits(), limit_s=60, chunk_bytes=MIB)


@pytest.fixture
async def following(client: StoreClient, puller: Puller) -> AsyncIterator[None]:
    """A follower that asks again and again, whatever happens to the store."""
    follower = DraftFollower(client, puller)

    async def follow() -> None:
        while True:
            try:
                await follower.follow(JOB)
            except StoreUnavailable:
                await asyncio.sleep(0.02)

    task = asyncio.create_task(follow(), name="follow")
    yield
    task.cancel()
    await asyncio.wait({task})


def in_cache(tmp_path: Path) -> set[str]:
    return {path.name for path in (tmp_path / "cache" / "chunks").iterdir()}


def digests(part: Part) -> set[str]:
    return {chunk.digest for chunk in part.chunks}


async def commit(publisher: Publisher, version: int, part: Part) -> None:
    await publisher.commit(JOB, version, expect=version - 1, part_digests=[part.digest], config_json="{}")


async def begun(publisher: Publisher, puller: Puller, n_mib: int) -> None:
    """Commit the job's first version, and pull it."""
    await commit(publisher, 0, await publisher.publish(JOB, 0, 0, shards(0, n_mib)))
    await puller.pull(JOB, 0)


# The client and the real routes.


async def test_the_routes_say_what_the_client_told_them(client: StoreClient, publisher: Publisher) -> None:
    part = await publisher.publish(JOB, 0, 0, shards(0, 9))
    news = await client.draft(JOB, after=-1, wait_s=0.0)
    assert news.version == 0
    assert {chunk for said in news.parts for chunk in said.chunks} == set(part.chunks)
    assert (await client.draft(JOB, after=news.cursor, wait_s=0.0)).parts == ()
    waiting = asyncio.create_task(client.draft(JOB, after=news.cursor, wait_s=20.0))
    more = DraftPart(rank=1, start=0, chunks=part.chunks[:1])
    await client.put_draft(JOB, 0, more)
    assert (await waiting).parts == (more,)
    await commit(publisher, 0, part)
    assert (await client.draft(JOB, after=-1, wait_s=0.0)).version is None
    await client.put_draft(JOB, 0, more)
    assert (await client.draft(JOB, after=-1, wait_s=0.0)).version is None


async def test_the_routes_want_the_token_and_a_wait_that_clients_outlast(
    store: ServiceProcess, client: StoreClient
) -> None:
    async with StoreClient(store.url, "another") as stranger:
        with pytest.raises(Fatal, match="RLBOOST_TOKEN"):
            await stranger.draft(JOB, after=-1, wait_s=0.0)
        with pytest.raises(Fatal, match="RLBOOST_TOKEN"):
            await stranger.put_draft(JOB, 0, DraftPart(rank=0, start=0, chunks=()))
    with pytest.raises(Fatal, match="wait_s"):
        await client.draft(JOB, after=-1, wait_s=29.0)


async def test_a_store_that_is_stopped_does_not_wait_for_who_waits(store: ServiceProcess, client: StoreClient) -> None:
    waiting = asyncio.create_task(client.draft(JOB, after=-1, wait_s=20.0))
    await client.models()
    async with asyncio.timeout(4.0):
        assert await asyncio.to_thread(store.stop) == 0
        assert (await waiting).version is None


# Whole processes.


class Site:
    """A join route, and workers that serve the first version of a model."""

    def __init__(self, directory: Path, redis: RedisServer, store_url: str) -> None:
        self._directory = directory
        self._hired: list[ServiceProcess] = []
        self.join = JoinServer(TOKEN, redis.url, store_url)

    def hire(self, role: str) -> ServiceProcess:
        folder = self._directory / role
        folder.mkdir()
        cache = str(folder / "cache")
        defaults = {"URL": self.join.url, "NAME": role, "ROLE": role, "TRAINER": "t", "SLOTS": "2", "CACHE_DIR": cache}
        env = {f"RLBOOST_WORKER_{key}": value for key, value in defaults.items()}
        worker = ServiceProcess("rollout_worker", "RLBOOST_WORKER_", folder, "redis://127.0.0.1:1/0", env)
        worker.launch()
        self._hired.append(worker)
        return worker

    def held(self, role: str) -> set[str]:
        return {path.name for path in (self._directory / role / "cache" / role / "chunks").iterdir()}

    def close(self) -> None:
        for worker in self._hired:
            worker.kill()
        self.join.close()


@pytest.fixture
def site(tmp_path: Path, redis: RedisServer, store: ServiceProcess) -> Iterator[Site]:
    site = Site(tmp_path, redis, store.url)
    yield site
    site.close()


@pytest.fixture
async def manager(redis: RedisServer) -> AsyncIterator[WorkerManager]:
    bus = RedisBus(redis.url)
    yield WorkerManager(bus)
    await bus.close()


def pulls(worker: ServiceProcess) -> list[dict[str, Any]]:
    return [json.loads(line) for line in worker.log().splitlines() if '"weights_pulled"' in line]


async def test_a_reserved_worker_has_the_version_at_its_commit_and_a_spot_worker_has_not(
    site: Site, store: ServiceProcess, client: StoreClient, manager: WorkerManager
) -> None:
    await published_model.publish(client, JOB, 0, seed=0, vocabulary=WIDE)
    roles = ("reserved", "preemptible")
    processes = {role: site.hire(role) for role in roles}
    workers = [await manager.joined(nth=number, within_s=60.0) for number in (1, 2)]
    for worker in workers:
        await manager.send(worker, UseVersion(job_id=JOB, version=0))
    await eventually(lambda: [len(pulls(processes[role])) for role in roles] == [1, 1], within_s=60.0)
    before = {role: site.held(role) for role in roles}
    publisher = Publisher(client, Waits(), chunk_bytes=MIB // 4)
    part = await publisher.publish(JOB, 1, 0, published_model.shards(2, 1, WIDE))
    new = digests(part) - before["reserved"]
    await eventually(lambda: new <= site.held("reserved"), within_s=30.0)
    assert site.held("preemptible") == before["preemptible"]
    config = published_model.config(2, WIDE).to_json_string(use_diff=False)
    await publisher.commit(JOB, 1, expect=0, part_digests=[part.digest], config_json=config)
    for worker in workers:
        await manager.send(worker, UseVersion(job_id=JOB, version=1))
    # The pull begins when the engine, whose libraries take long to import, is through with the version before.
    await eventually(lambda: [len(pulls(processes[role])) for role in roles] == [2, 2], within_s=120.0)
    n_bytes = sum(chunk.n_bytes for chunk in set(part.chunks) if chunk.digest in new)
    ahead, usual = (pulls(processes[role])[-1] for role in roles)
    assert (ahead["version"], ahead["bytes_prefetched"]) == (1, n_bytes)
    assert (ahead["from_store"], ahead["from_peers"], ahead["bytes_dense"]) == (0, 0, 0)
    assert (usual["bytes_prefetched"], usual["bytes_dense"]) == (0, n_bytes)


async def test_a_store_killed_in_the_middle_forgets_drafts_and_nothing_else(
    store: ServiceProcess, publisher: Publisher, puller: Puller, following: None, tmp_path: Path
) -> None:
    n_mib = 3 * N_MIB
    await begun(publisher, puller, n_mib)
    old = in_cache(tmp_path)
    loop = asyncio.get_running_loop()

    async def some_have_come() -> None:
        await eventually(lambda: len(in_cache(tmp_path)) >= len(old) + N_MIB, within_s=60.0)

    def interrupted() -> Iterator[Shard]:
        for number, shard in enumerate(shards(1, n_mib)):
            if number == 2 * N_MIB:
                asyncio.run_coroutine_threadsafe(some_have_come(), loop).result()
                store.kill()
                store.start()
            yield shard

    part = await publisher.publish(JOB, 1, 0, interrupted())
    last = {chunk.digest for chunk in part.chunks[-N_MIB:]}
    await eventually(lambda: last <= in_cache(tmp_path), within_s=60.0)
    await commit(publisher, 1, part)
    pulled = await puller.pull(JOB, 1)
    assert [bytes(data) for _, data in pulled.tensors()] == [bytes(shard.data) for shard in shards(1, n_mib)]
    assert puller.last.bytes_prefetched >= 2 * N_MIB * MIB
    assert puller.last.bytes_prefetched + puller.last.bytes_dense == n_mib * MIB


async def test_a_trainer_killed_in_an_upload_is_succeeded_by_one_with_other_bits(
    store: ServiceProcess, publisher: Publisher, puller: Puller, following: None, tmp_path: Path
) -> None:
    await begun(publisher, puller, N_MIB)
    old = in_cache(tmp_path)
    words = (store.url, TOKEN, JOB, "1", "7", str(2 * N_MIB))
    dead = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.support.mortal_publisher", *words, stdout=asyncio.subprocess.PIPE
    )
    assert dead.stdout is not None
    assert await dead.stdout.readline() == b"uploading no more\n"
    # As much as a version has, of the bits that nobody will commit.
    await eventually(lambda: len(in_cache(tmp_path)) == len(old) + N_MIB, within_s=60.0)
    dead.kill()
    await dead.wait()
    part = await publisher.publish(JOB, 1, 0, shards(1, N_MIB))
    await eventually(lambda: digests(part) <= in_cache(tmp_path), within_s=30.0)
    assert in_cache(tmp_path) == old | digests(part)
    await commit(publisher, 1, part)
    pulled = await puller.pull(JOB, 1)
    assert [bytes(data) for _, data in pulled.tensors()] == [bytes(shard.data) for shard in shards(1, N_MIB)]
    assert (puller.last.bytes_prefetched, puller.last.from_store) == (N_MIB * MIB, 0)
    assert in_cache(tmp_path) == old | digests(part)
