"""Publishing, following and pulling over a store in memory: what comes ahead of a commit, and what that never does."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import structlog

from shared.errors import Fatal, NotFound, StoreUnavailable
from shared.waiting import Waits
from shared.weights import drafting, following, prefetch
from shared.weights import puller as puller_module
from shared.weights.cache import Cache
from shared.weights.drafts import Draft, DraftNews, DraftPart
from shared.weights.following import DraftFollower
from shared.weights.manifest import Part
from shared.weights.publisher import Publisher, Shard
from shared.weights.puller import Puller
from tests.support.eventually import eventually
from tests.support.memory_store import CHUNK_BYTES, MemoryStore, commit, shards
from tests.support.tiny_versions import JOB

N_CHUNKS = 40


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(following, "_WAIT_S", 0.0)


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def publisher(store: MemoryStore) -> Publisher:
    return Publisher(store, Waits(), chunk_bytes=CHUNK_BYTES)


@pytest.fixture
def puller(store: MemoryStore, tmp_path: Path) -> Iterator[Puller]:
    puller = Puller(store, Cache(tmp_path / "cache"), Waits())
    yield puller
    puller.close()


@pytest.fixture
def follower(store: MemoryStore, puller: Puller) -> DraftFollower:
    return DraftFollower(store, puller)


class Committed(NamedTuple):
    """The job's first version, which everybody has."""

    part: Part


@pytest.fixture
async def first(publisher: Publisher, puller: Puller) -> Committed:
    part = await publisher.publish(JOB, 0, 0, shards(0))
    await commit(publisher, 0, part)
    await puller.pull(JOB, 0)
    return Committed(part)


def in_cache(tmp_path: Path) -> set[str]:
    return {path.name for path in (tmp_path / "cache" / "chunks").iterdir()}


def digests(part: Part) -> set[str]:
    return {chunk.digest for chunk in part.chunks}


async def news(store: MemoryStore, after: int = -1) -> DraftNews:
    return await store.draft(JOB, after=after, wait_s=0.0)


async def drafted(store: MemoryStore) -> set[str]:
    return {chunk.digest for part in (await news(store)).parts for chunk in part.chunks}


# Publishing.


async def test_chunks_are_told_of_while_later_ones_are_not_even_made(store: MemoryStore, publisher: Publisher) -> None:
    (whole,) = shards(1, n_chunks=100)
    told: list[int] = []

    def halves() -> Iterator[Shard]:
        data = memoryview(whole.data)
        yield whole._replace(name="a", global_shape=(70_000,), local_shape=(70_000,), data=data[:70_000])
        told.append(len(asyncio.run_coroutine_threadsafe(drafted(store), loop).result()))
        yield whole._replace(name="b", global_shape=(30_000,), local_shape=(30_000,), data=data[70_000:])

    loop = asyncio.get_running_loop()
    part = await publisher.publish(JOB, 0, 0, halves())
    assert told[0] >= 32
    assert await drafted(store) == digests(part)
    await commit(publisher, 0, part)
    assert (await news(store)).version is None


async def test_chunks_that_the_store_had_are_told_of_too(
    store: MemoryStore, publisher: Publisher, first: Committed
) -> None:
    part = await publisher.publish(JOB, 1, 0, shards(0))
    assert await drafted(store) == digests(first.part) == digests(part)


async def test_nothing_is_told_of_a_version_with_deltas(store: MemoryStore) -> None:
    publisher = Publisher(store, Waits(), chunk_bytes=CHUNK_BYTES, deltas=True)
    await publisher.publish(JOB, 0, 0, shards(1))
    assert (await news(store)).version is None


@pytest.mark.parametrize(
    "error", [NotFound("no such route"), StoreUnavailable("away"), Fatal("refused"), TimeoutError("late")], ids=repr
)
async def test_a_store_that_takes_no_drafts_changes_nothing(
    store: MemoryStore, publisher: Publisher, error: Exception
) -> None:
    store.draft_error = error
    part = await publisher.publish(JOB, 0, 0, shards(1))
    await commit(publisher, 0, part)
    assert (await store.manifest(JOB, 0)).parts == (part,)


async def test_a_store_that_hangs_over_a_draft_delays_nothing(
    store: MemoryStore, publisher: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def hang(*_: object) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(store, "put_draft", hang)
    async with asyncio.timeout(drafting._LIMIT_S / 2):
        await publisher.publish(JOB, 0, 0, shards(1))


async def test_what_was_not_told_while_the_store_was_away_is_told_later(
    store: MemoryStore, publisher: Publisher
) -> None:
    (whole,) = shards(1, n_chunks=100)

    def breaking() -> Iterator[Shard]:
        data = memoryview(whole.data)
        store.draft_error = StoreUnavailable("away")
        yield whole._replace(name="a", global_shape=(70_000,), local_shape=(70_000,), data=data[:70_000])
        store.draft_error = None
        yield whole._replace(name="b", global_shape=(30_000,), local_shape=(30_000,), data=data[70_000:])

    part = await publisher.publish(JOB, 0, 0, breaking())
    assert await drafted(store) == digests(part)


# Following.


async def test_at_the_commit_everything_is_there(
    store: MemoryStore, publisher: Publisher, puller: Puller, follower: DraftFollower, first: Committed
) -> None:
    part = await publisher.publish(JOB, 1, 0, shards(1))
    await follower.follow(JOB)
    assert puller.prefetched_bytes == N_CHUNKS * CHUNK_BYTES
    store.sent.clear()
    await commit(publisher, 1, part)
    with structlog.testing.capture_logs() as logs:
        pulled = await puller.pull(JOB, 1)
    assert store.sent == []
    assert [bytes(data) for _, data in pulled.tensors()] == [shards(1)[0].data]
    (line,) = [entry for entry in logs if entry["event"] == "weights_pulled"]
    assert (line["bytes_prefetched"], line["bytes_dense"]) == (N_CHUNKS * CHUNK_BYTES, 0)


async def test_nothing_comes_ahead_of_the_first_pull(
    publisher: Publisher, puller: Puller, follower: DraftFollower, tmp_path: Path
) -> None:
    await publisher.publish(JOB, 0, 0, shards(0))
    await follower.follow(JOB)
    assert in_cache(tmp_path) == set()


async def test_the_pull_of_a_version_before_leaves_what_came_ahead(
    publisher: Publisher, puller: Puller, follower: DraftFollower, first: Committed, tmp_path: Path
) -> None:
    await commit(publisher, 1, await publisher.publish(JOB, 1, 0, shards(1)))
    part = await publisher.publish(JOB, 2, 0, shards(2))
    await follower.follow(JOB)
    await puller.pull(JOB, 1)
    assert digests(part) <= in_cache(tmp_path)
    await commit(publisher, 2, part)
    await puller.pull(JOB, 2)
    assert puller.last.bytes_prefetched == N_CHUNKS * CHUNK_BYTES
    assert puller.last.from_store == 0


async def test_a_pull_cuts_it_off_and_it_goes_on_afterwards(
    store: MemoryStore,
    publisher: Publisher,
    puller: Puller,
    follower: DraftFollower,
    first: Committed,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    await commit(publisher, 1, await publisher.publish(JOB, 1, 0, shards(1)))
    part = await publisher.publish(JOB, 2, 0, shards(2))
    store.may_send.clear()
    store.asked.clear()
    ahead = asyncio.create_task(follower.follow(JOB))
    await store.asked.wait()
    manifest = store.manifest

    async def begun(job_id: str, version: int) -> object:
        # The pull has the cache: from here on chunks come, and they are the pull's.
        store.may_send.set()
        return await manifest(job_id, version)

    monkeypatch.setattr(store, "manifest", begun)
    await puller.pull(JOB, 1)
    assert set(store.sent[-N_CHUNKS:]).isdisjoint(digests(part))
    await ahead
    assert set(store.sent[-N_CHUNKS:]) == digests(part)


async def test_a_pull_of_the_same_version_waits_for_what_is_under_way_and_brings_the_rest(
    store: MemoryStore, publisher: Publisher, puller: Puller, follower: DraftFollower, first: Committed
) -> None:
    part = await publisher.publish(JOB, 1, 0, shards(1))
    store.may_send.clear()
    store.asked.clear()
    store.sent.clear()
    ahead = asyncio.create_task(follower.follow(JOB))
    await eventually(lambda: store.n_asked == N_CHUNKS + prefetch.CONCURRENCY)
    await commit(publisher, 1, part)
    pulling = asyncio.create_task(puller.pull(JOB, 1))
    await asyncio.sleep(0)
    store.may_send.set()
    await asyncio.gather(pulling, ahead)
    assert sorted(store.sent) == sorted(digests(part))
    assert puller.last.bytes_prefetched == prefetch.CONCURRENCY * CHUNK_BYTES


async def test_a_pull_of_the_same_version_waits_for_a_while_only(
    store: MemoryStore,
    publisher: Publisher,
    puller: Puller,
    follower: DraftFollower,
    first: Committed,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(puller_module, "_SHARED_S", 0.01)
    await commit(publisher, 1, await publisher.publish(JOB, 1, 0, shards(1)))
    await puller.pull(JOB, 1)
    part = await publisher.publish(JOB, 2, 0, shards(2))
    store.may_send.clear()
    store.asked.clear()
    ahead = asyncio.create_task(follower.follow(JOB))
    await store.asked.wait()
    await commit(publisher, 2, part)
    before = store.n_asked
    pulling = asyncio.create_task(puller.pull(JOB, 2))
    await eventually(lambda: store.n_asked > before)
    assert not ahead.done()
    store.may_send.set()
    await asyncio.gather(pulling, ahead)


async def test_pulls_that_queue_all_go_first(
    store: MemoryStore, publisher: Publisher, puller: Puller, follower: DraftFollower, first: Committed
) -> None:
    for version in (1, 2):
        await commit(publisher, version, await publisher.publish(JOB, version, 0, shards(version)))
    part = await publisher.publish(JOB, 3, 0, shards(3))
    store.may_send.clear()
    store.sent.clear()
    store.asked.clear()
    one = asyncio.create_task(puller.pull(JOB, 1))
    await store.asked.wait()
    ahead = asyncio.create_task(follower.follow(JOB))
    await asyncio.sleep(0)
    two = asyncio.create_task(puller.pull(JOB, 2))
    await asyncio.sleep(0)
    store.may_send.set()
    await asyncio.gather(one, two, ahead)
    assert set(store.sent[2 * N_CHUNKS :]) == digests(part)


async def test_the_wait_that_a_pull_takes_over_is_not_a_failure_and_a_stop_still_is_one(
    store: MemoryStore, publisher: Publisher, follower: DraftFollower, first: Committed
) -> None:
    await publisher.publish(JOB, 1, 0, shards(1))
    store.may_send.clear()
    store.asked.clear()
    ahead = asyncio.create_task(follower.follow(JOB))
    await store.asked.wait()
    ahead.cancel()
    with pytest.raises(asyncio.CancelledError):
        await ahead


# What goes wrong.


async def test_a_successor_with_other_bits_gets_the_room_of_the_dead_one(
    store: MemoryStore,
    publisher: Publisher,
    puller: Puller,
    follower: DraftFollower,
    first: Committed,
    tmp_path: Path,
) -> None:
    for seed in (11, 12, 13):  # two trainers that died before the commit, and one that lives
        part = await publisher.publish(JOB, 1, 0, shards(seed))
        await follower.follow(JOB)
        assert in_cache(tmp_path) == digests(first.part) | digests(part)
    await commit(publisher, 1, part)
    await puller.pull(JOB, 1)
    assert puller.last.from_store == 0
    assert in_cache(tmp_path) == digests(first.part) | digests(part)


async def test_no_more_than_a_version_comes_ahead(
    publisher: Publisher, puller: Puller, follower: DraftFollower, first: Committed, tmp_path: Path
) -> None:
    part = await publisher.publish(JOB, 1, 0, shards(1, n_chunks=2 * N_CHUNKS))
    with structlog.testing.capture_logs() as logs:
        await follower.follow(JOB)
    assert len(in_cache(tmp_path)) == 2 * N_CHUNKS
    assert [entry["event"] for entry in logs] == ["prefetch_incomplete"]
    await commit(publisher, 1, part)
    await puller.pull(JOB, 1)
    assert puller.last.bytes_dense == N_CHUNKS * CHUNK_BYTES


async def test_room_for_a_whole_version_stays_free_on_the_disk(
    publisher: Publisher,
    follower: DraftFollower,
    first: Committed,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    usage = shutil.disk_usage(tmp_path)
    free = (N_CHUNKS + 3) * CHUNK_BYTES
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=free))
    await publisher.publish(JOB, 1, 0, shards(1))
    await follower.follow(JOB)
    assert len(in_cache(tmp_path)) == N_CHUNKS + 3


async def test_a_chunk_that_cannot_be_had_is_left_to_the_pull(
    store: MemoryStore, publisher: Publisher, follower: DraftFollower, first: Committed, tmp_path: Path
) -> None:
    part = await publisher.publish(JOB, 1, 0, shards(1))
    rotten, lost = part.chunks[3].digest, part.chunks[5].digest
    store.chunks.held[rotten] = b"x" * CHUNK_BYTES, 0.0
    store.gone(lost)
    with structlog.testing.capture_logs() as logs:
        await follower.follow(JOB)
    assert in_cache(tmp_path) == (digests(first.part) | digests(part)) - {rotten, lost}
    assert [entry["event"] for entry in logs] == ["prefetch_incomplete"]


async def test_what_a_draft_names_and_a_manifest_does_not_is_removed(
    store: MemoryStore, publisher: Publisher, puller: Puller, follower: DraftFollower, first: Committed, tmp_path: Path
) -> None:
    lie = await publisher.publish(JOB, 1, 0, shards(66))
    await follower.follow(JOB)
    part = await publisher.publish(JOB, 1, 0, shards(1))
    await commit(publisher, 1, part)
    pulled = await puller.pull(JOB, 1)
    assert [bytes(data) for _, data in pulled.tensors()] == [shards(1)[0].data]
    assert in_cache(tmp_path).isdisjoint(digests(lie))


async def test_a_store_that_has_forgotten_goes_on_with_what_it_is_told(
    store: MemoryStore, puller: Puller, follower: DraftFollower, first: Committed, publisher: Publisher, tmp_path: Path
) -> None:
    part = await publisher.publish(JOB, 1, 0, shards(1))
    store.restart()
    await store.app.load()
    half = part.chunks[: N_CHUNKS // 2]
    await store.put_draft(JOB, 1, DraftPart(rank=0, start=0, chunks=half))
    await follower.follow(JOB)
    store.restart()
    await store.app.load()
    await store.put_draft(JOB, 1, DraftPart(rank=0, start=len(half), chunks=part.chunks[len(half) :]))
    await follower.follow(JOB)
    assert digests(part) <= in_cache(tmp_path)


async def test_drafts_of_versions_that_are_committed_are_not_listened_to(
    store: MemoryStore, puller: Puller, first: Committed
) -> None:
    await store.put_draft(JOB, 0, DraftPart(rank=0, start=0, chunks=first.part.chunks))
    assert (await news(store)).version is None
    old = Draft()
    old.version = 0
    store.sent.clear()
    await puller.prefetch(JOB, old, first.part.chunks)
    assert store.sent == []


async def test_what_an_earlier_process_fetched_ahead_is_not_fetched_again(
    store: MemoryStore, publisher: Publisher, puller: Puller, follower: DraftFollower, first: Committed, tmp_path: Path
) -> None:
    await publisher.publish(JOB, 1, 0, shards(1))
    await follower.follow(JOB)
    puller.close()
    store.sent.clear()
    another = Puller(store, Cache(tmp_path / "cache"), Waits())
    part = await publisher.publish(JOB, 1, 0, shards(1))
    await commit(publisher, 1, part)
    await another.pull(JOB, 1)
    assert store.sent == []
    another.close()


async def test_a_pull_that_waits_for_a_hanging_prefetch_waits_no_longer_than_that_takes_to_stop(
    store: MemoryStore, publisher: Publisher, puller: Puller, follower: DraftFollower, first: Committed
) -> None:
    await publisher.publish(JOB, 1, 0, shards(1))
    store.may_send.clear()
    store.asked.clear()
    ahead = asyncio.create_task(follower.follow(JOB))
    await store.asked.wait()
    async with asyncio.timeout(5.0):
        await puller.pull(JOB, 0)  # all of it is held
    assert not ahead.done()
    store.may_send.set()
    await eventually(ahead.done)
