"""Deltas over fakes: the publisher's delta encoder and the store's composition of hops."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from rlboost.services.weight_store.app import WeightStore
from rlboost.services.weight_store.chunks import DerivedChunks
from rlboost.services.weight_store.deltas import DeltaComposer, Deltas
from rlboost.services.weight_store.garbage import UPLOAD_GRACE_S
from rlboost.services.weight_store.metrics import Metrics
from rlboost.services.weight_store.ports import StoreFull
from rlboost.shared.errors import NotFound, Undecodable
from rlboost.shared.process.waiting import Waits
from rlboost.shared.weights.access import ManifestKey
from rlboost.shared.weights.delta_graph import Route, VersionEdges, lists_of, plan
from rlboost.shared.weights.manifest import Chunk, ChunkRef, Part, TensorEntry, digest_of
from rlboost.shared.weights.publisher import Delta, DeltaEncoder
from rlboost.shared.weights.rest_models import CommitRequest
from tests.support.deltas import applied
from tests.support.eventually import eventually
from tests.support.memory_bus import MemoryBus
from tests.support.store_fakes import MemoryChunks, MemoryDocuments

JOB = "job-1"
VALUES = 4000


def content(version: int) -> bytes:
    """Return values of which a few move by one step per version."""
    values = np.arange(VALUES, dtype=np.uint16)
    for past in range(1, version + 1):
        values[past::97] += 1
    return values.tobytes()


def cut(data: bytes, dtype: str = "bfloat16") -> Chunk:
    return Chunk(ChunkRef(digest_of(data), len(data)), memoryview(data), dtype)


def encoder_with(data: bytes, dtype: str = "bfloat16") -> DeltaEncoder:
    encoder = DeltaEncoder()
    assert encoder.begin(JOB, 0, 0) == -1
    assert encoder.encode(0, cut(data, dtype)) is None
    encoder.end(0, 1)
    return encoder


class World:
    def __init__(self) -> None:
        self.chunks, self.documents = MemoryChunks(), MemoryDocuments()
        self.encoder = DeltaEncoder()
        self.now = 1_000_000.0
        self.restart()

    def restart(self) -> None:
        metrics = Metrics(CollectorRegistry())
        self.derived = DerivedChunks(self.chunks)
        self.deltas = Deltas(self.derived, self.documents, metrics, keep=12, clock=lambda: self.now)
        self.composer = DeltaComposer(self.deltas, self.derived, self.documents, metrics, clock=lambda: self.now)
        self.store = WeightStore(
            self.derived,
            self.documents,
            self.deltas,
            MemoryBus(),
            Waits(),
            metrics,
            sign=ManifestKey("token").sign,
            keep_versions=2,
            clock=lambda: self.now,
        )

    async def publish(self, version: int, *, lists: list[bytes] | None = None) -> None:
        """Commit `content(version)`, with the edge that the publisher's encoder gives, or with other lists."""
        self.now += 1
        data = content(version)
        base = self.encoder.begin(JOB, 0, version)
        delta = self.encoder.encode(0, cut(data))
        self.encoder.end(version, 1)
        if delta:
            await self.store.put_chunk(delta.edge.delta, [delta.data])
        if lists is None:
            lists = lists_of(base, [delta.edge] if delta else []) if base >= 0 else []
        for encoded in lists:
            await self.store.put_chunk(digest_of(encoded), [encoded])
        entry = TensorEntry(
            name="w",
            dtype="bfloat16",
            global_shape=(VALUES,),
            offset=(0,),
            local_shape=(VALUES,),
            start=0,
            n_bytes=len(data),
            digest=digest_of(data),
        )
        edges = tuple(ChunkRef(digest_of(encoded), len(encoded)) for encoded in lists)
        part = Part(rank=0, chunks=(cut(data).ref,), tensors=(entry,), edges=edges)
        await self.store.put_chunk(digest_of(data), [data])
        await self.store.put_part(JOB, version, 0, part.encode())
        request = CommitRequest(expect=version - 1, parts=(part.digest,), config_json="{}")
        await self.store.commit(JOB, version, request)

    async def composing(self, done: Callable[[], Awaitable[object]]) -> None:
        """Run the loop until `done`, and stop it."""
        stop = asyncio.Event()
        loop = asyncio.create_task(self.composer.compose(stop), name="compose")
        try:
            await eventually(done)
        finally:
            stop.set()
            await loop

    async def hops(self, version: int) -> list[int]:
        """Return the versions that edges lead from."""
        try:
            return [hop.base for hop in (await self.document(version)).hops]
        except NotFound:
            return []

    async def document(self, version: int) -> VersionEdges:
        return await self.deltas.edges_to(JOB, version)

    def has_hops(self, version: int, *bases: int, first: int | None = None) -> Callable[[], Awaitable[bool]]:
        async def check() -> bool:
            complete = await self.hops(version) == list(bases)
            return complete and (first is None or (await self.document(version)).hop_from(first) is not None)

        return check


@pytest.fixture
def world() -> World:
    return World()


# What the publisher remembers.


def test_the_next_version_of_a_chunk_is_a_delta_to_the_last_one() -> None:
    encoder = encoder_with(content(0))
    assert encoder.begin(JOB, 0, 1) == 0
    delta = encoder.encode(0, cut(content(1)))
    assert isinstance(delta, Delta)
    assert (delta.edge.new, delta.edge.base) == (digest_of(content(1)), digest_of(content(0)))
    assert (delta.edge.delta, delta.edge.n_bytes) == (digest_of(delta.data), len(delta.data))
    assert applied(content(0), delta.data) == content(1)
    assert encoder.encode(0, cut(content(1))) is None, "the chunk did not change"


@pytest.mark.parametrize(
    ("old", "new", "dtype"),
    [
        (b"1234", b"123456", "bfloat16"),
        (b"12345678", b"12345679", "int64"),
        (b"123", b"124", "bfloat16"),
        (bytes(1000), bytes(range(250)) * 4, "bfloat16"),
    ],
    ids=["another size", "no float", "half a value", "all of it changed"],
)
def test_delta_encoder_skips_chunks_that_do_not_pay(old: bytes, new: bytes, dtype: str) -> None:
    assert encoder_with(old, dtype).encode(0, cut(new, dtype)) is None


@pytest.mark.parametrize(
    ("job", "rank", "version"),
    [(JOB, 1, 1), ("job-2", 0, 1), (JOB, 0, 0)],
    ids=["another rank", "another job", "the same version again"],
)
def test_delta_encoder_ignores_a_base_of_another_part(job: str, rank: int, version: int) -> None:
    encoder = encoder_with(content(0))
    assert encoder.begin(job, rank, version) == -1
    assert encoder.encode(0, cut(content(1))) is None


def test_delta_encoder_after_a_reset_has_no_base() -> None:
    encoder = encoder_with(content(0))
    encoder.reset()
    assert encoder.begin(JOB, 0, 1) == -1
    assert encoder.encode(0, cut(content(1))) is None
    encoder.end(1, 0)
    assert encoder.encode(0, cut(content(2))) is None


# What the store makes of it.


async def test_edges_become_visible_with_the_commit(world: World) -> None:
    await world.publish(0)
    with pytest.raises(NotFound):
        await world.document(0)
    assert Route.decode(await world.store.route(JOB, 0, -1)).documents == ()
    with pytest.raises(NotFound, match="not committed"):
        await world.store.route(JOB, 1, 0)
    await world.publish(1)
    assert Route.decode(await world.store.route(JOB, 1, 0)).documents == (await world.document(1),)
    (edge,) = (await world.document(1)).edges()
    assert applied(content(0), world.chunks.held[edge.delta][0]) == content(1)


def bases(version: int) -> list[int]:
    return [version - span for span in (1, 2, 4, 8) if version >= span]


async def with_hops(world: World, versions: int, *, pinned: bool = False) -> None:
    """Publish versions 0, 1, ..., each when the hops to the one before it are composed; perhaps pin the first one."""
    for version in range(versions):
        await world.publish(version)
        if pinned and version == 0:
            await world.store.pin(JOB, 0)
        from_first = 0 if pinned and version > 8 and version % 8 == 0 else None
        await world.composing(world.has_hops(version, *bases(version), first=from_first))


async def test_hops_over_two_four_and_eight_versions_are_composed_exactly(world: World) -> None:
    await with_hops(world, 10)
    found = await world.document(9)
    assert [hop.base for hop in found.hops] == [8, 7, 5, 1]
    for hop in found.hops:
        (edge,) = hop.edges
        assert applied(content(hop.base), world.chunks.held[edge.delta][0]) == content(9)


async def test_a_route_has_the_documents_along_the_longest_hops(world: World) -> None:
    await with_hops(world, 12)
    for have, versions in {10: [11], 3: [11], 1: [11, 3], 0: [11, 3, 1], -1: [11, 3, 1]}.items():
        route = Route.decode(await world.store.route(JOB, 11, have))
        assert [document.version for document in route.documents] == versions
    with pytest.raises(NotFound, match="not committed"):
        await world.store.route(JOB, 13, 0)


async def test_every_eighth_version_has_a_hop_from_a_pinned_first_one(world: World) -> None:
    await with_hops(world, 26, pinned=True)
    found = await world.document(24)
    assert found.from_base is not None
    (edge,) = found.from_base.edges
    assert applied(content(0), world.chunks.held[edge.delta][0]) == content(24)
    await world.store.collector.collect_once()  # which drops the edges to all but the newest twelve
    route = Route.decode(await world.store.route(JOB, 25, 0))
    edges = [edge for document in route.documents for edge in document.edges()]
    large = ChunkRef(digest_of(content(25)), 4 << 20)  # so that any delta is cheaper
    chunk_plans = plan([large], edges, {digest_of(content(0))})
    assert len(chunk_plans[0].path) == 2, "from the first version to the 24th, and on from there"


async def test_late_compose_loop_skips_removed_versions(world: World) -> None:
    for version in range(6):
        await world.publish(version)
    await world.store.collector.collect_once()
    await world.composing(world.has_hops(5, 4, 3))
    assert await world.hops(3) == [2], "version 3 is not retained"


async def test_hops_missing_after_a_kill_are_composed_at_start(world: World) -> None:
    for version in range(3):
        await world.publish(version)
    assert await world.hops(2) == [1]
    world.restart()
    await world.store.load()
    await world.composing(world.has_hops(2, 1, 0))


async def test_corrupt_delta_is_not_composed(world: World) -> None:
    await world.publish(0)
    await world.publish(1)
    (edge,) = (await world.document(1)).edges()
    data, used_at = world.chunks.held[edge.delta]
    world.chunks.held[edge.delta] = data[:-1] + b"!", used_at
    await world.publish(2)
    await world.composing(world.has_hops(2, 1, 0))
    assert [len(hop.edges) for hop in (await world.document(2)).hops] == [1, 0]


async def test_a_full_disk_stops_composing_and_nothing_else(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    for version in range(3):
        await world.publish(version)

    tries: list[int] = []

    async def no_room(*_: object) -> None:
        tries.append(1)
        raise StoreFull("no room")

    async def tried() -> bool:
        return bool(tries)

    with monkeypatch.context() as full:
        full.setattr(world.chunks, "put", no_room)
        await world.composing(tried)
    assert await world.hops(2) == [1]
    await world.publish(3)
    await world.composing(world.has_hops(3, 2, 1))


async def test_edges_outlive_their_versions_and_are_removed_with_their_deltas(world: World) -> None:
    await with_hops(world, 14)
    await world.store.collector.collect_once()
    assert await world.documents.edge_versions(JOB) == list(range(2, 14))
    needed = {edge.delta for version in range(2, 14) for edge in (await world.document(version)).edges()}
    lists = {digest for digest in world.chunks.held if digest not in needed}
    dense = {digest_of(content(version)) for version in (12, 13)}
    assert dense <= lists
    for digest in lists - dense:
        assert world.chunks.held[digest][0].startswith(b'{"base"'), "only lists wait for the end of the grace"
    world.now += UPLOAD_GRACE_S + 1
    await world.store.collector.collect_once()
    assert set(world.chunks.held) == needed | dense


async def test_a_part_that_waits_keeps_its_edges(world: World) -> None:
    await world.publish(0)
    with pytest.raises(Undecodable):
        await world.publish(1, lists=[b"no list"])
    world.now += UPLOAD_GRACE_S - 10
    await world.store.collector.collect_once()
    assert digest_of(b"no list") in world.chunks.held


@pytest.mark.parametrize("data", [b"no list", b'{"base":1,"edges":[]}'], ids=["no list", "from itself"])
async def test_a_commit_with_bad_edges_is_refused_and_the_head_stays(world: World, data: bytes) -> None:
    await world.publish(0)
    with pytest.raises(Undecodable):
        await world.publish(1, lists=[data])
    assert world.store.versions_of(JOB).head == 0
    world.encoder.reset()
    await world.publish(1)
    assert world.store.versions_of(JOB).head == 1


async def test_edges_whose_delta_is_not_there_are_left_out(world: World) -> None:
    await world.publish(0)
    delta = encoder_with(content(0)).encode(0, cut(content(1)))
    assert delta is not None
    lost = delta.edge._replace(delta="0" * 64)
    await world.publish(1, lists=lists_of(0, [lost]))
    assert list((await world.document(1)).edges()) == []


async def test_corrupt_edges_document_counts_as_none(world: World) -> None:
    for version in range(3):
        await world.publish(version)
    await world.documents.put_edges(JOB, 2, b"corrupt")
    with pytest.raises(NotFound, match="cannot be read"):
        await world.document(2)
    assert Route.decode(await world.store.route(JOB, 2, 1)).documents == ()
    await world.store.collector.collect_once()
    await world.publish(3)
    await world.composing(world.has_hops(3, 2))
