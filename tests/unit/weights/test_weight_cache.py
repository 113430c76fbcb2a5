"""The files of a worker's cache: which of them are overwritten with later chunks."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from rlboost.shared.weights.cache import Cache, open_cache
from rlboost.shared.weights.manifest import CHUNK_BYTES, ChunkRef, digest_of

OLD, NEW, LAST = (bytes([value]) * CHUNK_BYTES for value in range(3))


def ref(data: bytes) -> ChunkRef:
    return ChunkRef(digest_of(data), len(data))


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[Cache]:
    """A cache that has just removed the chunk `OLD`."""
    cache = Cache(tmp_path)
    assert cache.store(ref(OLD), OLD)
    yield cache
    cache.close()


def names(cache: Cache) -> set[str]:
    return {path.name for path in cache.blobs.iterdir()}


def test_file_of_a_removed_chunk_is_overwritten_by_the_next(cache: Cache) -> None:
    inode = cache.path(ref(OLD).digest).stat().st_ino
    cache.prune(set(), [])
    assert not cache.holds(ref(OLD))
    assert cache.store(ref(NEW), NEW)
    assert cache.path(ref(NEW).digest).stat().st_ino == inode
    assert cache.path(ref(NEW).digest).read_bytes() == NEW
    assert names(cache) == {ref(NEW).digest}


def test_file_that_is_still_being_read_is_not_overwritten(cache: Cache) -> None:
    """Such as by an engine."""
    with cache.path(ref(OLD).digest).open("rb", buffering=0) as file:
        cache.prune(set(), [])
        assert cache.store(ref(NEW), NEW)
        assert file.read() == OLD
    assert names(cache) == {ref(NEW).digest}


def test_bytes_queued_for_a_peer_are_not_overwritten(cache: Cache) -> None:
    """The kernel reads them from the file when it sends them, after the file is closed."""
    listener = socket.create_server(("127.0.0.1", 0))
    sender = socket.create_connection(listener.getsockname())
    receiver, _ = listener.accept()
    sender.setblocking(False)
    file = cache.open_to_send(ref(OLD).digest)
    assert file is not None
    with file:
        n_bytes = os.sendfile(sender.fileno(), file.fileno(), 0, CHUNK_BYTES)
    cache.prune(set(), [])
    assert cache.store(ref(NEW), NEW)
    received = b""
    while len(received) < n_bytes:
        received += receiver.recv(CHUNK_BYTES)
    assert received == OLD[:n_bytes]
    for sock in (sender, receiver, listener):
        sock.close()


def test_file_of_an_earlier_process_is_not_overwritten(cache: Cache, tmp_path: Path) -> None:
    """That process may have sent it to a peer."""
    cache.close()
    again = Cache(tmp_path)
    inode = again.path(ref(OLD).digest).stat().st_ino
    with again.path(ref(OLD).digest).open("rb") as file:
        again.prune(set(), [])
        assert names(again) == set()
        assert os.fstat(file.fileno()).st_ino == inode
    again.close()


def test_removed_file_that_something_else_deleted_is_replaced_by_a_new_one(cache: Cache) -> None:
    cache.prune(set(), [])
    (cache.blobs / names(cache).pop()).unlink()
    assert cache.store(ref(NEW), NEW)
    assert cache.path(ref(NEW).digest).read_bytes() == NEW


def test_file_that_the_weight_store_has_too_is_not_overwritten(cache: Cache, tmp_path: Path) -> None:
    stored = tmp_path / "of the store"
    stored.hardlink_to(cache.path(ref(OLD).digest))
    cache.prune(set(), [])
    assert cache.store(ref(NEW), NEW)
    assert stored.read_bytes() == OLD


def test_removed_files_are_retained_until_the_next_removal_or_restart(cache: Cache, tmp_path: Path) -> None:
    cache.prune(set(), [])
    assert len(names(cache)) == 1
    cache.prune(set(), [])
    assert names(cache) == set()
    assert cache.store(ref(LAST), LAST)
    cache.prune(set(), [])
    cache.close()
    again = Cache(tmp_path)
    assert names(again) == set()
    again.close()


def test_small_blob_has_a_file_of_its_own(cache: Cache) -> None:
    cache.prune(set(), [])
    assert cache.store(ref(b"small"), b"small")
    assert cache.path(ref(b"small").digest).read_bytes() == b"small"


def test_each_process_of_one_name_has_a_cache_which_the_next_process_opens_again(tmp_path: Path) -> None:
    first, second = (open_cache(tmp_path, "node") for _ in range(2))
    with closing(second):
        assert [cache.blobs.parent.name for cache in (first, second)] == ["node", "node-2"]
        first.close()
        with closing(open_cache(tmp_path, "node")) as again:
            assert again.blobs == first.blobs
