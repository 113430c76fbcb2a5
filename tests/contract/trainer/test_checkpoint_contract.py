"""A checkpoint exists completely or not at all: in a folder, an object store and the fake."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import structlog

from rlboost.services.trainer.adapters.checkpoint_bucket import CheckpointBucket
from rlboost.services.trainer.adapters.checkpoint_folder import CheckpointFolder
from rlboost.services.trainer.ports.storage import CheckpointStore, TrainState
from rlboost.shared.errors import Corrupt, DiskFull
from tests.support.trainer_fakes import MemoryCheckpoints

ROOT = Path(__file__).parents[3]


@pytest.fixture(params=["folder", "bucket", "fake"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> CheckpointStore:
    match request.param:
        case "folder":
            return CheckpointFolder(tmp_path / "c")
        case "bucket":
            return CheckpointBucket("memory:///", tmp_path / "c", 5.0)
        case _:
            return MemoryCheckpoints(tmp_path / "c")


def state(step: int) -> TrainState:
    return TrainState(step=step, finished_cursor=f"{step}-0", train_rows=10, read_cursor=f"{step}-5", data_digest="abc")


def writing(text: str) -> Callable[[Path], None]:
    def write(directory: Path) -> None:
        (directory / "weights").write_text(text)

    return write


def test_newest_of_an_empty_store_is_none(store: CheckpointStore) -> None:
    assert store.newest() is None
    assert store.fallback() is None


def test_newest_returns_the_last_checkpoint_with_its_files(store: CheckpointStore) -> None:
    store.save(state(10), writing("ten"))
    store.save(state(20), writing("twenty"))
    found = store.newest()
    assert found is not None
    assert found[0] == state(20)
    assert (found[1] / "weights").read_text() == "twenty"


def test_fallback_is_the_older_of_two_checkpoints(store: CheckpointStore) -> None:
    store.save(state(10), writing("ten"))
    assert store.fallback() is None
    store.save(state(20), writing("twenty"))
    assert store.fallback() == state(10)
    store.save(state(30), writing("thirty"))
    assert store.fallback() == state(20)


def folder_with(tmp_path: Path, *steps: int) -> CheckpointFolder:
    store = CheckpointFolder(tmp_path)
    for step in steps:
        store.save(state(step), writing(f"weights of {step}"))
    return store


def test_save_retains_two_checkpoints(tmp_path: Path) -> None:
    folder_with(tmp_path, 5, 10, 15, 1_000_000)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000015", "step-1000000"]


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: (path / "weights").unlink(),
        lambda path: (path / "weights").write_text("weights of 2x"),
        lambda path: (path / "weights").write_text(""),
        lambda path: (path / "state.json").unlink(),
        lambda path: (path / "state.json").write_text('{"format": 1, "sta'),
        lambda path: (path / "state.json").write_text('{"format": 2}'),
        lambda path: (path / "state.json").write_text("[]"),
    ],
)
def test_corrupt_checkpoint_is_skipped_with_a_warning(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    store = folder_with(tmp_path, 10, 20)
    damage(tmp_path / "step-000020")
    with structlog.testing.capture_logs() as logs:
        found = store.newest()
    assert found is not None
    assert found[0] == state(10)
    assert [entry["event"] for entry in logs] == ["checkpoint_corrupt"]
    store.save(state(20), writing("again"))
    assert store.newest() == (state(20), tmp_path / "step-000020")


def test_store_without_a_valid_checkpoint_is_corrupt(tmp_path: Path) -> None:
    store = folder_with(tmp_path, 10, 20)
    for name in ("step-000010", "step-000020"):
        (tmp_path / name / "weights").write_text("")
    with pytest.raises(Corrupt, match=rf"no checkpoint in {tmp_path} verifies \(step-000020, step-000010;.* a backup"):
        store.newest()


def test_save_spares_temporary_files_of_the_same_step(tmp_path: Path) -> None:
    theirs, ours = CheckpointFolder(tmp_path), CheckpointFolder(tmp_path)

    def slow(directory: Path) -> None:
        ours.save(state(10), writing("ours"))
        ours.save(state(20), writing("ours"))
        writing("theirs")(directory)

    theirs.save(state(20), slow)
    assert theirs.newest() == (state(20), tmp_path / "step-000020")
    assert (tmp_path / "step-000020/weights").read_text() == "theirs"
    (tmp_path / "unfinished-step-000020-0a1b2c3d").mkdir()
    ours.save(state(20), writing("again"))
    assert (tmp_path / "unfinished-step-000020-0a1b2c3d").exists()
    ours.save(state(30), writing("later"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000020", "step-000030"]


def test_full_disk_is_named_and_keeps_the_checkpoint_before(tmp_path: Path) -> None:
    store = folder_with(tmp_path, 10)

    def full(directory: Path) -> None:
        (directory / "weights").write_text("half")
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(DiskFull, match=r"step-000020 cannot be written: No space left on device"):
        store.save(state(20), full)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000010"]
    assert store.newest() == (state(10), tmp_path / "step-000010")
    store.save(state(20), writing("now"))
    assert store.newest() == (state(20), tmp_path / "step-000020")


WRITER = """
import sys, pathlib
from rlboost.services.trainer.adapters.checkpoint_folder import CheckpointFolder
from rlboost.services.trainer.ports.storage import TrainState
store = CheckpointFolder(pathlib.Path(sys.argv[1]))
def write(directory):
    for i in range(4):
        (directory / f"part-{i}").write_bytes(bytes([step % 251]) * 300_000)
print("ready", flush=True)
found = store.newest()
for step in range(found[0].step + 1 if found else 1, 100_000):
    store.save(TrainState(step, str(step), 1), write)
"""


def test_kill_at_any_moment_leaves_a_complete_checkpoint(tmp_path: Path) -> None:
    last = 0
    for round_ in range(8):
        folder = tmp_path / "c"
        process = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(folder)], stdout=subprocess.PIPE, cwd=ROOT, text=True
        )
        assert process.stdout is not None
        process.stdout.readline()
        # Moments spread over several saves: each takes some milliseconds.
        time.sleep(0.05 + 0.0137 * round_)
        os.kill(process.pid, signal.SIGKILL)
        process.wait(10)
        process.stdout.close()
        with structlog.testing.capture_logs() as logs:
            found = CheckpointFolder(folder).newest()
        assert logs == []
        if found is not None:
            step = found[0].step
            assert step >= last
            assert all((found[1] / f"part-{i}").read_bytes() == bytes([step % 251]) * 300_000 for i in range(4))
            last = step
    assert last > 2
