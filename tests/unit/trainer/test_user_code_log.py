from __future__ import annotations

import os
from pathlib import Path

from rlboost.services.trainer.adapters import user_code as module
from rlboost.services.trainer.adapters.user_code import BURST_BYTES, MAX_FILE_BYTES, RATE_BYTES_PER_S, UserCodeLog
from tests.support.eventually import eventually


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


async def test_log_contains_the_bytes_written_to_its_descriptor(tmp_path: Path) -> None:
    log = UserCodeLog(tmp_path / "run" / "reward.log")
    os.write(log.open(), b"hello\nworld\n")
    await eventually(log.path.exists)
    log.close()
    assert log.path.read_bytes() == b"hello\nworld\n"
    assert log.last_line() == "world"


async def test_close_drains_the_pipe_into_the_log(tmp_path: Path) -> None:
    log = UserCodeLog(tmp_path / "reward.log")
    os.write(log.open(), b"last words\n")
    log.close()
    log.close()
    assert log.path.read_bytes() == b"last words\n"


async def test_close_of_a_log_without_output_leaves_no_file(tmp_path: Path) -> None:
    log = UserCodeLog(tmp_path / "reward.log")
    log.open()
    log.close()
    assert not log.path.exists()


def test_write_discards_output_above_the_rate_and_counts_it(tmp_path: Path) -> None:
    clock = Clock()
    log = UserCodeLog(tmp_path / "reward.log", clock)
    log.write(b"a" * BURST_BYTES)
    log.write(b"b" * 1000)
    assert log.path.stat().st_size == BURST_BYTES
    clock.now += 1000 / RATE_BYTES_PER_S
    log.write(b"c" * 10)
    text = log.path.read_bytes()[BURST_BYTES:]
    assert b"1000 bytes discarded" in text
    assert text.endswith(b"c" * 10)


def test_write_rotates_a_full_file_once(tmp_path: Path) -> None:
    clock = Clock()
    log = UserCodeLog(tmp_path / "reward.log", clock)
    for _ in range(4 * MAX_FILE_BYTES // BURST_BYTES):
        clock.now += BURST_BYTES / RATE_BYTES_PER_S
        log.write(b"a" * BURST_BYTES)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["reward.log", "reward.log.1"]
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) <= 2 * MAX_FILE_BYTES


def test_write_survives_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    UserCodeLog(tmp_path / "file" / "reward.log").write(b"lost")
    assert module.MAX_FILE_BYTES > module.BURST_BYTES
