"""Whose folders of tensors a trainer removes that finds some: those of the dead."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from services.trainer.adapters.ranks import aside
from services.trainer.adapters.ranks.aside import Aside, clear

OTHER = """
import sys
from pathlib import Path
from services.trainer.adapters.ranks.aside import Aside
kept = Aside(Path(sys.argv[1]))
print(kept.name, flush=True)
sys.stdin.read()
"""


def test_what_another_process_uses_stays_until_it_is_killed(tmp_path: Path) -> None:
    command = [sys.executable, "-c", OTHER, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        folder = Path(other.stdout.readline().strip())
        (folder / "weight-0000.safetensors").write_bytes(b"tensors")
        with Aside(tmp_path) as own:
            clear(tmp_path)
            assert {folder, own} == set(tmp_path.iterdir())
        other.kill()
        other.wait()
        assert list(folder.iterdir())
        clear(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_one_that_is_found_before_it_is_locked_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock, names = aside._lock, []

    def late(folder: Path) -> int:
        names.append(folder)
        if len(names) == 1:
            folder.rmdir()
        return lock(folder)

    monkeypatch.setattr(aside, "_lock", late)
    with Aside(tmp_path) as made:
        assert [made] == names[1:] == list(tmp_path.iterdir())
    assert list(tmp_path.iterdir()) == []


def test_without_locks_nothing_is_removed_but_by_its_owner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(aside.fcntl, "flock", refuse)
    with Aside(tmp_path) as made:
        clear(tmp_path)
        assert made.is_dir()
    assert not made.exists()
