"""The weight store as a process on a real S3 server: direct pulls, kills, a second process, outages of the server."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import numpy.typing as npt
import pytest

from rlboost.shared.errors import Retryable
from rlboost.shared.process.waiting import Waits
from rlboost.shared.weights.client import StoreClient, retry_unavailable
from rlboost.shared.weights.manifest import ChunkRef, Shard, digest_of
from rlboost.shared.weights.publisher import Publisher
from rlboost.shared.weights.puller import Puller
from rlboost.shared.weights.rest_models import VersionInfo
from rlboost.shared.weights.transfer import Buffers, Download
from tests.support.eventually import eventually
from tests.support.s3_server import S3Server
from tests.support.service_process import TOKEN, ServiceProcess
from tests.support.tcp_proxy import TcpProxy

JOB = "job-1"
LEASE_S = 0.6
CHUNK_BYTES = 100_000
N_CHUNKS = 8
TOTAL = N_CHUNKS * CHUNK_BYTES
AUTHORIZED = {"Authorization": f"Bearer {TOKEN}"}

Weights = npt.NDArray[np.uint8]


@pytest.fixture
async def s3(s3_server: S3Server) -> AsyncIterator[TcpProxy]:
    """The way to the S3 server, for the store and for the pullers."""
    async with TcpProxy(s3_server.port) as proxy:
        yield proxy


@pytest.fixture
async def store(
    tmp_path: Path, redis_url: str, s3: TcpProxy, s3_server: S3Server, s3_url: str
) -> AsyncIterator[ServiceProcess]:
    process = store_process(tmp_path, redis_url, s3_url, s3_server.env_at(s3.url))
    await asyncio.to_thread(process.start)
    yield process
    process.kill()


def store_process(tmp_path: Path, redis_url: str, s3_url: str, env: dict[str, str], **more: str) -> ServiceProcess:
    own = {"ORIGIN": s3_url, "LEASE_S": str(LEASE_S), **more}
    settings = {f"RLBOOST_WEIGHT_STORE_{name}": value for name, value in own.items()}
    return ServiceProcess("weight_store", "RLBOOST_WEIGHT_STORE_", tmp_path, redis_url, env | settings)


@pytest.fixture
def publisher(client: StoreClient) -> Publisher:
    return Publisher(client, Waits(), chunk_bytes=CHUNK_BYTES, limit_s=60)


def make_weights(seed: int) -> Weights:
    return np.random.default_rng(seed).integers(0, 256, TOTAL, dtype=np.uint8)


async def publish(publisher: Publisher, version: int, weights: Weights) -> VersionInfo:
    shard = Shard("w", "uint8", weights.shape, (0,), weights.shape, weights.data)
    part = await publisher.publish(JOB, version, 0, [shard])
    return await publisher.commit(JOB, version, expect=version - 1, part_digests=[part.digest], config_json="{}")


async def assert_whole(client: StoreClient, version: int, weights: Weights) -> None:
    """Every byte of a version can be had."""
    manifest = await client.manifest(JOB, version)
    data = b""
    for chunk in manifest.chunks():
        download = Download(chunk, Buffers())
        await client.fetch(download)
        assert download.is_complete
        data += download.data
    assert data == weights.tobytes()


async def rest_of(client: StoreClient, chunk: ChunkRef, start: int) -> bytes:
    """Download a chunk from byte `start` on."""
    download = Download(chunk, Buffers())
    download.n_bytes = start
    await client.fetch(download)
    assert download.n_received == chunk.n_bytes - start
    return bytes(download.data[start:])


async def metrics(url: str) -> dict[str, float]:
    async with httpx.AsyncClient(headers=AUTHORIZED) as http:
        lines = (await http.get(f"{url}/metrics")).text.splitlines()
    prefix, suffix = "rlboost_weight_store_", "_total"
    pairs = [line.split() for line in lines if line.startswith(prefix)]
    return {name.removeprefix(prefix).removesuffix(suffix): float(value) for name, value in pairs}


async def test_pullers_fetch_chunks_from_the_object_store_only(
    store: ServiceProcess, publisher: Publisher, puller: Puller, s3_server: S3Server, s3_url: str
) -> None:
    weights = make_weights(0)
    await publish(publisher, 0, weights)
    pulled = await puller.pull(JOB, 0)
    ((_, data),) = list(pulled.tensors())
    assert bytes(data) == weights.tobytes()
    counted = await metrics(store.url)
    assert (counted["bytes_in"], counted["bytes_out"], counted["bytes_redirected"]) == (TOTAL, 0, TOTAL)
    assert s3_server.n_signed_gets(f"{s3_url.rpartition('/')[2]}/chunks") == N_CHUNKS


async def test_a_range_is_fetched_from_the_object_store_too(
    store: ServiceProcess, publisher: Publisher, client: StoreClient
) -> None:
    weights = make_weights(0)
    await publish(publisher, 0, weights)
    (first, *_) = (await client.manifest(JOB, 0)).chunks()
    assert await rest_of(client, first, 60_000) == weights.tobytes()[60_000:CHUNK_BYTES]
    assert (await metrics(store.url))["bytes_redirected"] == 40_000
    path = f"{store.url}/v1/chunks/{first.digest}"
    async with httpx.AsyncClient(headers=AUTHORIZED) as http:
        sent_on = await http.get(path)
        asked = await http.head(path)
        beyond = await http.get(path, headers={"Range": f"bytes={CHUNK_BYTES}-"})
    assert (sent_on.status_code, sent_on.headers["Cache-Control"], sent_on.content) == (307, "no-store", b"")
    assert TOKEN not in sent_on.headers["Location"]
    assert (asked.status_code, asked.headers["Content-Length"]) == (200, str(CHUNK_BYTES))
    assert (asked.headers["ETag"], beyond.status_code) == (f'"{first.digest}"', 416)


async def test_with_redirects_off_the_bytes_pass_through_the_store(
    tmp_path: Path, redis_url: str, s3_server: S3Server, s3_url: str
) -> None:
    store = store_process(tmp_path, redis_url, s3_url, s3_server.env, REDIRECT="off")
    await asyncio.to_thread(store.start)
    try:
        async with StoreClient(store.url, TOKEN) as client:
            weights = make_weights(0)
            await publish(Publisher(client, Waits(), chunk_bytes=CHUNK_BYTES), 0, weights)
            await assert_whole(client, 0, weights)
            (first, *_) = (await client.manifest(JOB, 0)).chunks()
            assert await rest_of(client, first, 60_000) == weights.tobytes()[60_000:CHUNK_BYTES]
        counted = await metrics(store.url)
        assert (counted["bytes_out"], counted["bytes_redirected"]) == (TOTAL + 40_000, 0)
    finally:
        store.kill()


async def test_broken_upload_resumes_with_the_missing_chunks(
    store: ServiceProcess, publisher: Publisher, client: StoreClient
) -> None:
    weights = make_weights(0)
    halves = [weights.tobytes()[at : at + CHUNK_BYTES] for at in range(0, TOTAL // 2, CHUNK_BYTES)]
    for half in halves:
        chunk = ChunkRef(digest_of(half), len(half))
        await retry_unavailable(partial(client.put_chunk, chunk, memoryview(half)))
    store.kill()
    await asyncio.to_thread(store.start)
    await publish(publisher, 0, weights)
    # Counted since the restart.
    assert (await metrics(store.url))["bytes_in"] == TOTAL / 2
    await assert_whole(client, 0, weights)


# What breaks.


async def test_kill_during_a_publish_leaves_the_old_or_the_new_head(
    store: ServiceProcess, client: StoreClient, publisher: Publisher, s3: TcpProxy
) -> None:
    def kill(killed: asyncio.Event) -> None:
        store.kill()
        killed.set()

    weights = [make_weights(0)]
    began = s3.bytes_down
    await publish(publisher, 0, weights[0])
    usual = s3.bytes_down - began
    # Killed while answers of the object store come back: uploads, the part, the commit.
    for version, share in enumerate((0.5, 0.85, 0.95), start=1):
        weights.append(make_weights(version))
        killed = asyncio.Event()
        s3.on_break = partial(kill, killed)
        s3.break_after = s3.bytes_down + int(share * usual)
        publishing = asyncio.create_task(publish(publisher, version, weights[version]), name="publish")
        async with asyncio.timeout(20):
            await killed.wait()
        acknowledged = publishing.done()
        await asyncio.to_thread(store.start)
        head = await client.head(JOB)
        assert head is not None
        assert head.version == version if acknowledged else head.version in (version - 1, version)
        await assert_whole(client, head.version, weights[head.version])
        # The publisher gets through without being asked again.
        assert (await publishing).version == version
    await assert_whole(client, 3, weights[3])


async def test_second_process_is_refused_and_one_after_a_stop_starts_at_once(
    tmp_path: Path, redis_url: str, s3_server: S3Server, s3_url: str
) -> None:
    processes = []
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        processes.append(store_process(tmp_path / name, redis_url, s3_url, s3_server.env, LEASE_S="2"))
    first, second = processes
    try:
        await asyncio.to_thread(first.start)
        second.launch()
        assert await asyncio.to_thread(second.wait) == 2
        last_line = second.log().splitlines()[-1]
        assert last_line.startswith(f"weight_store: object store {s3_url} is in use by process {first.pid} on ")
        assert last_line.endswith("stop it, or give each weight store its own prefix")
        assert await asyncio.to_thread(first.stop) == 0
        await asyncio.to_thread(second.start)
        assert second.log().count("lease_awaited") == 1
    finally:
        first.kill()
        second.kill()


async def test_process_paused_beyond_its_lease_writes_nothing_and_exits(
    store: ServiceProcess, publisher: Publisher, tmp_path: Path, redis_url: str, s3_server: S3Server, s3_url: str
) -> None:
    await publish(publisher, 0, make_weights(0))
    os.kill(store.pid, signal.SIGSTOP)
    (tmp_path / "second").mkdir()
    second = store_process(tmp_path / "second", redis_url, s3_url, s3_server.env)
    try:
        await asyncio.to_thread(second.start)
        async with StoreClient(second.url, TOKEN) as client:
            info = await publish(Publisher(client, Waits(), chunk_bytes=CHUNK_BYTES), 1, make_weights(1))
            os.kill(store.pid, signal.SIGCONT)
            assert await asyncio.to_thread(store.wait) == 1
            assert "owner.json" in store.log().splitlines()[-1]
            assert "it has taken over" in store.log().splitlines()[-1]
            assert await client.head(JOB) == info
    finally:
        second.kill()


async def test_object_store_outage_gives_503_and_work_resumes_after_it(
    store: ServiceProcess, client: StoreClient, publisher: Publisher, s3: TcpProxy
) -> None:
    weights = [make_weights(0), make_weights(1)]
    await publish(publisher, 0, weights[0])
    s3.go_away()
    publishing = asyncio.create_task(publish(publisher, 1, weights[1]), name="publish")

    async def not_ready() -> Any:
        async with httpx.AsyncClient() as http:
            answer = await http.get(f"{store.url}/readyz")
        return answer.status_code == 503 and "could not be renewed" in answer.text

    await eventually(not_ready)
    with pytest.raises(Retryable, match="object store"):
        await client.manifest(JOB, 0)
    with pytest.raises(Retryable, match="could not be renewed in time; try again"):
        await client.missing([ChunkRef(digest_of(b"x"), 1)])
    head = await client.head(JOB)
    assert head is not None
    assert head.version == 0
    assert not publishing.done()
    s3.come_back()
    assert (await publishing).version == 1
    for version in (0, 1):
        await assert_whole(client, version, weights[version])
