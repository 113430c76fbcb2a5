"""Pulls by a machine that shares the weight store's file system."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from pathlib import Path
from unittest.mock import AsyncMock

import numpy as np
import pytest

from rlboost.shared.process.waiting import Waits
from rlboost.shared.weights.cache import Cache
from rlboost.shared.weights.client import StoreClient
from rlboost.shared.weights.manifest import ChunkRef, Shard, digest_of
from rlboost.shared.weights.publisher import Publisher
from rlboost.shared.weights.puller import DirectorySource, Puller, StoreSource
from rlboost.shared.weights.rest_models import NONCE_FILE

JOB = "job-1"
WEIGHTS = np.random.default_rng(0).integers(0, 256, 1_000_000, dtype=np.uint8)
CHUNK_BYTES = 100_000


@pytest.fixture
async def chunks(client: StoreClient, tmp_path: Path) -> list[Path]:
    """The files of version 0 in the store's directory."""
    publisher = Publisher(client, Waits(), chunk_bytes=CHUNK_BYTES)
    shard = Shard("w", "uint8", WEIGHTS.shape, (0,), WEIGHTS.shape, WEIGHTS.data)
    part = await publisher.publish(JOB, 0, 0, [shard])
    await publisher.commit(JOB, 0, expect=-1, part_digests=[part.digest], config_json="{}")
    return [tmp_path / "store" / "chunks" / chunk.digest[:2] / chunk.digest for chunk in part.chunks]


@pytest.fixture
async def puller(client: StoreClient, tmp_path: Path) -> AsyncIterator[Puller]:
    cache = Cache(tmp_path / "cache")
    source = DirectorySource(client, cache, StoreSource(client, cache, concurrency=2))
    puller = Puller(client, cache, Waits(), source=source, limit_s=60)
    yield puller
    puller.close()


async def assert_pulls(puller: Puller, *, from_store: int) -> None:
    pulled = await puller.pull(JOB, 0)
    ((_, data),) = pulled.tensors()
    assert data == WEIGHTS.data
    assert (puller.last.from_store, puller.last.from_directory) == (from_store, WEIGHTS.nbytes - from_store)


async def test_chunks_are_linked_and_outlive_the_stores_files(
    puller: Puller, chunks: list[Path], tmp_path: Path
) -> None:
    await assert_pulls(puller, from_store=0)
    assert all((tmp_path / "cache" / "chunks" / path.name).samefile(path) for path in chunks)
    for path in chunks:
        path.unlink()
    pulled = await puller.pull(JOB, 0)
    ((_, data),) = pulled.tensors()
    assert data == WEIGHTS.data
    assert puller.last.chunks_held == len(chunks)


async def test_chunks_are_copied_where_a_link_is_impossible(
    puller: Puller, chunks: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cannot(*_: object) -> None:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(Path, "hardlink_to", cannot)
    await assert_pulls(puller, from_store=0)
    assert not any((tmp_path / "cache" / "chunks" / path.name).samefile(path) for path in chunks)


async def test_chunks_that_the_store_has_not_written_are_linked_all_the_same(
    client: StoreClient, tmp_path: Path
) -> None:
    """The worker has no version yet, so it cannot use the deltas."""
    publisher = Publisher(client, Waits(), deltas=True, chunk_bytes=CHUNK_BYTES)
    values = WEIGHTS.view(np.uint16).copy()
    for version in range(2):
        values[version::200] += 1
        part = await publisher.publish(
            JOB, version, 0, [shard := Shard("w", "bfloat16", values.shape, (0,), values.shape, values.data)]
        )
        await publisher.commit(JOB, version, expect=version - 1, part_digests=[part.digest], config_json="{}")
    cache = Cache(tmp_path / "cache")
    puller = Puller(
        client,
        cache,
        Waits(),
        source=DirectorySource(client, cache, StoreSource(client, cache, concurrency=2)),
        limit_s=60,
    )
    ((_, data),) = (await puller.pull(JOB, 1)).tensors()
    assert data == bytes(shard.data)
    assert (puller.last.from_store, puller.last.from_directory) == (0, WEIGHTS.nbytes)
    puller.close()


async def test_machine_that_reads_another_nonce_fetches_from_the_store(
    puller: Puller, chunks: list[Path], tmp_path: Path
) -> None:
    assert chunks
    (tmp_path / "store" / NONCE_FILE).write_text("of another store")
    await assert_pulls(puller, from_store=WEIGHTS.nbytes)


async def test_bad_files_of_a_shared_directory_are_fetched_instead(
    client: StoreClient, chunks: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The nonce is right, but the files are not: a copy of the store's disk, for example."""
    copy = tmp_path / "copy"
    cache = Cache(tmp_path / "cache")
    source = DirectorySource(client, cache, StoreSource(client, cache, concurrency=2))
    directory = await client.directory()
    assert directory is not None
    moved = directory.model_copy(update={"path": str(copy)})
    missing, truncated, corrupt, longer, *intact = chunks
    for path in chunks:
        moved.chunk(path.name).parent.mkdir(parents=True, exist_ok=True)
        moved.chunk(path.name).write_bytes(path.read_bytes())
    moved.chunk(missing.name).unlink()
    os.truncate(moved.chunk(truncated.name), 1)
    moved.chunk(corrupt.name).write_bytes(bytes(CHUNK_BYTES))
    moved.chunk(longer.name).write_bytes(longer.read_bytes() + b"x")
    monkeypatch.setattr(source, "_shared", AsyncMock(return_value=moved))
    puller = Puller(client, cache, Waits(), source=source, limit_s=60)
    await assert_pulls(puller, from_store=(len(chunks) - len(intact)) * CHUNK_BYTES)
    puller.close()


def test_cached_blob_that_was_truncated_is_not_held(tmp_path: Path) -> None:
    """Its file may be a link to the store's, so another process can truncate it."""
    blob = ChunkRef(digest_of(WEIGHTS.data), WEIGHTS.nbytes)
    cache = Cache(tmp_path / "cache")
    assert cache.store(blob, WEIGHTS.tobytes())
    cache.verified.clear()
    assert cache.holds(blob)
    cache.verified.clear()
    os.truncate(cache.path(blob.digest), 5000)
    assert not cache.holds(blob)
    assert not cache.path(blob.digest).exists()
    cache.close()
