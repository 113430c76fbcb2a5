"""The files of a worker's cache."""

from __future__ import annotations

import os
import socket
from contextlib import closing
from pathlib import Path

from rlboost.shared.weights.cache import Cache, open_cache
from rlboost.shared.weights.manifest import CHUNK_BYTES, ChunkRef, digest_of

OLD, NEW = (bytes([value]) * CHUNK_BYTES for value in range(2))


def ref(data: bytes) -> ChunkRef:
    return ChunkRef(digest_of(data), len(data))


def test_removed_chunk_stays_readable_where_it_is_open(tmp_path: Path) -> None:
    """Such as by an engine, or by the kernel, which reads what was queued for a peer after the file is closed."""
    cache = Cache(tmp_path)
    assert cache.store(ref(OLD), OLD)
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as sender:
        receiver, _ = listener.accept()
        sender.setblocking(False)
        file = cache.open_to_send(ref(OLD).digest)
        assert file is not None
        with closing(receiver), cache.path(ref(OLD).digest).open("rb") as engines:
            with file:
                n_bytes = os.sendfile(sender.fileno(), file.fileno(), 0, CHUNK_BYTES)
            cache.prune(set(), [])
            assert cache.store(ref(NEW), NEW)
            received = b""
            while len(received) < n_bytes:
                received += receiver.recv(CHUNK_BYTES)
            assert (received, engines.read()) == (OLD[:n_bytes], OLD)
    assert not cache.holds(ref(OLD))
    assert {path.name for path in cache.blobs.iterdir()} == {ref(NEW).digest}
    cache.close()


def test_each_process_of_one_name_has_a_cache_which_the_next_process_opens_again(tmp_path: Path) -> None:
    first, second = (open_cache(tmp_path, "node") for _ in range(2))
    with closing(second):
        assert [cache.blobs.parent.name for cache in (first, second)] == ["node", "node-2"]
        first.close()
        with closing(open_cache(tmp_path, "node")) as again:
            assert again.blobs == first.blobs
