"""Waits that say how far they are."""

from __future__ import annotations

import asyncio

import pytest

from rlboost.shared.errors import WaitTimedOut
from rlboost.shared.process.waiting import Waits
from rlboost.shared.progress import CountProgress, LastDuration, TransferProgress


class Clock:
    """Seconds, set by hand."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize(
    ("done", "total", "elapsed_s", "text"),
    [
        (0, 0, 0.0, ""),
        (0, 3_400_000_000, 0.0, "0 B of 3.4 GB"),
        (1_200_000_000, 3_400_000_000, 0.5, "1.2 GB of 3.4 GB"),
        (1_200_000_000, 3_400_000_000, 6.0, "1.2 GB of 3.4 GB, 200 MB/s, 11 s left"),
        (4_000, 3_000, 2.0, "4 kB of 4 kB, 2 kB/s, 0 s left"),
        (700, 0, 2.0, "700 B, 350 B/s"),
        (10**9, 10**12, 10.0, "1 GB of 1 TB, 100 MB/s, 2.8 h left"),
    ],
)
def test_progress_has_a_rate_and_the_remaining_time(done: int, total: int, elapsed_s: float, text: str) -> None:
    clock = Clock()
    progress = TransferProgress(clock)
    progress.done_bytes, progress.total_bytes = done, total
    clock.now += elapsed_s
    assert progress.text() == text


@pytest.mark.parametrize(
    ("updates", "text"),
    [
        ([], ""),
        ([(0.0, 0)], "0 of 1,200 samples"),
        ([(0.0, 0), (10.0, 0)], "0 of 1,200 samples"),
        ([(0.0, 0), (10.0, 300)], "300 of 1,200 samples, 30/s, 30 s left"),
        ([(0.0, 0), (100.0, 1)], "1 of 1,200 samples, 0.6/min, 33.3 h left"),
        ([(0.0, 0), (20.0, 1200)], "1,200 of 1,200 samples"),
        ([(0.0, 0), (0.5, 600), (10.5, 700)], "700 of 1,200 samples, 10/s, 50 s left"),
        ([(0.0, 0), (10.0, 900), (70.0, 930), (80.0, 960)], "960 of 1,200 samples, 0.86/s, 5 min left"),
        ([(0.0, 0), *((0.9 + n / 10, 10 * n) for n in range(92))], "910 of 1,200 samples, 100/s, 3 s left"),
        ([(0.0, 0), (10.0, 900), (20.0, 0), (30.0, 100)], "100 of 1,200 samples, 10/s, 110 s left"),
    ],
    ids=["none", "begun", "idle", "steady", "slow", "done", "resumed", "last-minute", "often", "again"],
)
def test_count_has_the_rate_of_the_last_minute(updates: list[tuple[float, int]], text: str) -> None:
    clock = Clock()
    progress, began = CountProgress("samples", clock), clock.now
    for after_s, done in updates:
        clock.now = began + after_s
        progress.update(done, 1200)
    assert progress.text() == text


def test_last_duration_is_that_of_the_last_success() -> None:
    clock = Clock()
    last = LastDuration(clock)
    with last.measured():
        assert not last.text()
        clock.now += 150.0
    assert last.text() == "the last time took 2 min"

    def fail() -> None:
        with last.measured():
            clock.now += 9.0
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert last.text() == "the last time took 2 min"


async def test_listed_wait_has_its_present_progress_and_its_timeout_the_reason() -> None:
    waits, progress = Waits(), TransferProgress(Clock())

    async def pull() -> None:
        async with waits.on("the store", because="pull version 3", limit_s=0.0, progress=progress.text):
            assert [wait.because for wait in waits.current()] == ["pull version 3"]
            progress.total_bytes = 5
            assert [wait.because for wait in waits.current()] == ["pull version 3: 0 B of 5 B"]
            await asyncio.Event().wait()

    with pytest.raises(WaitTimedOut, match=r"\(pull version 3\)"):
        await pull()
    assert waits.current() == []
