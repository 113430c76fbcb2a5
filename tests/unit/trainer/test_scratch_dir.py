"""Scratch directories: a trainer removes those of dead processes, and no others."""

from __future__ import annotations

import fcntl
import subprocess
import sys
from pathlib import Path

import pytest

from rlboost.services.trainer.adapters.torch.tensors import ScratchDir, flock_directory, remove_stale

OTHER_PROCESS = """
import sys
from pathlib import Path
from rlboost.services.trainer.adapters.torch.tensors import ScratchDir
scratch = ScratchDir(Path(sys.argv[1]))
print(scratch.name, flush=True)
sys.stdin.read()
"""


def test_remove_stale_spares_directories_of_live_processes(tmp_path: Path) -> None:
    command = [sys.executable, "-c", OTHER_PROCESS, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        directory = Path(other.stdout.readline().strip())
        (directory / "weight-0000.safetensors").write_bytes(b"tensors")
        with ScratchDir(tmp_path) as local:
            remove_stale(tmp_path)
            assert {directory, local} == set(tmp_path.iterdir())
        other.kill()
        other.wait()
        assert list(directory.iterdir())
        remove_stale(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_scratch_dir_removed_before_it_is_locked_is_created_again(tmp_path: Path) -> None:
    directories: list[Path] = []

    def late_lock(directory: Path) -> int:
        directories.append(directory)
        if len(directories) == 1:
            directory.rmdir()
        return flock_directory(directory)

    with ScratchDir(tmp_path, late_lock) as created:
        assert [created] == directories[1:] == list(tmp_path.iterdir())
    assert list(tmp_path.iterdir()) == []


def test_without_locks_only_the_owner_removes_a_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with ScratchDir(tmp_path) as created:
        remove_stale(tmp_path)
        assert created.is_dir()
    assert not created.exists()
