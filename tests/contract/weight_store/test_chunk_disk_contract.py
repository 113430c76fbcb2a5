"""The weight store's folder: what only a disk can do to it."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlboost.services.weight_store.adapters.disk import DiskChunks, StoreDirectory
from rlboost.services.weight_store.ports import StoreFull
from rlboost.shared.errors import ConfigError
from rlboost.shared.weights.manifest import digest_of
from rlboost.shared.weights.rest_models import NONCE_FILE

DATA = b"some weights" * 1000


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[StoreDirectory]:
    directory = StoreDirectory(tmp_path)
    yield directory
    directory.close()


def files(root: Path) -> list[Path]:
    return sorted(path for path in root.rglob("*") if path.is_file() and path.name not in {"lock", NONCE_FILE})


@pytest.mark.parametrize("call", ["fsync", "utime"])
async def test_full_disk_raises_store_full_and_leaves_no_file(
    directory: StoreDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    def no_room(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, call, no_room)
    with pytest.raises(StoreFull, match=r"No space left on device.*free space, or retain fewer versions"):
        await DiskChunks(directory).put(digest_of(DATA), [DATA], 1_763_700_000.0)
    assert files(tmp_path) == []


async def test_partial_files_of_a_killed_process_are_removed_at_start(tmp_path: Path) -> None:
    StoreDirectory(tmp_path).close()
    (tmp_path / "tmp" / "half").write_bytes(b"half a chu")
    directory = StoreDirectory(tmp_path)
    assert files(tmp_path) == []
    directory.close()


def test_two_stores_cannot_use_one_directory(directory: StoreDirectory, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="in use by another process"):
        StoreDirectory(tmp_path)


def test_directory_that_cannot_be_created_is_a_config_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"directory .*file.* writable"):
        StoreDirectory(tmp_path / "file")
