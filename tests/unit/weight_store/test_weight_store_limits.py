"""The weight store's size limit, the deletion of a job's weights, and what is retained of ended jobs."""

from __future__ import annotations

import json

import pytest

from rlboost.services.weight_store.app import WeightStore
from rlboost.services.weight_store.chunks import LimitedChunks
from rlboost.services.weight_store.garbage import UPLOAD_GRACE_S
from rlboost.services.weight_store.ports import StoreFull
from rlboost.shared.errors import Conflict, NotFound
from rlboost.shared.streams.bus import HashSet, Renew
from rlboost.shared.streams.names import JOBS, trainer_lease
from rlboost.shared.weights.manifest import digest_of
from tests.support.weight_store_rig import JOB, World, commit, publish


@pytest.fixture
def world() -> World:
    return World()


@pytest.fixture
def store(world: World) -> WeightStore:
    return world.store()


async def in_state(world: World, state: str) -> None:
    await world.bus.transact([HashSet(JOBS, {JOB: f'{{"id": "{JOB}", "state": "{state}"}}'})])


def limited(world: World, max_bytes: int) -> LimitedChunks:
    return LimitedChunks(world.chunks, max_bytes, lambda: world.now)


async def put(chunks: LimitedChunks, data: bytes) -> None:
    await chunks.put(digest_of(data), [data], 0.0)


async def test_write_above_the_limit_is_rejected_with_what_to_do(world: World) -> None:
    chunks = limited(world, 100)
    await chunks.measure()
    await put(chunks, b"a" * 60)
    with pytest.raises(StoreFull, match=r"holds 60 of at most 100 bytes: delete .* RLBOOST_WEIGHT_STORE_MAX_BYTES"):
        await put(chunks, b"b" * 41)
    await put(chunks, b"c" * 40)
    assert await world.chunks.n_bytes() == 100


async def test_failed_write_does_not_count(world: World) -> None:
    chunks = limited(world, 100)
    world.chunks.full = True
    with pytest.raises(StoreFull, match="no room in the fake"):
        await put(chunks, b"a" * 60)
    world.chunks.full = False
    await put(chunks, b"a" * 60)


async def test_garbage_is_collected_before_a_write_is_rejected(world: World) -> None:
    chunks = limited(world, 250)
    world_chunks = world.chunks
    world.chunks = chunks  # type: ignore[assignment] # the store writes through the limit
    store = world.store(keep=1)
    chunks.reclaim = store.collector.tidy
    for version in range(4):
        world.now += 60
        await commit(store, version, bytes([version]) * 100)
    assert store.versions_of(JOB).head == 3
    assert await world_chunks.n_bytes() == 200


async def test_deleted_model_is_unknown_and_its_chunks_are_removed(world: World, store: WeightStore) -> None:
    await commit(store, 0, b"weights 0")
    await store.pin(JOB, 0)
    for version in range(1, 4):
        await commit(store, version, b"weights %d" % version)
    await in_state(world, "completed")
    await store.delete(JOB)
    with pytest.raises(NotFound):
        store.versions_of(JOB)
    with pytest.raises(NotFound):
        await store.delete(JOB)
    world.now += UPLOAD_GRACE_S + 1
    await store.collector.tidy()
    assert not world.chunks.held
    again = world.store()
    await again.load()
    assert again.all_versions() == []


@pytest.mark.parametrize("state", ["pending", "running", "paused"])
async def test_weights_of_a_job_that_has_not_ended_are_not_deleted(
    world: World, store: WeightStore, state: str
) -> None:
    await commit(store, 0, b"weights")
    await in_state(world, state)
    with pytest.raises(Conflict, match=rf"{JOB} has not ended \(state {state}\): cancel it"):
        await store.delete(JOB)
    assert store.versions_of(JOB).head == 0


async def test_weights_are_not_deleted_while_a_trainer_holds_the_job(world: World, store: WeightStore) -> None:
    await commit(store, 0, b"weights")
    await in_state(world, "cancelled")
    await world.bus.transact([Renew(trainer_lease(JOB), "trainer-1", 60.0)])
    with pytest.raises(Conflict, match="has not ended"):
        await store.delete(JOB)


@pytest.mark.parametrize("record", ["", "{", "[]", "null", '{"state": 7}'])
async def test_job_with_a_damaged_record_counts_as_not_ended(world: World, store: WeightStore, record: str) -> None:
    for version in range(2):
        await commit(store, version, b"weights %d" % version)
    await world.bus.transact([HashSet(JOBS, {JOB: record})])
    with pytest.raises(Conflict, match="has not ended"):
        await store.delete(JOB)
    await store.collector.tidy()
    assert [known.version for known in store.versions_of(JOB).versions] == [0, 1]


async def test_only_the_last_version_of_an_ended_job_is_retained(world: World, store: WeightStore) -> None:
    for version in range(3):
        await commit(store, version, b"weights %d" % version)
    await in_state(world, "running")
    await store.collector.tidy()
    assert [known.version for known in store.versions_of(JOB).versions] == [1, 2]
    await in_state(world, "completed")
    await store.collector.tidy()
    assert [known.version for known in store.versions_of(JOB).versions] == [2]
    assert set(world.chunks.held) == {digest_of(b"weights 2")}


async def test_full_disk_defers_retiring_and_still_frees_space(
    world: World, store: WeightStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def no_room(_: object) -> None:
        raise StoreFull("no room")

    for version in range(2):
        await commit(store, version, b"weights %d" % version)
    await store.put_chunk(digest_of(b"abandoned"), [b"abandoned"])
    world.now += UPLOAD_GRACE_S + 1
    await in_state(world, "completed")
    with monkeypatch.context() as full:
        full.setattr(world.documents, "save_versions", no_room)
        await store.collector.tidy()
    assert [known.version for known in store.versions_of(JOB).versions] == [0, 1]
    assert digest_of(b"abandoned") not in world.chunks.held
    await store.collector.tidy()
    assert [known.version for known in store.versions_of(JOB).versions] == [1]


async def test_versions_of_a_job_that_ended_just_now_remain(world: World, store: WeightStore) -> None:
    for version in range(2):
        await commit(store, version, b"weights %d" % version)
    record = {"state": "completed", "finished_at": world.now}
    await world.bus.transact([HashSet(JOBS, {JOB: json.dumps(record)})])
    await store.collector.tidy(ended_before=world.now)
    assert [known.version for known in store.versions_of(JOB).versions] == [0, 1]
    await store.collector.tidy(ended_before=world.now + 0.1)
    assert [known.version for known in store.versions_of(JOB).versions] == [1]


async def test_base_of_an_ended_adapter_job_is_retained(world: World, store: WeightStore) -> None:
    await commit(store, 0, b"base")
    for version in (1, 2):
        request = await publish(store, version, b"adapter %d" % version)
        await store.commit(JOB, version, request.model_copy(update={"base_version": 0, "adapter_json": "{}"}))
    await in_state(world, "completed")
    await store.collector.tidy()
    assert [known.version for known in store.versions_of(JOB).versions] == [0, 2]
