"""Waits that say how far they are."""

from __future__ import annotations

import asyncio

import pytest

from rlboost.shared.errors import WaitTimedOut
from rlboost.shared.progress import TransferProgress
from rlboost.shared.waiting import Waits


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
    ],
)
def test_progress_has_a_rate_and_the_remaining_time(done: int, total: int, elapsed_s: float, text: str) -> None:
    clock = Clock()
    progress = TransferProgress(clock)
    progress.done_bytes, progress.total_bytes = done, total
    clock.now += elapsed_s
    assert progress.text() == text


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
