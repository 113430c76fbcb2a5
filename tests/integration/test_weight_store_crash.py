"""Killed before any one operation on the disk, a commit has happened or it has not."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlboost.services.weight_store.adapters.disk import DiskChunks, DiskDocuments, StoreDirectory
from rlboost.services.weight_store.app import WeightStore
from rlboost.shared.weights.delta_graph import Route
from rlboost.shared.weights.manifest import Manifest, digest_of
from tests.support.tiny_versions import JOB, content, deltas, publish, store_on


class Killed(BaseException):
    """The process was killed: it has no later effects."""


class Reaper:
    """Kills before the n-th operation on the disk; the dead do nothing more."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, lives: int) -> None:
        self.lives = lives
        for owner, name in [
            (Path, "replace"),
            (Path, "unlink"),
            (Path, "open"),
            (Path, "mkdir"),
            (os, "fsync"),
            (os, "utime"),
        ]:
            monkeypatch.setattr(owner, name, self._mortal(getattr(owner, name)))

    def _mortal(self, operation: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if self.lives <= 0:
                raise Killed
            self.lives -= 1
            return operation(*args, **kwargs)

        return call


async def opened(root: Path) -> tuple[WeightStore, DiskChunks, StoreDirectory]:
    directory = StoreDirectory(root)
    chunks = DiskChunks(directory)
    store = store_on(chunks, DiskDocuments(directory))
    await store.load()
    return store, chunks, directory


async def assert_head_is_whole(root: Path, *, at_least: int) -> int:
    store, chunks, directory = await opened(root)
    assert not list((root / "tmp").iterdir())
    model = store.versions_of(JOB)
    assert model.head in (at_least, 1)
    data, digest = await store.manifest(JOB, model.head)
    assert digest_of(data) == digest
    for chunk in Manifest.decode(data).chunks():
        assert chunks.path(chunk.digest).read_bytes() == content(model.head)
    if model.head == 1:
        (document,) = Route.decode(await store.route(JOB, 1, 0)).documents
        (edge,) = document.edges()
        assert chunks.path(edge.delta).read_bytes() == deltas(1)[0]
    head = model.head
    # Publishing continues from there.
    await publish(store, 1)
    assert store.versions_of(JOB).head == 1
    assert store.versions_of(JOB).retired == ()
    needed = {digest_of(blob) for blob in (content(1), *deltas(1))}
    assert {path.name for path in (root / "chunks").glob("*/*")} == needed
    directory.close()
    return head


async def test_kill_at_any_disk_operation_leaves_the_old_or_the_new_head(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, _, directory = await opened(tmp_path / "before")
    await publish(store, 0)
    directory.close()
    heads, lives, finished = [], 0, False
    while not finished:
        root = tmp_path / f"killed-{lives}"
        await asyncio.to_thread(shutil.copytree, tmp_path / "before", root)
        store, _, directory = await opened(root)
        with monkeypatch.context() as dying:
            reaper = Reaper(dying, lives)
            try:
                await publish(store, 1)
                finished = True
            except Killed:
                assert reaper.lives == 0
        directory.close()
        heads.append(await assert_head_is_whole(root, at_least=0))
        lives += 1
    assert heads == sorted(heads), "once committed, it stays committed"
    assert heads[0] == 0
    assert heads[-1] == 1
    assert len(heads) > 15
