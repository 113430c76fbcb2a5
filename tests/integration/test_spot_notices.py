"""A worker of 64 samples on each cloud, whose metadata service fails for a while before it gives notice."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path
from typing import get_args

import pytest

from rlboost.services.rollout_worker.adapters.preemption import Aws, Azure, Google, Metadata, NoticeFile
from rlboost.services.rollout_worker.app import WorkerApp, WorkerOptions
from rlboost.services.rollout_worker.generator import Generator
from rlboost.services.rollout_worker.life import PreemptionWatch
from rlboost.services.rollout_worker.manager_connection import ManagerConnection, WorkerIdentity
from rlboost.services.rollout_worker.ports import NoticeSource
from rlboost.shared.messages import PreemptionNotice, WorkerLeft
from rlboost.shared.process.waiting import Waits
from tests.support.eventually import eventually
from tests.support.fake_metadata import EVENT_ID, Cloud, FakeMetadata
from tests.support.memory_bus import MemoryBus
from tests.support.worker_fakes import FakeEngine, FakeEngineFactory, FakeStagedWeights, FakeWeights
from tests.support.worker_manager import JOB, WorkerManager, assign, at_once

POLL_INTERVAL_S = 0.02
POLLED = {
    "aws": "GET /latest/meta-data/spot/instance-action",
    "gcp": "GET /computeMetadata/v1/instance/preempted",
    "azure": "GET /metadata/scheduledevents",
}


class Machine:
    """A worker with a fake engine, which holds 64 samples."""

    def __init__(self) -> None:
        bus = MemoryBus()
        self.manager = WorkerManager(bus)
        self.factory = FakeEngineFactory(lambda: FakeEngine(64, interval_s=0.005))
        generator, waits, weights = Generator(self.factory), Waits(), FakeWeights()
        weights.versions = {(JOB, 0): FakeStagedWeights()}
        identity = WorkerIdentity("preemptible", "fake", 64, 0.0, "here", 1)
        accept = self.manager.accept
        connection = ManagerConnection(at_once(accept()), accept, generator, identity, 2.0, waits)
        options = WorkerOptions(0.01, 0.05, 5.0)
        self.worker = WorkerApp(asyncio.Event(), connection, generator, weights, options, waits)

    async def run(self, *sources: NoticeSource, candidates: tuple[NoticeSource, ...] = ()) -> None:
        watch = PreemptionWatch(
            sources, candidates, self.worker, poll_interval_s=POLL_INTERVAL_S, acknowledge_after_s=0.0
        )
        await self.worker.run({"notices": watch.run})

    async def fill(self) -> None:
        worker = await self.manager.ready_worker()
        await self.manager.send(worker, assign(*range(64), max_tokens=4000))
        await self.manager.until_generated(*((i, 1) for i in range(64)), tokens=5)

    async def assert_all_is_handed_off(self, reason: str) -> None:
        (notice,), (left,) = await self.manager.received(PreemptionNotice), await self.manager.received(WorkerLeft)
        assert (notice.reason, left.reason) == (reason, reason)
        assert left.at - notice.at < 2.0
        made = await self.manager.generated()
        assert self.factory.engine is not None
        assert sum(len(row.tokens) for row in made.values()) == self.factory.engine.stats().tokens_generated_total


def _asked_more_often(fake: FakeMetadata, times: int) -> bool:
    return len(fake.requests) > times


@pytest.fixture
async def machine() -> Machine:
    return Machine()


@pytest.mark.parametrize("cloud", get_args(Cloud))
async def test_notice_after_metadata_faults_hands_off_everything(machine: Machine, cloud: Cloud) -> None:
    fake = FakeMetadata(cloud)
    metadata = Metadata(fake.url, limit_s=1.5)
    try:
        running = asyncio.create_task(machine.run(candidates=(Aws(metadata), Google(metadata), Azure(metadata))))
        await machine.fill()
        await eventually(lambda: fake.requests.count(POLLED[cloud]) > 1)  # the cloud is known
        for fault, value in (("status", 503), ("garbage", b"<html>"), ("status", 404)):
            before, was = len(fake.requests), getattr(fake, fault)
            setattr(fake, fault, value)
            await eventually(partial(_asked_more_often, fake, before + 2))
            setattr(fake, fault, was)
        fake.expire_tokens()
        fake.preempt(30.0)
        await running
    finally:
        fake.close()
        await metadata.close()
    await machine.assert_all_is_handed_off(
        {"aws": "aws: terminate", "gcp": "gcp: preempted", "azure": "azure: Preempt"}[cloud]
    )
    acknowledged = [event_id for event_id, _ in fake.acknowledged]
    assert acknowledged == ([EVENT_ID] if cloud == "azure" else [])
    (left,) = await machine.manager.received(WorkerLeft)
    assert all(at >= left.at for _, at in fake.acknowledged), "or it would be taken away in the middle of the hand-off"


async def test_a_metadata_service_that_hangs_does_not_hold_up_generation(machine: Machine) -> None:
    fake = FakeMetadata("aws")
    fake.slow_s = 60.0
    metadata = Metadata(fake.url)
    try:
        running = asyncio.create_task(machine.run(Aws(metadata)))
        await machine.fill()
        made = len((await machine.manager.generated())[0, 1].tokens)
        await machine.manager.until_generated((0, 1), tokens=made + 50)
        assert len(fake.requests) == 1, "the first question is not answered yet"
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    finally:
        fake.close()
        await metadata.close()


async def test_a_file_hands_off_everything(machine: Machine, tmp_path: Path) -> None:
    path = tmp_path / "spot"
    running = asyncio.create_task(machine.run(NoticeFile(path)))
    await machine.fill()
    path.write_text("25")
    await running
    await machine.assert_all_is_handed_off(f"file: {path}")
