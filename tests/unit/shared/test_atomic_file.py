"""Atomic replacement of files."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from rlboost.shared.files import replace_file, temporary_file


@pytest.mark.parametrize("sync", [False, True])
def test_replace_file_leaves_only_the_new_content(tmp_path: Path, *, sync: bool) -> None:
    replace_file(tmp_path / "state.json", "old", sync=sync)
    replace_file(tmp_path / "state.json", b"new", sync=sync)
    assert [path.name for path in tmp_path.iterdir()] == ["state.json"]
    assert (tmp_path / "state.json").read_text() == "new"


def test_replace_file_sets_the_mode(tmp_path: Path) -> None:
    replace_file(tmp_path / "secret", "x", mode=0o600)
    assert stat.S_IMODE((tmp_path / "secret").stat().st_mode) == 0o600


def test_replace_file_that_fails_leaves_the_old_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    replace_file(tmp_path / "state.json", "old")
    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="No space left"):
        replace_file(tmp_path / "state.json", "new", sync=True)
    assert [path.read_text() for path in tmp_path.iterdir()] == ["old"]


def test_temporary_file_is_removed_unless_renamed(tmp_path: Path) -> None:
    with temporary_file(tmp_path, [b"a", b"b"], mtime_ns=5_000_000_000) as path:
        assert path.read_bytes() == b"ab"
        assert path.stat().st_mtime_ns == 5_000_000_000
    assert list(tmp_path.iterdir()) == []
    with temporary_file(tmp_path, [b"a"]) as path:
        path.rename(tmp_path / "final")
    assert [path.name for path in tmp_path.iterdir()] == ["final"]
