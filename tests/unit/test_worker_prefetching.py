"""The loop that follows drafts, beside the worker's others."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import structlog

from services.rollout_worker.prefetching import Prefetching
from shared.errors import RLBoostError, StoreUnavailable
from shared.messages import UseVersion
from tests.support.eventually import eventually
from tests.support.worker_manager import JOB, assign
from tests.support.worker_rig import Rig

OTHER = "other"


class FakeDrafts:
    """`ports.DraftSource` in which a test says what comes of each question."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.answers: asyncio.Queue[RLBoostError | None] = asyncio.Queue()

    async def follow(self, job_id: str) -> None:
        """See `DraftSource`."""
        self.asked.append(job_id)
        if (error := await self.answers.get()) is not None:
            raise error


@pytest.fixture
def drafts() -> FakeDrafts:
    return FakeDrafts()


@pytest.fixture
async def rig(drafts: FakeDrafts) -> AsyncIterator[Rig]:
    rig = Rig()
    rig.weights.versions[OTHER, 0] = rig.weights.versions[JOB, 0]
    prefetching = Prefetching(rig.link, drafts, retry_s=0.01)
    running = asyncio.create_task(rig.app.run(rig.stop, {"prefetch": prefetching.run}), name="worker")
    yield rig
    rig.stop.set()
    await running


async def test_a_worker_without_a_job_follows_nothing_and_one_with_a_job_that_one(rig: Rig, drafts: FakeDrafts) -> None:
    worker = await rig.manager.joined()
    await rig.manager.until(worker, "joining")
    assert drafts.asked == []
    await rig.manager.send(worker, UseVersion(job_id=JOB, version=0))
    await eventually(lambda: drafts.asked == [JOB])
    await rig.manager.send(worker, UseVersion(job_id=OTHER, version=0))
    await rig.manager.until(worker, "ready", 0)
    drafts.answers.put_nowait(None)
    await eventually(lambda: drafts.asked == [JOB, OTHER])


async def test_a_failure_is_said_once_and_harms_nothing(rig: Rig, drafts: FakeDrafts) -> None:
    with structlog.testing.capture_logs() as logs:
        worker = await rig.manager.ready_worker()
        for _ in range(3):
            drafts.answers.put_nowait(StoreUnavailable("away"))
        drafts.answers.put_nowait(None)
        drafts.answers.put_nowait(StoreUnavailable("away again"))
        await eventually(lambda: len(drafts.asked) == 6)
        await rig.manager.send(worker, assign(1, max_tokens=10))
        await rig.manager.until_finished((1, 1))
    said = [entry["error"] for entry in logs if entry["event"] == "prefetch_failed"]
    assert said == ["away", "away again"]


async def test_a_stop_does_not_wait_for_the_store(rig: Rig, drafts: FakeDrafts) -> None:
    await rig.manager.ready_worker()
    await eventually(lambda: drafts.asked == [JOB])
    with structlog.testing.capture_logs() as logs:
        rig.stop.set()
        await eventually(lambda: not any(task.get_name() == "prefetch" for task in asyncio.all_tasks()))
    assert "loop_cancelled_after_grace" not in {entry["event"] for entry in logs}
