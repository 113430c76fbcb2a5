"""The ports of the weight store: the fakes, a folder and an object store do the same."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from rlboost.services.weight_store.adapters.disk import DiskChunks, DiskDocuments, StoreDirectory
from rlboost.services.weight_store.adapters.objects import Lease, ObjectChunks, ObjectDocuments
from rlboost.services.weight_store.domain.versions import JobVersions, Version
from rlboost.services.weight_store.ports import BadChunk, Chunks, Documents, LocalFile, Proxied, Redirect, StagedPart
from rlboost.shared.bucket import Bucket
from rlboost.shared.errors import NotFound
from rlboost.shared.process.waiting import Waits
from rlboost.shared.weights.manifest import ChunkRef, digest_of
from tests.support.store_fakes import MemoryChunks, MemoryDocuments

DATA = b"some weights" * 1000
CHUNK = ChunkRef(digest_of(DATA), len(DATA))
NOW = 1_763_700_000.123457


@pytest.fixture(params=["fake", "disk", "memory", "s3"])
async def ports(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[tuple[Chunks, Documents]]:
    if request.param == "fake":
        yield MemoryChunks(), MemoryDocuments()
    elif request.param == "disk":
        directory = StoreDirectory(tmp_path)
        yield DiskChunks(directory), DiskDocuments(directory)
        directory.close()
    else:
        bucket = Bucket("memory:///" if request.param == "memory" else request.getfixturevalue("s3_url"))
        lease = await Lease.acquire(bucket, 60.0, Waits())
        chunks = await ObjectChunks.opened(bucket, lease, NOW - 1, redirect=request.param == "s3")
        yield chunks, ObjectDocuments(bucket, lease)


@pytest.fixture
def chunks(ports: tuple[Chunks, Documents]) -> Chunks:
    return ports[0]


@pytest.fixture
def documents(ports: tuple[Chunks, Documents]) -> Documents:
    return ports[1]


async def test_put_chunk_is_not_missing(chunks: Chunks) -> None:
    assert await chunks.missing([CHUNK], NOW) == [CHUNK.digest]
    await chunks.put(CHUNK.digest, [DATA[:5], DATA[5:]], NOW)
    assert await chunks.missing([CHUNK], NOW) == []


async def test_bytes_with_another_digest_leave_nothing(chunks: Chunks) -> None:
    with pytest.raises(BadChunk, match=CHUNK.digest):
        await chunks.put(CHUNK.digest, [DATA[1:]], NOW)
    assert await chunks.last_used() == {}


async def test_a_chunk_of_another_size_counts_as_missing(chunks: Chunks) -> None:
    await chunks.put(CHUNK.digest, [DATA], NOW)
    assert await chunks.missing([ChunkRef(CHUNK.digest, CHUNK.n_bytes + 1)], NOW) == [CHUNK.digest]


async def test_to_ask_for_a_chunk_is_to_use_it(chunks: Chunks) -> None:
    await chunks.put(CHUNK.digest, [DATA], NOW)
    assert await chunks.last_used() == {CHUNK.digest: NOW}
    assert await chunks.n_bytes() == CHUNK.n_bytes
    await chunks.missing([CHUNK], NOW + 0.000001)
    assert await chunks.last_used() == {CHUNK.digest: round(NOW + 0.000001, 6)}


async def test_a_chunk_used_since_the_decision_is_not_removed(chunks: Chunks) -> None:
    await chunks.put(CHUNK.digest, [DATA], NOW)
    await chunks.missing([CHUNK], NOW + 1)
    await chunks.remove({CHUNK.digest: NOW})
    assert await chunks.missing([CHUNK], NOW + 1) == []
    await chunks.remove({CHUNK.digest: NOW + 1, digest_of(b"never there"): NOW})
    assert await chunks.missing([CHUNK], NOW + 1) == [CHUNK.digest]


async def test_a_model_is_empty_until_it_is_saved(documents: Documents) -> None:
    assert await documents.versions_of("job-1") == JobVersions("job-1")
    model = JobVersions(
        "job-1",
        versions=(Version(3, "d3", 10, NOW), Version(4, "d4", 10, NOW + 1)),
        pins=frozenset({3}),
        retired=(Version(2, "d2", 10, NOW - 1),),
    )
    await documents.save_versions(model)
    assert await documents.versions_of("job-1") == model
    assert await documents.jobs() == ["job-1"]


async def test_a_manifest_is_replaced_and_removed(documents: Documents) -> None:
    with pytest.raises(NotFound):
        await documents.manifest("job-1", 7)
    await documents.put_manifest("job-1", 7, b"first")
    await documents.put_manifest("job-1", 7, b"second")
    assert await documents.manifest("job-1", 7) == b"second"
    await documents.remove_manifest("job-1", 7)
    await documents.remove_manifest("job-1", 7)
    with pytest.raises(NotFound):
        await documents.manifest("job-1", 7)


async def test_parts_are_listed_by_version_and_rank(documents: Documents) -> None:
    with pytest.raises(NotFound):
        await documents.part("job-1", 7, 0)
    for version, rank in [(12, 0), (7, 1), (7, 0)]:
        await documents.put_part("job-1", StagedPart(version, rank, NOW), f"{version}-{rank}".encode())
    await documents.put_part("job-2", StagedPart(1, 0, NOW), b"another job's")
    await documents.put_part("job-1", StagedPart(7, 1, NOW + 1), b"again")
    assert await documents.parts("job-1") == [StagedPart(7, 0, NOW), StagedPart(7, 1, NOW + 1), StagedPart(12, 0, NOW)]
    assert await documents.part("job-1", 7, 1) == b"again"
    await documents.remove_part("job-1", StagedPart(7, 1, NOW + 1))
    assert [part.rank for part in await documents.parts("job-1")] == [0, 0]
    assert await documents.jobs() == ["job-1", "job-2"]


async def test_a_part_alone_makes_its_job_known(documents: Documents) -> None:
    await documents.put_part("job-1", StagedPart(0, 0, NOW), b"part")
    assert await documents.jobs() == ["job-1"]


async def test_a_chunk_is_read_as_it_is(chunks: Chunks) -> None:
    with pytest.raises(NotFound):
        await chunks.read(CHUNK.digest)
    await chunks.put(CHUNK.digest, [DATA], NOW)
    assert await chunks.read(CHUNK.digest) == DATA


async def test_edges_come_back_and_are_listed_in_order(documents: Documents) -> None:
    assert await documents.edge_versions("job-1") == []
    for version in (10, 9, 11):
        await documents.put_edges("job-1", version, b"edges %d" % version)
    await documents.put_edges("job-1", 10, b"more edges")
    assert await documents.edges("job-1", 10) == b"more edges"
    assert await documents.edge_versions("job-1") == [9, 10, 11]
    for _ in range(2):
        await documents.remove_edges("job-1", 10)
    assert await documents.edge_versions("job-1") == [9, 11]
    with pytest.raises(NotFound):
        await documents.edges("job-1", 10)


async def test_the_source_of_a_chunk_leads_to_its_bytes(chunks: Chunks) -> None:
    with pytest.raises(NotFound, match=CHUNK.digest):
        await chunks.source(CHUNK.digest)
    await chunks.put(CHUNK.digest, [DATA], NOW)
    match await chunks.source(CHUNK.digest):
        case LocalFile(path, status):
            assert (path.read_bytes(), status.st_size) == (DATA, len(DATA))
        case Redirect(url, n_bytes):
            assert n_bytes == len(DATA)
            async with httpx.AsyncClient() as http:
                assert (await http.get(url)).content == DATA
                part = await http.get(url, headers={"Range": "bytes=5-"})
            assert (part.status_code, part.content) == (206, DATA[5:])
        case Proxied(n_bytes, blocks):
            assert n_bytes == len(DATA)
            assert b"".join([block async for block in await blocks(5, 17)]) == DATA[5:17]
