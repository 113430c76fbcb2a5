"""The weight store as a process: publish, commit and pull, and their failure modes."""

from __future__ import annotations

import asyncio
import contextlib
import random
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import numpy.typing as npt
import pytest

from rlboost.shared.errors import (
    BadSignature,
    BusUnavailable,
    ConfigError,
    Conflict,
    NotFound,
    StoreUnavailable,
    WaitTimedOut,
)
from rlboost.shared.http.access import issue_store_credential
from rlboost.shared.messages import WeightsCommitted
from rlboost.shared.process.waiting import Waits
from rlboost.shared.redis.bus import RedisBus
from rlboost.shared.streams.bus import START, HashSet
from rlboost.shared.streams.names import JOBS, WEIGHTS_COMMITTED
from rlboost.shared.weights.access import IssuedAccess, ManifestKey
from rlboost.shared.weights.cache import Cache
from rlboost.shared.weights.client import StoreClient
from rlboost.shared.weights.manifest import CHUNK_BYTES, ChunkRef, Shard, chunks_among, digest_of
from rlboost.shared.weights.peers.selection import BlobIndex
from rlboost.shared.weights.publisher import Publisher
from rlboost.shared.weights.puller import OnSettled, Puller, StoreSource, Traffic
from rlboost.shared.weights.rest_models import ModelInfo, VersionInfo
from tests.support.eventually import eventually
from tests.support.redis_server import RedisServer
from tests.support.service_process import TOKEN, ServiceProcess
from tests.support.tcp_proxy import TcpProxy

JOB = "job-1"
CONFIG = '{"model_type": "llama"}'
MIB = 1 << 20
SMALL_DISK_BYTES = 6 * MIB

Weights = dict[str, npt.NDArray[Any]]


@pytest.fixture
def store(tmp_path: Path, redis_url: str) -> Iterator[ServiceProcess]:
    process = store_process(tmp_path, redis_url)
    process.start()
    yield process
    process.kill()


def store_process(tmp_path: Path, redis_url: str) -> ServiceProcess:
    env = {"RLBOOST_WEIGHT_STORE_DIR": str(tmp_path / "store")}
    return ServiceProcess("weight_store", "RLBOOST_WEIGHT_STORE_", tmp_path, redis_url, env)


@pytest.fixture
def publisher(client: StoreClient) -> Publisher:
    return Publisher(client, Waits(), limit_s=60)


def make_weights(seed: int, n_bytes: int = 10 * MIB) -> Weights:
    """One large tensor over several chunks, and some small ones that share one."""
    rng = np.random.default_rng(seed)
    rows = n_bytes // 4096
    return {
        "embed": rng.integers(0, 1 << 16, (rows, 2048), dtype=np.uint16),
        "norm": rng.standard_normal(64, dtype=np.float32),
        "scale": np.array(seed, dtype=np.float32),
        "nothing": np.zeros((0, 4), dtype=np.float32),
        "head": rng.standard_normal((64, 33), dtype=np.float32),
    }


def dtype_of(array: npt.NDArray[Any]) -> str:
    return "bfloat16" if array.dtype == np.uint16 else str(array.dtype)


def shards_of(weights: Weights) -> list[Shard]:
    return [
        Shard(name, dtype_of(array), array.shape, (0,) * array.ndim, array.shape, array.data)
        for name, array in weights.items()
    ]


async def publish(publisher: Publisher, version: int, weights: Weights, job: str = JOB) -> VersionInfo:
    part = await publisher.publish(job, version, 0, shards_of(weights))
    return await publisher.commit(job, version, expect=version - 1, part_digests=[part.digest], config_json=CONFIG)


async def assert_pulls(puller: Puller, version: int, weights: Weights, job: str = JOB) -> None:
    pulled = await puller.pull(job, version)
    assert pulled.manifest.config_json == CONFIG
    found = {entry.name: (entry, bytes(data)) for entry, data in pulled.tensors()}
    assert list(found) == list(weights)
    for name, array in weights.items():
        entry, data = found[name]
        assert (entry.dtype, entry.shape) == (dtype_of(array), array.shape)
        assert data == array.tobytes(), f"{name} is not what was published"


async def metric(client: StoreClient, name: str) -> float:
    async with httpx.AsyncClient(headers={"Authorization": f"Bearer {TOKEN}"}) as http:
        text = (await http.get(f"{client.url}/metrics")).text
    return next(float(line.split()[1]) for line in text.splitlines() if line.startswith(f"{name} "))


def chunk_files(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "store" / "chunks").glob("*/*"))


# What it is for.


async def test_pull_returns_the_published_bytes(
    publisher: Publisher, puller: Puller, client: StoreClient, redis_url: str
) -> None:
    weights = make_weights(0)
    assert await publisher.head(JOB) is None
    info = await publish(publisher, 0, weights)
    assert await publisher.head(JOB) == info
    assert info.n_bytes == sum(array.nbytes for array in weights.values())
    await assert_pulls(puller, 0, weights)
    bus = RedisBus(redis_url)
    entry = (await eventually(lambda: bus.read({WEIGHTS_COMMITTED: START})))[0]
    message = entry.message
    assert isinstance(message, WeightsCommitted)
    assert (message.job_id, message.version, message.manifest_digest) == (JOB, 0, info.digest)
    await bus.close()


async def test_cancelled_publish_ends_once_its_thread_has_read_the_shards(publisher: Publisher) -> None:
    """Until then the caller must not change them."""
    is_read, may_end = threading.Event(), threading.Event()

    def read_slowly() -> Iterator[Shard]:
        is_read.set()
        may_end.wait(20.0)
        yield from shards_of({"w": np.arange(10)})

    publishing = asyncio.create_task(publisher.publish(JOB, 0, 0, read_slowly()), name="publish")
    await asyncio.to_thread(is_read.wait, 20.0)
    publishing.cancel()
    assert (await asyncio.wait({publishing}, timeout=0.2))[0] == set()
    may_end.set()
    await asyncio.wait({publishing}, timeout=20.0)
    assert publishing.cancelled()


async def test_stored_and_cached_chunks_are_not_transferred_again(
    publisher: Publisher, puller: Puller, client: StoreClient
) -> None:
    weights = make_weights(0)
    total = sum(array.nbytes for array in weights.values())
    await publish(publisher, 0, weights)
    await puller.pull(JOB, 0)
    assert await metric(client, "rlboost_weight_store_bytes_in_total") == total
    assert await metric(client, "rlboost_weight_store_bytes_out_total") == total
    # A change in the last tensor touches the last chunk.
    weights["head"] = weights["head"] + np.float32(1)
    await publish(publisher, 1, weights)
    await assert_pulls(puller, 1, weights)
    assert await metric(client, "rlboost_weight_store_bytes_in_total") <= total + CHUNK_BYTES
    assert await metric(client, "rlboost_weight_store_bytes_out_total") <= total + CHUNK_BYTES


async def test_two_ranks_publish_shards_of_one_tensor(
    publisher: Publisher, puller: Puller, store: ServiceProcess
) -> None:
    rng = np.random.default_rng(0)
    rows, columns = rng.standard_normal((513, 1024), dtype=np.float32), rng.standard_normal((7, 9), dtype=np.float32)

    def shards(rank: int) -> Iterator[Shard]:
        low, n = (0, 257) if rank == 0 else (257, 256)
        yield Shard("rows", "float32", (513, 1024), (low, 0), (n, 1024), rows[low : low + n].data)
        left, width = (0, 4) if rank == 0 else (4, 5)
        block = np.ascontiguousarray(columns[:, left : left + width])
        yield Shard("columns", "float32", (7, 9), (0, left), (7, width), block.data)
        if rank == 0:
            yield Shard("whole", "int64", (3,), (0,), (3,), np.arange(3).data)

    async with StoreClient(store.url, TOKEN) as other:
        second = Publisher(other, Waits(), chunk_bytes=100_000)
        parts = await asyncio.gather(publisher.publish(JOB, 0, 0, shards(0)), second.publish(JOB, 0, 1, shards(1)))
    digests = [part.digest for part in parts]
    with pytest.raises(Conflict, match=r"tensor rows: its shards cover 263168 of 525312"):
        await publisher.commit(JOB, 0, expect=-1, part_digests=digests[:1], config_json=CONFIG)
    await publisher.commit(JOB, 0, expect=-1, part_digests=digests, config_json=CONFIG)
    await assert_pulls(puller, 0, {"rows": rows, "columns": columns, "whole": np.arange(3)})


async def test_of_many_publishers_at_once_one_wins_each_version(store: ServiceProcess) -> None:
    async def compete(number: int) -> VersionInfo | None:
        async with StoreClient(store.url, TOKEN) as client:
            try:
                return await publish(Publisher(client, Waits()), 0, {"w": np.full(1000, number)})
            except Conflict:
                return None

    results = await asyncio.gather(*(compete(number) for number in range(6)))
    winners = [info for info in results if info is not None]
    assert len(winners) == 1
    async with StoreClient(store.url, TOKEN) as client:
        assert await client.head(JOB) == winners[0]


async def test_old_versions_are_removed_and_the_listing_shows_the_retained(
    publisher: Publisher, puller: Puller, client: StoreClient
) -> None:
    for version in range(6):
        await publish(publisher, version, {"w": np.full(1000, version)})
        if version == 0:
            await publisher.pin(JOB, 0)
    async with httpx.AsyncClient(base_url=client.url, headers={"Authorization": f"Bearer {TOKEN}"}) as http:
        info = ModelInfo.model_validate((await http.get("/v1/models")).json()["models"][0])
        assert info == ModelInfo.model_validate((await http.get(f"/v1/models/{JOB}")).json())
    assert [(known.version, known.pinned, known.n_bytes) for known in info.versions] == [
        (0, True, 8000),
        (2, False, 8000),
        (3, False, 8000),
        (4, False, 8000),
        (5, False, 8000),
    ]
    with pytest.raises(NotFound, match="version 1 of job job-1"):
        await puller.pull(JOB, 1)
    await client.unpin(JOB, 0)
    with pytest.raises(NotFound):
        await puller.pull(JOB, 0)


async def state_is(redis_url: str, state: str) -> None:
    bus = RedisBus(redis_url)
    await bus.transact([HashSet(JOBS, {JOB: f'{{"state": "{state}"}}'})])
    await bus.close()


async def test_publish_at_the_limit_continues_once_an_ended_job_is_deleted(
    store: ServiceProcess, client: StoreClient, publisher: Publisher, redis_url: str
) -> None:
    store.kill()
    store.env["RLBOOST_WEIGHT_STORE_MAX_BYTES"] = str(6 * MIB)
    store.start()
    await publish(publisher, 0, {"w": np.zeros(MIB, np.float32)})
    second: Weights = {"w": np.ones(MIB, np.float32)}
    ((ref, data),) = chunks_among(shards_of(second), {digest_of(second["w"].tobytes())})
    with pytest.raises(StoreUnavailable, match=r"at most 6291456 bytes: delete the weights of ended jobs"):
        await client.put_chunk(ref, memoryview(data))
    publishing = asyncio.create_task(publish(publisher, 0, second, job="job-2"), name="publish")
    async with httpx.AsyncClient(base_url=client.url, headers={"Authorization": f"Bearer {TOKEN}"}) as http:
        for state, status in (("running", 409), ("completed", 204), ("completed", 404)):
            await state_is(redis_url, state)
            assert (await http.delete(f"/v1/models/{JOB}")).status_code == status
    assert await client.head(JOB) is None

    await publishing


async def test_the_cache_keeps_the_last_two_versions(publisher: Publisher, puller: Puller, tmp_path: Path) -> None:
    first = None
    for version in range(3):
        await publish(publisher, version, {"w": np.full(1000, version)})
        pulled = await puller.pull(JOB, version)
        first = first or pulled
    assert len(list((tmp_path / "cache" / "chunks").iterdir())) == 2
    assert first is not None
    with pytest.raises(NotFound, match="no longer in the cache"):
        list(first.tensors())


# Who may, and what is refused.


async def test_worker_with_an_expired_credential_waits_for_a_new_one(
    store: ServiceProcess, publisher: Publisher, tmp_path: Path
) -> None:
    weights = make_weights(1)
    await publish(publisher, 0, weights)
    access = IssuedAccess(issue_store_credential(TOKEN, "w-1", time.time() - 60, life_s=30), ManifestKey(TOKEN).public)
    waits = Waits()
    async with StoreClient(store.url, access) as client:
        with pytest.raises(StoreUnavailable, match="waits for a new credential"):
            await client.head(JOB)
        puller = Puller(client, Cache(tmp_path / "worker"), waits, limit_s=60)
        pulling = asyncio.create_task(assert_pulls(puller, 0, weights))
        await eventually(lambda: any("pull version 0" in wait.because for wait in waits.current()))
        access.credential = issue_store_credential(TOKEN, "w-1", time.time())
        await pulling
        puller.close()
        with pytest.raises(ConfigError, match="scope 'admin'"):
            await client.pin(JOB, 0)


async def test_worker_refuses_weights_that_another_system_signed(
    store: ServiceProcess, publisher: Publisher, tmp_path: Path
) -> None:
    await publish(publisher, 0, make_weights(1))
    access = IssuedAccess(issue_store_credential(TOKEN, "w-1", time.time()), ManifestKey("another").public)
    async with StoreClient(store.url, access) as client:
        puller = Puller(client, Cache(tmp_path / "worker"), Waits(), limit_s=60)
        with pytest.raises(BadSignature, match="not signed by this system's weight store"):
            await puller.pull(JOB, 0)
        assert puller.last.from_store == 0
        puller.close()


async def test_a_wrong_token_is_refused_everywhere(store: ServiceProcess) -> None:
    async with httpx.AsyncClient(base_url=store.url, headers={"Authorization": "Bearer wrong"}) as http:
        assert (await http.get("/healthz")).status_code == 200
        spec = (await http.get("/openapi.json", headers={"Authorization": f"Bearer {TOKEN}"})).json()
        routes = [(path, method) for path, methods in spec["paths"].items() for method in methods]
        assert len(routes) > 10
        for path, method in routes:
            if path not in ("/healthz", "/readyz"):
                answer = await http.request(method, path.replace("{", "").replace("}", ""))
                assert answer.status_code == 401, f"{method} {path}"
                assert answer.headers["content-type"] == "application/problem+json"
    async with StoreClient(store.url, "wrong") as client:
        with pytest.raises(ConfigError, match="set RLBOOST_TOKEN"):
            await client.head(JOB)


async def test_a_chunk_under_another_digest_is_refused(store: ServiceProcess, tmp_path: Path) -> None:
    digest = digest_of(b"something else")
    async with httpx.AsyncClient(base_url=store.url, headers={"Authorization": f"Bearer {TOKEN}"}) as http:
        answer = await http.put(f"/v1/chunks/{digest}", content=b"some bytes")
        assert (answer.status_code, "send them again" in answer.json()["detail"]) == (422, True)
        answer = await http.put(f"/v1/chunks/{digest}", content=bytes(CHUNK_BYTES + 1))
        assert answer.status_code == 413
    assert chunk_files(tmp_path) == []


async def test_no_path_leads_out_of_the_directory(store: ServiceProcess) -> None:
    paths = [
        "/v1/models/../chunks/head",
        "/v1/models/%2e%2e/versions/0",
        "/v1/models/%2e%2e%2f%2e%2e%2fetc/head",
        "/v1/models/.hidden/head",
        "/v1/models/a/versions/-1",
        "/v1/models/a/versions/..%2f..",
        "/v1/chunks/..%2f..%2fmodels",
        "/v1/chunks/%2e%2e",
    ]
    async with httpx.AsyncClient(headers={"Authorization": f"Bearer {TOKEN}"}) as http:
        for path in paths:
            url = httpx.URL(store.url).copy_with(raw_path=path.encode())
            assert (await http.get(url)).status_code in (404, 405, 422), path


def test_a_port_in_use_is_one_clear_line_and_exit_code_2(store: ServiceProcess, tmp_path: Path, redis_url: str) -> None:
    (tmp_path / "second").mkdir()
    second = store_process(tmp_path / "second", redis_url)
    second.env["RLBOOST_WEIGHT_STORE_PORT"] = str(store.port)
    second.launch()
    assert second.wait() == 2
    assert second.log() == (
        f"weight_store: cannot listen on 127.0.0.1:{store.port}: Address already in use; "
        "stop the process that uses it, or choose another port\n"
    )


def test_a_stop_is_exit_code_0(store: ServiceProcess) -> None:
    assert store.stop() == 0


# Failure modes.


async def test_pull_resumes_within_a_chunk_after_the_store_was_killed(
    store: ServiceProcess, publisher: Publisher, client: StoreClient, tmp_path: Path
) -> None:
    weights: Weights = {"w": np.random.default_rng(0).integers(0, 256, CHUNK_BYTES, dtype=np.uint8)}
    await publish(publisher, 0, weights)
    async with TcpProxy(store.port) as proxy, StoreClient(proxy.url, TOKEN) as through_proxy:
        puller = Puller(through_proxy, Cache(tmp_path / "cache"), Waits(), limit_s=60)
        proxy.break_after = 3 * MIB
        proxy.on_break = store.kill
        pulling = asyncio.create_task(assert_pulls(puller, 0, weights), name="pull")
        await eventually(lambda: proxy.break_after is None)
        await asyncio.to_thread(store.start)
        await pulling
        puller.close()
    # The new process has sent about what was lacking: the proxy's buffers may have been lost with the connection.
    assert 0 < await metric(client, "rlboost_weight_store_bytes_out_total") < CHUNK_BYTES - 2 * MIB


async def test_next_process_resumes_from_the_cache(
    store: ServiceProcess, publisher: Publisher, client: StoreClient, tmp_path: Path
) -> None:
    weights: Weights = {"w": np.random.default_rng(0).integers(0, 256, 2 * CHUNK_BYTES, dtype=np.uint8)}
    await publish(publisher, 0, weights)
    cached = tmp_path / "cache" / "chunks"
    cached.mkdir(parents=True)
    first, second = (weights["w"].tobytes()[at : at + CHUNK_BYTES] for at in (0, CHUNK_BYTES))
    # A killed process leaves one whole chunk and one partial chunk.
    (cached / digest_of(first)).write_bytes(first)
    (cached / f"{digest_of(second)}.7f").write_bytes(second[: 3 * MIB])
    puller = Puller(client, Cache(tmp_path / "cache"), Waits())
    await assert_pulls(puller, 0, weights)
    puller.close()
    assert await metric(client, "rlboost_weight_store_bytes_out_total") == CHUNK_BYTES
    assert {path.name for path in cached.iterdir()} == {digest_of(first), digest_of(second)}
    # A corrupt blob in the cache is detected and replaced, by the next process or by one that has verified it before.
    (cached / digest_of(first)).write_bytes(bytes(CHUNK_BYTES))
    puller = Puller(client, Cache(tmp_path / "cache"), Waits())
    await assert_pulls(puller, 0, weights)
    (cached / digest_of(second)).write_bytes(bytes(CHUNK_BYTES))
    puller.verify_cache_again()
    await assert_pulls(puller, 0, weights)
    puller.close()
    assert await metric(client, "rlboost_weight_store_bytes_out_total") == 3 * CHUNK_BYTES


async def publish_adapter(publisher: Publisher) -> None:
    """Publish a base model as version 0 and an adapter of it as version 1."""
    await publish(publisher, 0, make_weights(0))
    part = await publisher.publish(JOB, 1, 0, shards_of({"lora": np.arange(10.0)}))
    await publisher.commit(
        JOB, 1, expect=0, part_digests=[part.digest], config_json=CONFIG, base_version=0, adapter_json="{}"
    )


async def test_base_of_an_adapter_is_retained_while_another_job_is_pulled(
    publisher: Publisher, puller: Puller, client: StoreClient
) -> None:
    await publish_adapter(publisher)
    sent = 0
    await puller.pull(JOB, 1)
    sent += puller.last.from_store
    await publish(publisher, 0, {"w": np.arange(100)}, job="job-2")
    await puller.pull("job-2", 0)
    sent += puller.last.from_store

    async def is_counted() -> bool:
        return await metric(client, "rlboost_weight_store_bytes_out_total") >= sent

    await eventually(is_counted)  # the store counts a chunk after its last byte has left
    await puller.pull(JOB, 1)
    assert puller.last.from_store == 0
    assert await metric(client, "rlboost_weight_store_bytes_out_total") == sent


class Offered(StoreSource):
    """Notes what it was last to offer to peers when it fetched each blob."""

    def __init__(self, client: StoreClient, cache: Cache) -> None:
        super().__init__(client, cache, concurrency=1)
        self.at_fetch: dict[str, set[str]] = {}

    def offer(self, indexes: Sequence[BlobIndex]) -> None:
        self._offered = {digest for index in indexes for digest in index.digests}

    async def fetch(self, blobs: Sequence[ChunkRef], traffic: Traffic, on_settled: OnSettled) -> None:
        self.at_fetch |= {blob.digest: self._offered for blob in blobs}
        await super().fetch(blobs, traffic, on_settled)


async def test_adapter_is_offered_to_peers_while_its_base_is_pulled(
    publisher: Publisher, client: StoreClient, tmp_path: Path
) -> None:
    await publish_adapter(publisher)
    cache = Cache(tmp_path / "offering")
    source = Offered(client, cache)
    with contextlib.closing(Puller(client, cache, Waits(), source=source)) as puller:
        adapter = await puller.pull(JOB, 1)
    assert adapter.base is not None
    offered = [source.at_fetch[chunk.digest] for chunk in adapter.base.manifest.chunks()]
    assert all({chunk.digest for chunk in adapter.manifest.chunks()} <= digests for digests in offered)


async def test_damaged_base_of_an_adapter_is_pulled_again(publisher: Publisher, puller: Puller, tmp_path: Path) -> None:
    await publish_adapter(publisher)
    await puller.pull(JOB, 1)
    (damaged, *_) = (await puller.pull(JOB, 0)).manifest.chunks()
    file = tmp_path / "cache" / "chunks" / damaged.digest
    file.write_bytes(bytes(damaged.n_bytes))
    puller.verify_cache_again()
    await puller.pull(JOB, 1)
    assert digest_of(file.read_bytes()) == damaged.digest


@pytest.mark.parametrize("damage", ["flipped bit", "truncated", "too long"])
async def test_corrupt_chunk_on_the_stores_disk_is_never_used(
    publisher: Publisher, puller: Puller, tmp_path: Path, damage: str
) -> None:
    await publish(publisher, 0, {"w": np.arange(100_000)})
    (chunk,) = chunk_files(tmp_path)
    data = bytearray(chunk.read_bytes())
    data[1000] ^= 1
    chunk.write_bytes({"flipped bit": data, "truncated": data[:1000], "too long": data + b"!"}[damage])
    pulling = asyncio.create_task(puller.pull(JOB, 0), name="pull")
    await eventually(lambda: not chunk.exists())
    assert list((tmp_path / "cache" / "chunks").iterdir()) == []
    await publisher.publish(JOB, 1, 0, shards_of({"w": np.arange(100_000)}))
    await pulling
    await assert_pulls(puller, 0, {"w": np.arange(100_000)})


async def test_chunk_of_the_wrong_size_is_repaired_by_the_next_publish(
    publisher: Publisher, puller: Puller, tmp_path: Path
) -> None:
    weights: Weights = {"w": np.arange(100_000)}
    await publish(publisher, 0, weights)
    (chunk,) = chunk_files(tmp_path)
    chunk.write_bytes(b"")
    await publish(publisher, 1, weights)
    await assert_pulls(puller, 1, weights)


async def test_pull_waits_for_a_lost_chunk_to_be_uploaded_again(
    publisher: Publisher, store: ServiceProcess, tmp_path: Path
) -> None:
    weights: Weights = {"w": np.arange(1000)}
    await publish(publisher, 0, weights)
    (chunk,) = chunk_files(tmp_path)
    chunk.unlink()
    waits = Waits()
    async with StoreClient(store.url, TOKEN) as client:
        puller = Puller(client, Cache(tmp_path / "worker"), waits, limit_s=60)
        pulling = asyncio.create_task(puller.pull(JOB, 0), name="pull")
        damaged = await eventually(client.damaged)
        (wait,) = waits.current()
        assert wait.because.startswith(f"pull version 0 of job {JOB}: 0 B of 8 kB")
        ((ref, data),) = chunks_among(shards_of(weights), damaged)
        await client.put_chunk(ref, memoryview(data))
        await pulling
        assert not await client.damaged()
        await assert_pulls(puller, 0, weights)
        puller.close()


async def test_unavailable_store_is_waited_for_up_to_the_limit(store: ServiceProcess, tmp_path: Path) -> None:
    store.kill()
    waits = Waits()
    async with StoreClient(store.url, TOKEN) as client:
        puller = Puller(client, Cache(tmp_path / "cache"), waits, limit_s=1.0)
        pulling = asyncio.create_task(puller.pull(JOB, 3), name="pull")
        await eventually(waits.current)
        assert waits.current()[0].because.startswith("pull version 3 of job job-1")
        expected = f"the weight store at {store.url} \\(pull version 3 of job job-1; the last try failed: .*{store.url}"
        with pytest.raises(WaitTimedOut, match=expected):
            await pulling
        puller.close()
    assert waits.current() == []


async def test_two_processes_cannot_use_one_cache(client: StoreClient, puller: Puller, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="in use by another process"):
        Puller(client, Cache(tmp_path / "cache"), Waits())


async def test_commit_during_a_redis_outage_is_announced_after_it(tmp_path: Path) -> None:
    redis = RedisServer(tmp_path / "redis")
    redis.start()
    store = store_process(tmp_path, redis.url)
    store.start()
    try:
        redis.kill()
        async with StoreClient(store.url, TOKEN) as client:
            await publish(Publisher(client, Waits()), 0, {"w": np.arange(10)})
            assert (await client.head(JOB)) is not None
        redis.start()
        bus = RedisBus(redis.url)

        async def announced(n_times: int) -> bool:
            try:
                entries = await bus.read({WEIGHTS_COMMITTED: START})
            except BusUnavailable:
                return False
            assert {entry.message.version for entry in entries if isinstance(entry.message, WeightsCommitted)} <= {0}
            return len(entries) == n_times

        await eventually(lambda: announced(1))
        # After a restart it announces the head again.
        store.kill()
        await asyncio.to_thread(store.start)
        await eventually(lambda: announced(2))
        await bus.close()
    finally:
        store.kill()
        redis.stop()


@pytest.fixture(params=["small disk", "file size limit"])
def full_store(
    request: pytest.FixtureRequest, store: ServiceProcess, tmp_path: Path, redis_url: str
) -> Iterator[ServiceProcess]:
    """A store that has no room for the second of two chunks."""
    if request.param == "file size limit":
        resource.prlimit(store.pid, resource.RLIMIT_FSIZE, (CHUNK_BYTES - 1, CHUNK_BYTES))
        yield store
        return
    store.kill()
    disk = tmp_path / "small disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={SMALL_DISK_BYTES}", "tmpfs", str(disk)]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("may not mount a small disk")
    try:
        store.env["RLBOOST_WEIGHT_STORE_DIR"] = str(disk)
        store.start()
        yield store
        store.kill()
    finally:
        subprocess.run(["umount", disk], check=True)


@pytest.mark.parametrize("full_store", ["small disk"], indirect=True)
async def test_publish_continues_once_a_full_disk_has_space(
    full_store: ServiceProcess, client: StoreClient, publisher: Publisher, puller: Puller
) -> None:
    filler = Path(full_store.env["RLBOOST_WEIGHT_STORE_DIR"]) / "filler"
    with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
        for _ in range(SMALL_DISK_BYTES // 4096):
            file.write(bytes(4096))
    weights: Weights = {"w": np.arange(CHUNK_BYTES // 8)}
    ((ref, data),) = chunks_among(shards_of(weights), {digest_of(weights["w"].tobytes())})
    with pytest.raises(StoreUnavailable, match=r"no space left .*free space, or retain fewer versions"):
        await client.put_chunk(ref, memoryview(data))
    publishing = asyncio.create_task(publish(publisher, 0, weights), name="publish")
    filler.unlink()
    await publishing
    await assert_pulls(puller, 0, weights)


async def test_full_disk_times_out_and_keeps_the_old_head(
    full_store: ServiceProcess, client: StoreClient, puller: Puller
) -> None:
    publisher = Publisher(client, Waits(), limit_s=3)
    small: Weights = {"w": np.arange(1000)}
    await publish(publisher, 0, small)
    with pytest.raises(WaitTimedOut, match=r"publish version 1.*; the last try failed: .*retain fewer versions"):
        await publish(publisher, 1, make_weights(1, 2 * CHUNK_BYTES))
    root = Path(full_store.env["RLBOOST_WEIGHT_STORE_DIR"])
    # Another upload may have been in progress when the first one failed: the store drops it after the disconnect.
    await eventually(lambda: list((root / "tmp").iterdir()) == [])
    for chunk in (root / "chunks").glob("*/*"):
        assert digest_of(chunk.read_bytes()) == chunk.name
    await assert_pulls(puller, 0, small)

    async def a_small_version_still_has_room() -> bool:
        try:
            await publish(publisher, 1, {"w": np.arange(1000) + 1})
        except WaitTimedOut:
            return False
        return True

    await eventually(a_small_version_still_has_room)


async def test_kill_during_a_publish_leaves_the_old_or_the_new_head(
    store: ServiceProcess, client: StoreClient, publisher: Publisher, tmp_path: Path
) -> None:
    rng = random.Random(0)
    weights = [make_weights(0)]
    began = time.monotonic()
    await publish(publisher, 0, weights[0])
    usual_s = time.monotonic() - began
    for version in range(1, 9):
        weights.append(make_weights(version))
        publishing = asyncio.create_task(publish(publisher, version, weights[version]), name="publish")
        await asyncio.wait([publishing], timeout=rng.uniform(0, 1.3 * usual_s))
        store.kill()
        acknowledged = publishing.done()
        await asyncio.to_thread(store.start)
        head = await client.head(JOB)
        assert head is not None
        assert head.version == version if acknowledged else head.version in (version - 1, version)
        puller = Puller(client, Cache(tmp_path / f"cache-{version}"), Waits())
        await assert_pulls(puller, head.version, weights[head.version])
        puller.close()
        # The publisher gets through without being asked again.
        assert (await publishing).version == version
        await eventually(lambda: list((tmp_path / "store" / "tmp").iterdir()) == [])


async def test_publisher_after_a_killed_upload_may_publish_other_bits(
    store: ServiceProcess, publisher: Publisher, puller: Puller
) -> None:
    words = (store.url, TOKEN, JOB, "0", "7", "64")
    dead = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.support.mortal_publisher", *words, stdout=asyncio.subprocess.PIPE
    )
    assert dead.stdout is not None
    assert await dead.stdout.readline() == b"upload blocked\n"
    dead.kill()
    await dead.wait()
    weights = make_weights(1)
    await publish(publisher, 0, weights)
    await assert_pulls(puller, 0, weights)
