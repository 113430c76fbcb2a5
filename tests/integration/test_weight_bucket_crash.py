"""Killed after any one request to the object store, its answer unheard, a commit has happened or it has not."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import obstore
import pytest

from rlboost.services.weight_store.adapters.objects import Lease, ObjectChunks, ObjectDocuments
from rlboost.services.weight_store.app import WeightStore
from rlboost.shared.bucket import Bucket
from rlboost.shared.process.waiting import Waits
from rlboost.shared.weights.delta_graph import Route
from rlboost.shared.weights.manifest import Manifest, digest_of
from tests.support.tiny_versions import JOB, content, deltas, publish, store_on

_REQUESTS = ("put_async", "get_async", "delete_async", "list_with_delimiter_async")


class Killed(BaseException):
    """The process was killed: it has no later effects."""


class Reaper:
    """Kills after the n-th request, before its response arrives; later requests have no effect."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, lives: int) -> None:
        self.lives = lives
        for name in _REQUESTS:
            monkeypatch.setattr(obstore, name, self._mortal(getattr(obstore, name)))

    def _mortal(self, request: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        async def call(*args: Any, **kwargs: Any) -> Any:
            self.lives -= 1
            if self.lives < 0:
                raise Killed
            answer = await request(*args, **kwargs)
            if self.lives == 0:
                raise Killed
            return answer

        return call


async def opened(bucket: Bucket) -> tuple[WeightStore, ObjectChunks, Lease]:
    lease = await Lease.acquire(bucket, 60.0, Waits())
    # Used long ago, so that what is garbage goes at once.
    chunks = await ObjectChunks.opened(bucket, lease, 0.0, redirect=False)
    store = store_on(chunks, ObjectDocuments(bucket, lease))
    await store.load()
    return store, chunks, lease


async def assert_head_is_whole(bucket: Bucket) -> int:
    store, chunks, lease = await opened(bucket)
    head = store.versions_of(JOB).head
    assert head in (0, 1)
    data, digest = await store.manifest(JOB, head)
    assert digest_of(data) == digest
    for chunk in Manifest.decode(data).chunks():
        assert await chunks.read(chunk.digest) == content(head)
    if head == 1:
        (document,) = Route.decode(await store.route(JOB, 1, 0)).documents
        (edge,) = document.edges()
        assert await chunks.read(edge.delta) == deltas(1)[0]
    # Publishing continues from there.
    await publish(store, 1)
    assert store.versions_of(JOB).head == 1
    assert store.versions_of(JOB).retired == ()
    assert set(await chunks.last_used()) == {digest_of(blob) for blob in (content(1), *deltas(1))}
    await lease.release()
    return head


async def test_kill_at_any_request_leaves_the_old_or_the_new_head(monkeypatch: pytest.MonkeyPatch) -> None:
    heads: list[int] = []
    finished = False
    while not finished:
        bucket = Bucket("memory:///")
        store, _, lease = await opened(bucket)
        await publish(store, 0)
        with monkeypatch.context() as dying:
            reaper = Reaper(dying, len(heads) + 1)
            try:
                await publish(store, 1)
                finished = True
            except Killed:
                assert reaper.lives == 0
        # Its lease would be waited for; that it may be taken over is another test's.
        await lease.release()
        heads.append(await assert_head_is_whole(bucket))
    assert heads == sorted(heads), "once committed, it stays committed"
    assert (heads[0], heads[-1]) == (0, 1)
    assert len(heads) > 15
