"""The weight store over fakes: what a commit checks, what is announced, what is removed."""

from __future__ import annotations

import asyncio

import pytest

from rlboost.services.weight_store import deltas, garbage
from rlboost.services.weight_store.app import WeightStore
from rlboost.services.weight_store.domain.versions import JobVersions, Version, decode_model
from rlboost.services.weight_store.garbage import UPLOAD_GRACE_S
from rlboost.services.weight_store.ports import StoreFull
from rlboost.shared.errors import Conflict, NotFound, StoreUnavailable, Undecodable, UnsuitableWeights
from rlboost.shared.streams.bus import HashSet
from rlboost.shared.streams.names import job_refused
from rlboost.shared.weights.manifest import ChunkRef, Manifest, digest_of
from rlboost.shared.weights.rest_models import CommitRequest
from tests.support.eventually import eventually
from tests.support.weight_store_rig import JOB, World, commit, part_of, publish


@pytest.fixture
def world() -> World:
    return World()


@pytest.fixture
def store(world: World) -> WeightStore:
    return world.store()


async def test_version_is_invisible_before_its_commit(store: WeightStore) -> None:
    request = await publish(store, 0, b"weights")
    with pytest.raises(NotFound):
        store.versions_of(JOB)
    with pytest.raises(NotFound):
        await store.manifest(JOB, 0)
    committed = await store.commit(JOB, 0, request)
    data, digest = await store.manifest(JOB, 0)
    assert digest == committed.digest == digest_of(data)
    assert Manifest.decode(data).parts[0].digest == request.parts[0]
    assert store.all_versions() == [store.versions_of(JOB)]


async def test_an_adapter_keeps_its_base_and_the_chunks_of_it(world: World) -> None:
    store = world.store(keep=1)
    await commit(store, 0, b"the whole model")
    for version in (1, 2, 3):
        request = await publish(store, version, b"adapter %d" % version)
        request = request.model_copy(update={"base_version": 0, "adapter_json": "{}"})
        committed = await store.commit(JOB, version, request)
        assert await store.commit(JOB, version, request) == committed
        with pytest.raises(Conflict, match="committed already"):
            await store.commit(JOB, version, request.model_copy(update={"adapter_json": "{ }"}))
    world.now += 10 * UPLOAD_GRACE_S
    await store.collector.collect_once()
    data, _ = await store.manifest(JOB, 3)
    manifest = Manifest.decode(data)
    assert (manifest.base_version, manifest.adapter_json) == (0, "{}")
    base = Manifest.decode((await store.manifest(JOB, 0))[0])
    assert await store.missing([*base.chunks(), *manifest.chunks()]) == []
    assert [known.version for known in store.versions_of(JOB).versions] == [0, 3]


async def test_an_adapter_without_its_base_is_refused(store: WeightStore) -> None:
    await commit(store, 0, b"the whole model")
    request = await publish(store, 1, b"adapter")
    with pytest.raises(Conflict, match="its base 5"):
        await store.commit(JOB, 1, request.model_copy(update={"base_version": 5, "adapter_json": "{}"}))


async def test_repeated_commit_changes_nothing_and_is_announced_once(world: World, store: WeightStore) -> None:
    request = await publish(store, 0, b"weights")
    first = await store.commit(JOB, 0, request)
    await commit(store, 1, b"updated")
    world.now += 10
    assert await store.commit(JOB, 0, request) == first
    assert store.versions_of(JOB).head == 1
    await announce(store, world, [0, 1])


async def announce(store: WeightStore, world: World, expected: list[int]) -> None:
    stop = asyncio.Event()
    loop = asyncio.create_task(store.announcements.announce(stop), name="announce")

    async def announced() -> bool:
        return await world.announced() == expected

    await eventually(announced)
    stop.set()
    await loop


async def test_version_keeps_the_parity_reference_of_its_first_commit(store: WeightStore) -> None:
    request = (await publish(store, 0, b"weights")).model_copy(update={"parity_json": "of a trainer"})
    await store.commit(JOB, 0, request)
    await store.commit(JOB, 0, request.model_copy(update={"parity_json": "of its successor, a rounding error off"}))
    data, _ = await store.manifest(JOB, 0)
    assert Manifest.decode(data).parity_json == "of a trainer"


async def test_the_same_version_with_another_content_is_a_conflict(store: WeightStore) -> None:
    await commit(store, 0, b"weights")
    with pytest.raises(Conflict, match="committed already"):
        await commit(store, 0, b"other weights")


async def test_of_two_commits_on_one_head_the_second_loses(store: WeightStore) -> None:
    await commit(store, 0, b"weights")
    ours = await publish(store, 1, b"our own")
    theirs = (await publish(store, 2, b"another")).model_copy(update={"expect": 0})
    results = await asyncio.gather(store.commit(JOB, 1, ours), store.commit(JOB, 2, theirs), return_exceptions=True)
    assert isinstance(results[0], Version)
    assert isinstance(results[1], Conflict)
    assert store.versions_of(JOB).head == 1


async def test_commit_without_every_rank_is_refused(store: WeightStore) -> None:
    request = await publish(store, 0, b"weights")
    both = request.model_copy(update={"parts": (*request.parts, digest_of(b"rank 1's"))})
    with pytest.raises(Conflict, match="rank 1 of 2 has not published"):
        await store.commit(JOB, 0, both)


async def test_a_part_of_an_earlier_attempt_is_not_mixed_in(store: WeightStore) -> None:
    request = await publish(store, 0, b"weights")
    await publish(store, 0, b"weights of another attempt")
    with pytest.raises(Conflict, match="part of rank 0"):
        await store.commit(JOB, 0, request)


async def test_commit_without_every_chunk_is_refused(world: World, store: WeightStore) -> None:
    request = await publish(store, 0, b"weights")
    world.chunks.held.clear()
    with pytest.raises(Conflict, match="lacks 1 of 1 chunks"):
        await store.commit(JOB, 0, request)


async def test_commit_of_partial_tensors_is_refused(store: WeightStore) -> None:
    part = part_of(b"weights", rows=(0, 3))
    await store.put_chunk(digest_of(b"wei"), [b"wei"])
    await store.put_part(JOB, 0, 0, part.encode())
    with pytest.raises(Conflict, match="tensor w: its shards cover 3 of 7 elements"):
        await store.commit(JOB, 0, CommitRequest(expect=-1, parts=(part.digest,), config_json="{}"))


async def test_a_part_is_put_under_its_own_rank(store: WeightStore) -> None:
    with pytest.raises(Undecodable, match="rank 0, not of rank 1"):
        await store.put_part(JOB, 0, 1, part_of(b"weights").encode())
    with pytest.raises(Undecodable):
        await store.put_part(JOB, 0, 1, b"{}")


async def test_commit_during_a_redis_outage_is_announced_later(world: World, store: WeightStore) -> None:
    world.bus.down = True
    stop = asyncio.Event()
    loop = asyncio.create_task(store.announcements.announce(stop), name="announce")
    await commit(store, 0, b"weights")
    await eventually(world.waits.current)
    assert world.waits.current()[0].because.startswith(f"announce version 0 of job {JOB}")
    assert store.versions_of(JOB).head == 0
    world.bus.down = False

    async def announced() -> bool:
        return await world.announced() == [0]

    await eventually(announced)
    stop.set()
    await loop


async def test_a_stop_does_not_wait_for_redis(world: World, store: WeightStore) -> None:
    world.bus.down = True
    stop = asyncio.Event()
    loop = asyncio.create_task(store.announcements.announce(stop), name="announce")
    await commit(store, 0, b"weights")
    await eventually(world.waits.current)
    stop.set()
    async with asyncio.timeout(5):
        await loop


async def test_commit_not_announced_before_a_crash_is_announced_at_start(world: World, store: WeightStore) -> None:
    await commit(store, 0, b"weights")
    await commit(store, 1, b"updated")
    again = world.store()
    await again.load()
    await announce(again, world, [1])


async def test_other_tensors_than_the_heads_are_refused_unless_no_worker_loads_those(
    world: World, store: WeightStore
) -> None:
    await commit(store, 0, b"weights")
    with pytest.raises(
        UnsuitableWeights, match=r"version 1 .* than version 0: 1 of another shape, such as w\. .*module"
    ):
        await commit(store, 1, b"wrong weights")
    assert store.versions_of(JOB).head == 0
    await world.bus.transact([HashSet(job_refused(JOB), {"0": "no tensor 'w'"})])
    await commit(store, 1, b"right weights")
    with pytest.raises(UnsuitableWeights):
        await commit(store, 2, b"weights")
    await commit(store, 2, b"other weights")


async def test_a_full_disk_leaves_the_old_head(
    world: World, store: WeightStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    await commit(store, 0, b"weights")
    request = await publish(store, 1, b"updated")

    async def no_room(_: object) -> None:
        raise StoreFull("no room")

    with monkeypatch.context() as full:
        full.setattr(world.documents, "save_versions", no_room)
        with pytest.raises(StoreFull):
            await store.commit(JOB, 1, request)
    assert store.versions_of(JOB).head == 0
    assert (await store.commit(JOB, 1, request)).version == 1


async def test_collection_removes_unreferenced_chunks_of_a_retired_version(world: World, store: WeightStore) -> None:
    for number in range(4):
        world.now += 1
        await commit(store, number, b"weights %d" % number if number else b"weights 3")
    await store.collector.collect_once()
    # Version 0 has the content of version 3; version 1 has its own.
    assert set(world.chunks.held) == {digest_of(b"weights 2"), digest_of(b"weights 3")}
    assert [known.version for known in store.versions_of(JOB).versions] == [2, 3]
    assert store.versions_of(JOB).retired == ()
    with pytest.raises(NotFound):
        await world.documents.manifest(JOB, 1)
    with pytest.raises(NotFound, match="version 1 of job job-1"):
        await store.manifest(JOB, 1)


async def test_a_pinned_version_keeps_its_chunks(world: World, store: WeightStore) -> None:
    for number in range(4):
        await commit(store, number, b"weights %d" % number)
        if number == 0:
            await store.pin(JOB, 0)
    await store.collector.collect_once()
    await store.manifest(JOB, 0)
    assert digest_of(b"weights 0") in world.chunks.held
    await store.unpin(JOB, 0)
    await store.collector.collect_once()
    assert digest_of(b"weights 0") not in world.chunks.held


async def test_an_upload_in_progress_is_safe_from_collection(world: World, store: WeightStore) -> None:
    for number in range(2):
        await commit(store, number, b"weights %d" % number)
    world.now += 1
    # A publisher of version 3 learns that the store has the chunk of version 0.
    assert await store.missing([ChunkRef(digest_of(b"weights 0"), 9)]) == []
    await store.put_chunk(digest_of(b"new"), [b"new"])
    await commit(store, 2, b"weights 2")
    world.now += UPLOAD_GRACE_S - 1
    await store.collector.collect_once()
    assert await store.missing([ChunkRef(digest_of(b"weights 0"), 9), ChunkRef(digest_of(b"new"), 3)]) == []


async def test_abandoned_upload_is_removed_after_the_grace(world: World, store: WeightStore) -> None:
    await commit(store, 0, b"weights")
    request = await publish(store, 1, b"abandoned")
    world.now += UPLOAD_GRACE_S + 1
    await store.collector.collect_once()
    assert set(world.chunks.held) == {digest_of(b"weights")}
    with pytest.raises(Conflict, match="rank 0 of 1 has not published"):
        await store.commit(JOB, 1, request)


async def test_a_part_that_waits_keeps_its_chunks(world: World, store: WeightStore) -> None:
    request = await publish(store, 0, b"weights")
    world.now += UPLOAD_GRACE_S - 1
    await store.put_part(JOB, 0, 0, part_of(b"weights").encode())
    world.now += UPLOAD_GRACE_S - 1
    await store.collector.collect_once()
    assert (await store.commit(JOB, 0, request)).version == 0


async def test_collection_killed_midway_is_repeated(
    world: World, store: WeightStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(3):
        await commit(store, number, b"weights %d" % number)

    async def killed(_: object) -> None:
        raise RuntimeError("killed")

    with monkeypatch.context() as dying:
        dying.setattr(world.documents, "save_versions", killed)
        with pytest.raises(RuntimeError):
            await store.collector.collect_once()
    again = world.store()
    await again.load()
    await again.collector.collect_once()
    assert again.versions_of(JOB).retired == ()
    assert set(world.chunks.held) == {digest_of(b"weights 1"), digest_of(b"weights 2")}


async def test_collecting_and_composing_wait_for_the_object_store(
    world: World, store: WeightStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(3):
        await commit(store, number, b"weights %d" % number)
    monkeypatch.setattr(garbage, "_COLLECT_INTERVAL_S", 0.001)
    monkeypatch.setattr(deltas, "_RETRY_S", 0.001)
    asked = {"last_used": 0, "edges": 0}

    def fail_once(port: object, name: str) -> None:
        answer = getattr(port, name)

        async def call(*args: object) -> object:
            asked[name] += 1
            if asked[name] < 3:
                raise StoreUnavailable("no answer")
            return await answer(*args)

        monkeypatch.setattr(port, name, call)

    fail_once(world.chunks, "last_used")
    fail_once(world.documents, "edges")
    stop = asyncio.Event()
    loops = [asyncio.create_task(loop(stop)) for loop in (store.collector.collect, world.composer.compose)]
    await eventually(lambda: digest_of(b"weights 0") not in world.chunks.held)
    # Each of the three commits was asked for once in the end.
    await eventually(lambda: asked["edges"] == 5)
    stop.set()
    await asyncio.gather(*loops)


async def test_unreadable_model_document_leaves_the_other_jobs_served(world: World, store: WeightStore) -> None:
    await commit(store, 0, b"some")
    successor, read = world.store(), world.documents.versions_of

    async def damaged(job_id: str) -> JobVersions:
        return decode_model(b"") if job_id == "damaged" else await read(job_id)

    async def jobs() -> list[str]:
        return ["damaged", JOB]

    world.documents.versions_of, world.documents.jobs = damaged, jobs  # type: ignore[method-assign]
    await successor.load()
    assert successor.versions_of(JOB).head == 0
    with pytest.raises(Conflict, match=r"models/damaged"):
        successor.versions_of("damaged")
    with pytest.raises(Conflict, match=r"models/damaged"):
        await successor.commit("damaged", 0, CommitRequest(expect=-1, parts=(digest_of(b""),), config_json="{}"))
    # What the job refers to is unknown, so nothing is removed.
    world.now += 10 * UPLOAD_GRACE_S
    await successor.put_chunk(digest_of(b"other"), [b"other"])
    world.now += 10 * UPLOAD_GRACE_S
    with pytest.raises(Undecodable):
        await successor.collector.collect_once()
    assert await world.chunks.read(digest_of(b"other")) == b"other"


@pytest.mark.parametrize("damage", ["unreadable", "lost"])
async def test_damaged_manifest_defers_the_collection(
    world: World, store: WeightStore, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    monkeypatch.setattr(garbage, "_COLLECT_INTERVAL_S", 0.001)
    await commit(store, 0, b"some")
    if damage == "lost":
        await world.documents.remove_manifest(JOB, 0)
    else:
        await world.documents.put_manifest(JOB, 0, b"{")
    world.now += 2 * UPLOAD_GRACE_S
    stop, n_rounds, jobs = asyncio.Event(), 0, world.documents.jobs

    async def counted() -> list[str]:
        nonlocal n_rounds
        n_rounds += 1
        return await jobs()

    world.documents.jobs = counted  # type: ignore[method-assign]
    collecting = asyncio.create_task(store.collector.collect(stop))
    await eventually(lambda: n_rounds > 2 or collecting.done())
    stop.set()
    await collecting
    assert await world.chunks.read(digest_of(b"some")) == b"some"


async def test_damaged_chunk_is_removed_and_waits_for_its_publisher(world: World, store: WeightStore) -> None:
    content = b"some weights"
    await commit(store, 0, content)
    digest = digest_of(content)
    assert await store.damaged.verify(digest)
    world.chunks.held[digest] = b"other bytes!", world.now
    assert not await store.damaged.verify(digest)
    with pytest.raises(StoreUnavailable, match="is damaged or lost"):
        await store.source(digest)
    assert store.damaged.missing() == [digest]
    await store.put_chunk(digest, [content])
    assert store.damaged.missing() == []
    await store.source(digest)


async def test_chunk_that_no_version_needs_is_not_found(store: WeightStore) -> None:
    await commit(store, 0, b"some weights")
    with pytest.raises(NotFound):
        await store.source(digest_of(b"a retired chunk"))
    assert store.damaged.missing() == []
