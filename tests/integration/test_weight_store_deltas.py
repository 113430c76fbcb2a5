"""Deltas with the weight store as a process: what a laggard pulls, and what happens when one of them is bad."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from structlog.testing import capture_logs

from rlboost.shared.errors import Conflict, StoreUnavailable
from rlboost.shared.process.waiting import Waits
from rlboost.shared.weights.cache import Cache
from rlboost.shared.weights.client import StoreClient, retry_unavailable
from rlboost.shared.weights.delta import HEADER, encode_delta
from rlboost.shared.weights.manifest import CHUNK_BYTES, Manifest, Shard, digest_of
from rlboost.shared.weights.publisher import Publisher
from rlboost.shared.weights.puller import Puller
from tests.support.deltas import sealed
from tests.support.edges import edges_to
from tests.support.eventually import eventually
from tests.support.service_process import TOKEN, ServiceProcess
from tests.support.tcp_proxy import TcpProxy

JOB = "job-1"
Bits = npt.NDArray[np.uint16]
N_BYTES = 2 * CHUNK_BYTES + 1_000_000


@pytest.fixture
def publisher(client: StoreClient) -> Publisher:
    return Publisher(client, Waits(), limit_s=60, deltas=True)


def bits(version: int) -> Bits:
    """Random bit patterns; one in a hundred moves by one step per version."""
    rng = np.random.default_rng(0)
    found = rng.integers(0, 1 << 16, N_BYTES // 2, dtype=np.uint16)
    for _ in range(version):
        found[rng.integers(0, found.size, found.size // 100)] += 1
    return found


async def publish(publisher: Publisher, version: int, weights: Bits | None = None) -> None:
    weights = bits(version) if weights is None else weights
    shard = Shard("w", "bfloat16", weights.shape, (0,), weights.shape, weights.data)
    part = await publisher.publish(JOB, version, 0, [shard])
    await publisher.commit(JOB, version, expect=version - 1, part_digests=[part.digest], config_json="{}")


async def assert_pulls(puller: Puller, version: int) -> None:
    pulled = await puller.pull(JOB, version)
    ((_, data),) = pulled.tensors()
    assert data == bits(version).tobytes()


async def publish_composed(publisher: Publisher, client: StoreClient, first: int, last: int) -> None:
    """Publish versions, each when the store has composed all hops to the one before it."""
    for version in range(first, last + 1):
        await publish(publisher, version)
        expected = [version - span for span in (1, 2, 4, 8) if version >= span]

        async def composed(version: int = version, expected: list[int] = expected) -> bool:
            document = await edges_to(client, JOB, version)
            return [hop.base for hop in document.hops] == expected if document else not expected

        await eventually(composed)


def delta_files(tmp_path: Path, version: int) -> list[Path]:
    document = json.loads((tmp_path / "store" / "models" / JOB / "edges" / f"{version}.json").read_text())
    deltas = [edge[2] for hop in document["hops"] for edge in hop["edges"]]
    return [tmp_path / "store" / "chunks" / digest[:2] / digest for digest in deltas]


async def chunks_are_written(client: StoreClient, tmp_path: Path, version: int) -> bool:
    chunks = (await client.manifest(JOB, version)).chunks()
    return all((tmp_path / "store" / "chunks" / chunk.digest[:2] / chunk.digest).exists() for chunk in chunks)


async def test_worker_with_the_last_version_pulls_a_fraction_of_the_bytes(
    store: ServiceProcess, publisher: Publisher, tmp_path: Path
) -> None:
    async with TcpProxy(store.port) as proxy, StoreClient(proxy.url, TOKEN) as far:
        puller = Puller(far, Cache(tmp_path / "cache"), Waits(), limit_s=60)
        await publish(publisher, 0)
        await assert_pulls(puller, 0)
        assert proxy.bytes_down > N_BYTES
        before = proxy.bytes_down
        await publish(publisher, 1)
        await assert_pulls(puller, 1)
        assert proxy.bytes_down - before < N_BYTES / 10
        assert (puller.last.chunks_delta, puller.last.chunks_dense, puller.last.fallbacks) == (3, 0, 0)
        puller.close()


async def test_lagging_worker_uses_the_longest_hops_even_after_a_restart(
    client: StoreClient, publisher: Publisher, tmp_path: Path
) -> None:
    puller = Puller(client, Cache(tmp_path / "cache"), Waits(), limit_s=60)
    await publish(publisher, 0)
    await assert_pulls(puller, 0)
    puller.close()
    await publish_composed(publisher, client, 1, 11)
    # 11 -> 3 -> 1 -> 0, though versions 0, 1 and 3 are no longer retained.
    puller = Puller(client, Cache(tmp_path / "cache"), Waits(), limit_s=60)
    await assert_pulls(puller, 11)
    assert (puller.last.chunks_delta, puller.last.chunks_dense) == (3, 0)
    single = sum(path.stat().st_size for path in delta_files(tmp_path, 11)[:3])
    assert puller.last.bytes_delta < 9 * single, "longer hops have less bytes than a chain of eleven"
    await assert_pulls(puller, 11)
    assert puller.last.chunks_held == 3
    puller.close()


async def test_worker_seeded_with_the_first_version_pulls_deltas_from_it(
    store: ServiceProcess, client: StoreClient, publisher: Publisher, tmp_path: Path
) -> None:
    await publish(publisher, 0)
    await client.pin(JOB, 0)
    await publish_composed(publisher, client, 1, 18)

    def seeder(manifest: Manifest, cache: Cache) -> int:
        (part,) = manifest.parts
        data = bits(0).tobytes()
        starts = [sum(chunk.n_bytes for chunk in part.chunks[:index]) for index in range(len(part.chunks))]
        return sum(
            cache.store(chunk, data[start : start + chunk.n_bytes])
            for chunk, start in zip(part.chunks, starts, strict=True)
        )

    async def from_base() -> bool:
        document = await edges_to(client, JOB, 16)
        return document is not None and document.hop_from(0) is not None

    await eventually(from_base)
    puller = Puller(client, Cache(tmp_path / "cache"), Waits(), seeder=seeder, limit_s=60)
    await assert_pulls(puller, 18)
    assert (puller.last.chunks_delta, puller.last.chunks_dense, puller.last.fallbacks) == (3, 0, 0)
    single = sum(path.stat().st_size for path in delta_files(tmp_path, 18)[:3])
    assert puller.last.bytes_delta < 12 * single
    puller.close()


async def test_full_and_delta_publish_the_same_chunks(client: StoreClient, publisher: Publisher) -> None:
    await publish(publisher, 0)
    await publish(publisher, 1)
    whole = Publisher(client, Waits())
    shard = Shard("w", "bfloat16", (N_BYTES // 2,), (0,), (N_BYTES // 2,), bits(1).data)
    part = await whole.publish("job-2", 0, 0, [shard])
    assert (await client.manifest(JOB, 1)).parts[0].chunks == part.chunks
    await whole.commit("job-2", 0, expect=-1, part_digests=[part.digest], config_json="{}")
    assert await edges_to(client, "job-2", 0) is None


async def counted(client: StoreClient, name: str) -> float:
    lines = (await client._request("GET", "/metrics")).body.decode().splitlines()
    (line,) = [line for line in lines if line.startswith(f"rlboost_weight_store_{name}_total ")]
    return float(line.split()[1])


async def test_publisher_sends_a_delta_instead_of_a_changed_chunk(
    client: StoreClient, publisher: Publisher, puller: Puller
) -> None:
    await publish(publisher, 0)
    before = await counted(client, "bytes_in")
    await publish(publisher, 1)
    assert await counted(client, "bytes_in") - before < 0.02 * N_BYTES
    assert await counted(client, "deltas_applied") == 3
    await assert_pulls(puller, 1)
    assert (puller.last.chunks_dense, puller.last.fallbacks) == (3, 0), "the store has whole chunks too"


@pytest.mark.parametrize("damage", ["flipped bit", "truncated", "gone"])
async def test_chunk_whose_base_is_damaged_in_the_store_is_sent_whole(
    client: StoreClient, publisher: Publisher, puller: Puller, tmp_path: Path, damage: str
) -> None:
    await publish(publisher, 0)
    (part,) = (await client.manifest(JOB, 0)).parts
    digest = part.chunks[0].digest
    base = tmp_path / "store" / "chunks" / digest[:2] / digest
    data = bytearray(base.read_bytes())
    data[1000] ^= 1
    base.unlink()
    if damage != "gone":
        base.write_bytes(data if damage == "flipped bit" else data[:1000])
    before = await counted(client, "bytes_in")
    with capture_logs() as logs:
        await publish(publisher, 1)
    assert [line["chunks"] for line in logs if line["event"] == "deltas_refused"] == [1]
    assert part.chunks[0].n_bytes < await counted(client, "bytes_in") - before < 1.1 * part.chunks[0].n_bytes
    await assert_pulls(puller, 1)


async def test_base_lost_after_its_delta_was_applied_is_noticed_by_the_commit(
    store: ServiceProcess, client: StoreClient, publisher: Publisher, puller: Puller, tmp_path: Path
) -> None:
    """The publisher then drops its base, because workers do not hold an uncommitted version."""
    await publish(publisher, 0)
    shard = Shard("w", "bfloat16", (N_BYTES // 2,), (0,), (N_BYTES // 2,), bits(1).data)
    lost = (await client.manifest(JOB, 0)).parts[0].chunks[0].digest
    part = await publisher.publish(JOB, 1, 0, [shard])
    await asyncio.to_thread(store.kill)
    (tmp_path / "store" / "chunks" / lost[:2] / lost).unlink()
    await asyncio.to_thread(store.start)
    with pytest.raises(Conflict, match="lacks 3 of 3 chunks"):
        await publisher.commit(JOB, 1, expect=0, part_digests=[part.digest], config_json="{}")
    before = await counted(client, "bytes_in")
    await publish(publisher, 1)
    assert await counted(client, "bytes_in") - before == part.chunks[0].n_bytes
    await assert_pulls(puller, 1)


async def test_store_killed_between_deltas_and_commit_commits_after_the_restart(
    store: ServiceProcess, publisher: Publisher, puller: Puller
) -> None:
    await publish(publisher, 0)
    shard = Shard("w", "bfloat16", (N_BYTES // 2,), (0,), (N_BYTES // 2,), bits(1).data)
    part = await publisher.publish(JOB, 1, 0, [shard])
    await asyncio.to_thread(store.kill)
    await asyncio.to_thread(store.start)
    await publisher.commit(JOB, 1, expect=0, part_digests=[part.digest], config_json="{}")
    await assert_pulls(puller, 1)


@pytest.mark.parametrize("damage", ["flipped bit", "truncated", "too long", "gone"])
async def test_corrupt_delta_on_the_stores_disk_costs_one_whole_chunk(
    client: StoreClient, publisher: Publisher, puller: Puller, tmp_path: Path, damage: str
) -> None:
    await publish(publisher, 0)
    await assert_pulls(puller, 0)
    await publish(publisher, 1)
    await eventually(lambda: chunks_are_written(client, tmp_path, 1))
    victim = delta_files(tmp_path, 1)[0]
    data = bytearray(victim.read_bytes())
    data[1000] ^= 1
    if damage == "gone":
        victim.unlink()
    else:
        victim.write_bytes({"flipped bit": data, "truncated": data[:1000], "too long": data + b"!"}[damage])
    await assert_pulls(puller, 1)
    assert (puller.last.fallbacks, puller.last.chunks_dense, puller.last.chunks_delta) == (1, 1, 2)


@pytest.mark.parametrize("format_version", [2, 3], ids=["of an older format", "forged"])
async def test_version_whose_deltas_cannot_be_used_is_pulled_whole(
    store: ServiceProcess, publisher: Publisher, puller: Puller, tmp_path: Path, format_version: int
) -> None:
    """The deltas have their digests, and the forged ones are valid: the result has another digest than the chunk."""
    await publish(publisher, 0)
    await assert_pulls(puller, 0)
    await publish(publisher, 1)
    await eventually(lambda: chunks_are_written(publisher._client, tmp_path, 1))
    await asyncio.to_thread(store.kill)
    path = tmp_path / "store" / "models" / JOB / "edges" / "1.json"
    document = json.loads(path.read_text())
    for edge in document["hops"][0]["edges"]:
        n_bytes = CHUNK_BYTES if edge[0] != document["hops"][0]["edges"][-1][0] else N_BYTES % CHUNK_BYTES
        forged = encode_delta(bytes(n_bytes), b"\1" + bytes(n_bytes - 1), "bfloat16")
        checked = forged[:4] + bytes([format_version]) + forged[5:16]
        data = sealed(checked, forged[HEADER.size :])
        edge[2:] = [digest_of(data), len(data)]
        file = tmp_path / "store" / "chunks" / edge[2][:2] / edge[2]
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(data)
    path.write_text(json.dumps(document))
    await asyncio.to_thread(store.start)
    with capture_logs() as logs:
        await assert_pulls(puller, 1)
    assert (puller.last.fallbacks, puller.last.chunks_dense, puller.last.chunks_delta) == (3, 3, 0)
    reason = {2: "the delta has format 2, this process reads 3: pull whole", 3: "the result has another digest"}
    assert {line["error"] for line in logs if line["event"] == "delta_failed"} == {reason[format_version]}


async def test_corrupt_base_in_the_cache_costs_one_whole_chunk(
    publisher: Publisher, puller: Puller, tmp_path: Path
) -> None:
    await publish(publisher, 0)
    await assert_pulls(puller, 0)
    await publish(publisher, 1)
    for path in (tmp_path / "cache" / "chunks").iterdir():
        path.write_bytes(path.read_bytes()[::-1])
    await assert_pulls(puller, 1)
    assert (puller.last.fallbacks, puller.last.chunks_dense) == (3, 3)


async def test_a_version_that_changed_everywhere_is_pulled_whole(publisher: Publisher, puller: Puller) -> None:
    await publish(publisher, 0)
    await assert_pulls(puller, 0)
    await publish(publisher, 1, np.random.default_rng(1).integers(0, 1 << 16, N_BYTES // 2, dtype=np.uint16))
    await puller.pull(JOB, 1)
    assert (puller.last.chunks_dense, puller.last.chunks_delta, puller.last.fallbacks) == (3, 0, 0)


async def test_publisher_that_lost_the_race_restarts_without_deltas(
    client: StoreClient, publisher: Publisher, puller: Puller
) -> None:
    await publish(publisher, 0)
    await assert_pulls(puller, 0)
    part = await publisher.publish(JOB, 2, 0, [Shard("w", "bfloat16", (4,), (0,), (4,), bits(0)[:4].data)])
    with pytest.raises(Conflict, match="another process has committed"):
        await publisher.commit(JOB, 2, expect=1, part_digests=[part.digest], config_json="{}")
    await publish(publisher, 1)
    assert await edges_to(client, JOB, 1) is None
    await assert_pulls(puller, 1)
    await publish(publisher, 2)
    await assert_pulls(puller, 2)
    assert puller.last.chunks_delta == 3


async def test_kill_during_composing_leaves_whole_hops_only(
    store: ServiceProcess, client: StoreClient, publisher: Publisher, puller: Puller
) -> None:
    await publish(publisher, 0)
    await assert_pulls(puller, 0)
    for version in range(1, 5):
        await publish(publisher, version)
        await asyncio.to_thread(store.kill)
        with pytest.raises(StoreUnavailable):
            await edges_to(client, JOB, version)
        await asyncio.to_thread(store.start)
        document = await retry_unavailable(lambda version=version: edges_to(client, JOB, version))  # type: ignore[misc]
        assert document is not None
        assert [hop.base for hop in document.hops] == [version - 1, version - 2, version - 4][: len(document.hops)]
        assert all(len(hop.edges) == 3 for hop in document.hops)
    await assert_pulls(puller, 4)
    assert puller.last.fallbacks == 0

    async def composed() -> bool:
        document = await edges_to(client, JOB, 4)
        return document is not None and [hop.base for hop in document.hops] == [3, 2, 0]

    await eventually(composed)
