"""Versions that are committed as base and delta: what readers get before, while and after their chunks are written."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager

import numpy as np
import pytest
from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs

from rlboost.services.weight_store import deltas
from rlboost.services.weight_store.app import WeightStore
from rlboost.services.weight_store.chunks import DerivedChunks
from rlboost.services.weight_store.deltas import DeltaComposer, Deltas
from rlboost.services.weight_store.garbage import UPLOAD_GRACE_S
from rlboost.services.weight_store.metrics import Metrics
from rlboost.services.weight_store.ports import BadChunk, Proxied, StoreFull
from rlboost.shared.errors import Conflict, NotFound, StoreUnavailable
from rlboost.shared.process.waiting import Waits
from rlboost.shared.streams import names
from rlboost.shared.streams.bus import HashSet
from rlboost.shared.weights.access import ManifestKey
from rlboost.shared.weights.delta import encode_delta
from rlboost.shared.weights.delta_graph import Edge, lists_of
from rlboost.shared.weights.manifest import ChunkRef, Part, TensorEntry, digest_of
from rlboost.shared.weights.rest_models import CommitRequest
from tests.support.eventually import eventually
from tests.support.memory_bus import MemoryBus
from tests.support.store_fakes import MemoryChunks, MemoryDocuments

JOB, VALUES, CHUNKS = "job-1", 5000, 3


def content(version: int, index: int = 0) -> bytes:
    """Return a chunk; a few of its values move by one step per version."""
    values = np.arange(VALUES, dtype=np.uint16) + 7 * index
    for past in range(1, version + 1):
        values[past + index :: 97] += 1
    return values.tobytes()


def ref(version: int, index: int = 0) -> ChunkRef:
    data = content(version, index)
    return ChunkRef(digest_of(data), len(data))


def delta(version: int, index: int = 0) -> tuple[Edge, bytes]:
    data = encode_delta(content(version - 1, index), content(version, index), "bfloat16")
    return Edge(ref(version, index).digest, ref(version - 1, index).digest, digest_of(data), len(data)), data


class World:
    def __init__(self) -> None:
        self.files, self.documents = MemoryChunks(), MemoryDocuments()
        self.now = 1_000_000.0
        self.max_bytes_in_memory = 0

    async def start(self) -> WeightStore:
        """Return a store that knows only what an earlier one has written."""
        metrics = Metrics(CollectorRegistry())
        self.chunks = chunks = DerivedChunks(self.files, self.max_bytes_in_memory)
        self.bus = MemoryBus()
        self.deltas = Deltas(chunks, self.documents, metrics, keep=1, clock=lambda: self.now)
        self.composer = DeltaComposer(self.deltas, chunks, self.documents, metrics, clock=lambda: self.now)
        self.store = WeightStore(
            chunks,
            self.documents,
            self.deltas,
            self.bus,
            Waits(),
            metrics,
            sign=ManifestKey("token").sign,
            keep_versions=1,
            clock=lambda: self.now,
        )
        await self.store.load()
        return self.store

    async def upload(self, version: int) -> CommitRequest:
        """Upload a version: the first one whole, the others as deltas."""
        self.now += 1
        edges: list[Edge] = []
        for index in range(CHUNKS):
            if version:
                edge, data = delta(version, index)
                await self.store.put_chunk(edge.delta, [data])
                edges.append(edge)
            else:
                await self.store.put_chunk(ref(0, index).digest, [content(0, index)])
        assert not edges or await self.store.apply(edges) == []
        lists = lists_of(version - 1, edges) if edges else []
        for encoded in lists:
            await self.store.put_chunk(digest_of(encoded), [encoded])
        whole = b"".join(content(version, index) for index in range(CHUNKS))
        shape = (VALUES * CHUNKS,)
        entry = TensorEntry(
            name="w",
            dtype="bfloat16",
            global_shape=shape,
            offset=(0,),
            local_shape=shape,
            start=0,
            n_bytes=len(whole),
            digest=digest_of(whole),
        )
        chunks = tuple(ref(version, index) for index in range(CHUNKS))
        references = tuple(ChunkRef(digest_of(encoded), len(encoded)) for encoded in lists)
        part = Part(rank=0, chunks=chunks, tensors=(entry,), edges=references)
        await self.store.put_part(JOB, version, 0, part.encode())
        return CommitRequest(expect=version - 1, parts=(part.digest,), config_json="{}")

    async def publish(self, version: int) -> None:
        await self.store.commit(JOB, version, await self.upload(version))

    async def write(self) -> None:
        """Run the loop until every chunk is written."""
        async with self.composing():
            await eventually(lambda: not len(self.chunks))

    @asynccontextmanager
    async def composing(self) -> AsyncIterator[None]:
        stop = asyncio.Event()
        loop = asyncio.create_task(self.composer.compose(stop))
        yield
        stop.set()
        await loop

    async def delete(self) -> None:
        """End the job and delete its weights."""
        await self.bus.transact([HashSet(names.JOBS, {JOB: json.dumps({"state": "failed"})})])
        await self.store.delete(JOB)

    def written(self, version: int) -> list[int]:
        return [index for index in range(CHUNKS) if ref(version, index).digest in self.files.held]

    async def served(self, version: int, index: int = 0) -> bytes:
        source = await self.store.source(ref(version, index).digest)
        assert isinstance(source, Proxied)
        return b"".join([block async for block in await source.blocks(0, source.n_bytes)])

    async def is_served(self, version: int, index: int) -> bool:
        try:
            return await self.served(version, index) == content(version, index)
        except StoreUnavailable:
            return False


@pytest.fixture
async def world() -> World:
    world = World()
    await world.start()
    await world.publish(0)
    return world


async def test_version_is_committed_before_its_chunks_are_written(world: World) -> None:
    await world.publish(1)
    assert world.store.versions_of(JOB).head == 1
    assert world.written(1) == []
    assert await world.served(1, 2) == content(1, 2)
    assert world.written(1) == [2]
    await world.write()
    assert world.written(1) == [0, 1, 2]


@pytest.mark.parametrize("n_written", range(CHUNKS))
async def test_killed_store_serves_a_derived_version_after_the_restart(world: World, n_written: int) -> None:
    await world.publish(1)
    for index in range(n_written):
        await world.served(1, index)
    await world.start()
    await world.store.collector.collect_once()
    assert world.written(1) == list(range(n_written))
    assert [await world.served(1, index) for index in range(CHUNKS)] == [content(1, index) for index in range(CHUNKS)]


async def test_store_restarted_before_the_commit_derives_the_chunks_again(world: World) -> None:
    request = await world.upload(1)
    await world.start()
    await world.store.commit(JOB, 1, request)
    assert await world.served(1) == content(1)


async def test_commit_without_the_base_of_a_delta_is_refused(world: World) -> None:
    request = await world.upload(1)
    await world.start()
    del world.files.held[ref(0, 1).digest]
    with pytest.raises(Conflict, match="lacks 3 of 3 chunks"):
        await world.store.commit(JOB, 1, request)
    assert world.store.versions_of(JOB).head == 0


async def test_bases_are_collected_once_the_chunks_are_written(world: World) -> None:
    await world.publish(1)
    await world.store.collector.collect_once()
    assert world.written(0) == [0, 1, 2]
    await world.write()
    await world.store.collector.collect_once()
    assert (world.written(0), world.written(1)) == ([], [0, 1, 2])
    await world.publish(2)
    await world.write()
    await world.store.collector.collect_once()
    assert (world.written(1), world.written(2)) == ([], [0, 1, 2])


async def test_base_is_written_before_the_next_version_is_derived(world: World) -> None:
    await world.publish(1)
    await world.publish(2)
    assert (world.written(1), world.written(2)) == ([0, 1, 2], [])
    await world.start()
    assert await world.served(2) == content(2)


async def test_full_disk_leaves_a_derived_version_served_from_memory(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Later, without another commit, its chunks are written into space that has become free."""
    monkeypatch.setattr(deltas, "WRITE_INTERVAL_S", 0.01)
    await world.publish(1)
    world.files.full = True
    with capture_logs() as logs:
        async with world.composing():
            await eventually(lambda: logs)
            assert [await world.served(1, index) for index in range(CHUNKS)] == [content(1, i) for i in range(CHUNKS)]
            assert {line["event"] for line in logs} == {"derived_chunks_not_written"}
            assert world.written(1) == []
            with pytest.raises(StoreFull):
                await world.store.apply([delta(2)[0]])
            world.files.full = False
            await eventually(lambda: world.written(1) == [0, 1, 2])


@pytest.mark.parametrize("lost", ["base", "delta"])
async def test_derived_chunk_whose_base_or_delta_is_lost_is_uploaded_again(world: World, lost: str) -> None:
    await world.publish(1)
    edge, _ = delta(1)
    del world.files.held[edge.base if lost == "base" else edge.delta]
    with pytest.raises(StoreUnavailable, match="damaged or lost"):
        await world.served(1)
    assert world.store.damaged.missing() == [edge.new]
    await world.store.put_chunk(edge.new, [content(1)])
    assert await world.served(1) == content(1)
    assert await world.served(1, 1) == content(1, 1)


async def test_derived_chunk_in_memory_is_written_without_its_base_and_delta(world: World) -> None:
    world.max_bytes_in_memory = ref(1).n_bytes * 2
    await world.start()
    await world.publish(1)
    for index in range(CHUNKS):
        edge, _ = delta(1, index)
        del world.files.held[edge.delta]
    lost = [ref(1, index).digest for index in range(CHUNKS) if not await world.is_served(1, index)]
    assert len(lost) == 1, "the limit is two chunks"
    assert world.store.damaged.missing() == lost
    for index in range(CHUNKS):
        await world.store.put_chunk(ref(1, index).digest, [content(1, index)])
    await world.publish(2)
    await world.write()
    assert world.written(2) == [0, 1, 2]


async def test_delta_with_another_result_is_refused() -> None:
    files = MemoryChunks()
    chunks = DerivedChunks(files)
    edge, data = delta(1)
    await files.put(edge.base, [content(0)], 0.0)
    await files.put(edge.delta, [data], 0.0)
    wrong = edge._replace(new=digest_of(b"another chunk"))
    with pytest.raises(BadChunk):
        await chunks.derive(wrong, 0.0)
    assert await chunks.missing([ChunkRef(wrong.new, len(content(1)))], 0.0) == [wrong.new]
    with pytest.raises(NotFound):
        await chunks.read(wrong.new)


async def test_deltas_of_an_abandoned_upload_are_collected(world: World) -> None:
    """The trainer dies after its deltas were applied, and its job is deleted."""
    await world.upload(1)
    await world.delete()
    await world.store.collector.collect_once()
    assert len(world.chunks) == CHUNKS
    world.now += UPLOAD_GRACE_S + 1
    await world.store.collector.collect_once()
    await world.store.collector.collect_once()
    assert (len(world.chunks), world.files.held, world.store.all_versions()) == (0, {}, [])


async def test_deleted_version_that_was_never_written_is_collected(world: World) -> None:
    """The disk is full from its commit on: only the collection of its base makes space."""
    await world.publish(1)
    world.files.full = True
    await world.store.collector.collect_once()  # removes the committed parts
    await world.delete()
    await world.store.collector.collect_once()
    assert (len(world.chunks), world.written(0)) == (0, [])
    world.now += UPLOAD_GRACE_S + 1
    await world.store.collector.collect_once()
    assert world.files.held == {}


async def test_chunk_derived_for_another_upload_is_written_before_the_commit(world: World) -> None:
    """A publisher that restarts finds its chunks present and uploads no edge: a restarted store could not derive it."""
    request = await world.upload(1)
    part = Part.decode(await world.documents.part(JOB, 1, 0)).model_copy(update={"edges": ()})
    await world.store.put_part(JOB, 1, 0, part.encode())
    assert await world.store.missing(list(part.chunks)) == []
    await world.store.commit(JOB, 1, request.model_copy(update={"parts": (part.digest,)}))
    assert world.written(1) == [0, 1, 2]
    await world.start()
    assert await world.served(1) == content(1)


@pytest.mark.parametrize("damage", [b"", b"\0" * (2 * VALUES)])
async def test_damaged_base_makes_a_chunk_missing_at_the_limit(world: World, damage: bytes) -> None:
    """Beyond the store's limit a write is rejected before the digest is checked."""
    await world.publish(1)
    world.files.held[ref(0).digest] = damage, world.now

    async def rejected(_digest: str, _blocks: Sequence[bytes], _now: float) -> None:
        raise StoreFull("the limit is reached")

    world.files.put = rejected  # type: ignore[assignment, method-assign]
    with pytest.raises(StoreUnavailable, match="damaged or lost"):
        await world.served(1)
    assert world.store.damaged.missing() == [ref(1).digest]


async def test_chunk_uploaded_while_the_disk_is_found_full_is_served(world: World) -> None:
    await world.publish(1)
    put = world.files.put

    async def rejected(digest: str, _blocks: Sequence[bytes], _now: float) -> None:
        world.files.put = put  # type: ignore[method-assign]
        await world.store.put_chunk(digest, [content(1)])
        raise StoreFull("no space was left")

    world.files.put = rejected  # type: ignore[assignment, method-assign]
    assert await world.served(1) == content(1)
    assert world.written(1) == [0]


async def test_written_chunks_are_durable_before_their_bases_are_removed(world: World) -> None:
    await world.publish(1)
    await world.write()
    done: list[str] = []
    sync, remove = world.files.sync, world.files.remove

    async def recorded_sync() -> None:
        done.append("sync")
        await sync()

    async def recorded_remove(unused_since: Mapping[str, float]) -> None:
        done.append("remove")
        await remove(unused_since)

    world.files.sync, world.files.remove = recorded_sync, recorded_remove  # type: ignore[method-assign]
    await world.store.collector.collect_once()
    assert done == ["sync", "remove"]
    assert world.written(0) == []
