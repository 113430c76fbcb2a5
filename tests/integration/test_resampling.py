"""Other prompts in place of groups that teach nothing, with a real manager and Redis; the engine is a fake."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rlboost.services.trainer.ports.samples import RewardBatch, Scores
from rlboost.services.trainer.ports.storage import JobResources
from rlboost.shared.ids import SampleId
from rlboost.shared.messages import Message, SampleFinished, SeedingEnded, SeedingReopened, WeightsCommitted
from rlboost.shared.messages.jobs import ENDED
from rlboost.shared.redis.bus import RedisBus
from rlboost.shared.streams import names
from rlboost.shared.weights.manifest import Shard
from rlboost.shared.wire import ints
from tests.support.eventually import eventually
from tests.support.played_job import PlayedJob
from tests.support.redis_server import RedisServer
from tests.support.service_process import ServiceProcess
from tests.support.sim_worker import SimWorker, check_completion
from tests.support.stream_entries import read_all
from tests.support.trainer_fakes import FakeRewards, MemoryWeights
from tests.support.trainer_rig import JOB, Rig, spec

PLACES, TRIES, GROUP, STEPS = 3, 2, 2, 2
EQUAL = frozenset({0, 2, 3, 5, 6})


class AnnouncedWeights(MemoryWeights):
    """Tells the manager of versions, as the weight store does."""

    def __init__(self, bus: RedisBus) -> None:
        super().__init__()
        self._bus = bus

    async def publish(self, version: int, shards: Iterable[Shard], **rest: Any) -> None:
        await super().publish(version, shards, **rest)
        message = WeightsCommitted(job_id=JOB, version=version, manifest_digest="", n_bytes=0, at=0.0)
        await self._bus.append(names.WEIGHTS_COMMITTED, message)


class LateRewards(FakeRewards):
    """Scores nothing before the trainer has the device."""

    def __init__(self, worker: SimWorker) -> None:
        super().__init__(_by_row)
        self._worker = worker

    async def score(self, batch: RewardBatch) -> Scores:
        await eventually(lambda: self._worker.state == "suspended", within_s=30)
        return await super().score(batch)


def _by_row(batch: RewardBatch) -> Scores:
    n = len(batch.completion_ids)
    return Scores((1.0,) * n if batch.columns["row"][0] in EQUAL else tuple(float(i) for i in range(n)))


class Played:
    """A trainer's rig whose manager is a process, and workers that are played."""

    def __init__(self, folder: Path, redis: RedisServer) -> None:
        self.bus = RedisBus(redis.url)
        self.manager = ServiceProcess("rollout_manager", "RLBOOST_MANAGER_", folder, redis.url, {})
        self.workers = PlayedJob(self.bus, forgives_outages=True)
        self.rig = Rig(
            folder,
            spec(
                data={"train": "t.jsonl", "prompts_per_step": PLACES},
                algorithm={"group_size": GROUP, "resample": TRIES},
                steps=STEPS,
            ),
        )
        self.rig.bus = self.bus  # type: ignore[assignment]  # a rig only uses it as a bus
        self.rig.manager = _Nobody()  # type: ignore[assignment]  # a rig only runs it
        self.rig.reward = _by_row
        self.rig.vocab_size = 1 << 24  # of simulated workers
        self.rig.weights = AnnouncedWeights(self.bus)

    def score_late(self, worker: SimWorker) -> None:
        """Have nothing scored while a reserved worker has the device."""
        build = self.rig.build

        def building(*of: Any, **_: Any) -> JobResources:
            return replace(build(*of), rewards=LateRewards(worker))

        self.rig.build = building  # type: ignore[method-assign]

    async def finished(self) -> list[Message]:
        return [entry.message for entry in await read_all(self.bus, names.rollouts_finished(JOB))]

    async def completed(self) -> None:
        """Return once the manager, which reads the trainer's reports and trims them, says that the job is done."""

        async def ended() -> dict[str, Any] | None:
            record = json.loads((await self.bus.hash_all(names.JOBS)).get(JOB, "{}"))
            return record if record.get("state") in ENDED else None

        record = await eventually(ended, within_s=60)
        assert record is not None
        assert (record["state"], record["error"]) == ("completed", "")

    async def seeding(self, step: int) -> list[str]:
        """Return what was said of the device in a step."""
        said = [m for m in await self.finished() if isinstance(m, SeedingEnded | SeedingReopened) and m.step == step]
        return [m.reason if isinstance(m, SeedingEnded) else "reopened" for m in said]


class _Nobody:
    async def run(self) -> None:
        await asyncio.Event().wait()


@pytest.fixture
async def played(tmp_path: Path) -> AsyncIterator[Played]:
    redis = RedisServer(tmp_path / "redis", aof=True)
    redis.start()
    played = Played(tmp_path, redis)
    try:
        played.manager.start()
        yield played
    finally:
        await played.workers.stop_workers()
        await played.bus.close()
        played.manager.kill()
        redis.stop()


@pytest.mark.parametrize("manager", ["lives", "is killed"])
async def test_reserved_workers_alone_reopen_the_window_for_replacements(played: Played, manager: str) -> None:
    played.score_late(played.workers.start_worker("reserved", "reserved", pace_s=0.01))
    async with played.rig.trainer():
        await played.rig.command("create")
        if manager == "is killed":
            await eventually(lambda: _reopened(played), within_s=30)
            played.manager.kill()
            await asyncio.to_thread(played.manager.start)
        await played.completed()
    await _holds_together(played)
    for step in range(STEPS):
        said = await played.seeding(step)
        assert said[0] == said[-1] == "finished"
        assert len(said) > 1
        assert {*itertools.pairwise(said)} == {("finished", "reopened"), ("reopened", "finished")}


async def _reopened(played: Played) -> bool:
    return "reopened" in await played.seeding(0)


async def test_with_spot_workers_the_trainer_keeps_the_device(played: Played) -> None:
    played.workers.start_worker("reserved", "reserved", pace_s=0.01)
    played.workers.start_worker("spot", pace_s=0.01)
    async with played.rig.trainer():
        await played.rig.command("create")
        await played.completed()
    await _holds_together(played)
    assert [len(await played.seeding(step)) for step in range(STEPS)] == [1] * STEPS


async def test_reserved_workers_generate_replacements_after_spot_workers_left(
    played: Played,
) -> None:
    played.score_late(played.workers.start_worker("reserved", "reserved", pace_s=0.01))
    spot = played.workers.start_worker("spot", pace_s=0.01)
    generate = spot.generate

    def has_replacements() -> bool:
        return any(SampleId.unpack(sample).group >= PLACES for sample in spot.held)

    spot.generate = lambda n=1: None if has_replacements() else generate(n)  # type: ignore[method-assign]
    async with played.rig.trainer():
        await played.rig.command("create")
        await eventually(has_replacements, within_s=30)
        assert "reopened" not in await played.seeding(0)
        played.workers.kill_worker("spot")
        await played.completed()
    await _holds_together(played)
    assert "reopened" in await played.seeding(0)


async def _holds_together(played: Played) -> None:
    samples = [m for m in await played.finished() if isinstance(m, SampleFinished)]
    assert len({m.sample for m in samples}) == len(samples)
    for sample in samples:
        check_completion(ints(sample.tokens), sample.spans)
    groups = {SampleId.unpack(m.sample)[2:4] for m in samples}
    assert len(samples) == GROUP * len(groups)
    assert len({step for step, number in groups if number >= PLACES}) == STEPS, "in each step some were replaced"
    rows = played.rig.folder.rows
    assert [row["groups/resampled"] for _, row in sorted(rows.items())] == [
        sum(group[0] == step for group in groups) - PLACES for step in range(STEPS)
    ]
    assert all(row["tokens/trained"] > 0 for row in rows.values())
