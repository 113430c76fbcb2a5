"""Jobs that a manager cannot read: their samples wait in the log, and what is said of them waits beside it."""

from __future__ import annotations

import json

import pytest

from services.rollout_manager.app import Manager
from services.rollout_manager.domain.audit import Audit
from services.rollout_manager.domain.compaction import compact
from services.rollout_manager.domain.world import Now
from services.rollout_manager.leadership import manager_at
from services.rollout_manager.recovery import read_all
from shared import names
from shared.bus import HashSet
from shared.columns import I32, ints, pack
from shared.fakes import MemoryBus
from shared.ids import SampleId
from shared.jobspec import parse, to_json
from shared.messages import (
    DeadLetter,
    GroupRequested,
    JobCommand,
    JobReport,
    Message,
    SampleFinished,
    Sampling,
    WeightsCommitted,
)
from tests.support.sim_worker import SimWorker, check_completion

JOB = "job"
SPEC = to_json(parse({"model": "m", "data": {"train": "t"}, "reward": {"function": "a:b"}, "steps": 9}))
GROUP = SampleId(1, False, 0, 0, 0).pack()
TOKENS = 6


class Stage:
    """A manager and one worker, each of which acts when it is told to."""

    def __init__(self) -> None:
        self.clock = 100.0
        self.bus = MemoryBus(clock=lambda: self.clock)
        self.manager = self.successor()
        self.worker = SimWorker(self.bus, "w-1", slots=8)

    def successor(self) -> Manager:
        clock = lambda: Now(self.clock, self.clock)  # noqa: E731 - it is one
        return Manager(self.bus, lease_s=2.0, redis_limit_s=9.0, clock=clock, me=manager_at("h", 1, "m"))

    async def begin(self, n: int) -> None:
        create = JobCommand(command_id="c", action="create", job_id=JOB, job_no=1, spec_json=SPEC)
        await self.bus.append(names.JOB_COMMANDS, create)
        await self.bus.append(names.JOB_REPORTS, JobReport(job_id=JOB, state="running", step=0))
        committed = WeightsCommitted(job_id=JOB, version=0, manifest_digest="", n_bytes=0, at=0.0)
        await self.bus.append(names.WEIGHTS_COMMITTED, committed)
        await self.manager.recover()
        await self.manager.turn()
        await self.bus.append(
            names.rollouts_requested(JOB),
            GroupRequested(
                job_id=JOB,
                group=GROUP,
                n=n,
                prompt=pack([1, 2], I32),
                sampling=Sampling(max_tokens=TOKENS),
                version=0,
                seed=7,
            ),
        )
        await self.worker.join()

    async def turns(self, n: int = 4) -> None:
        for _ in range(n):
            self.clock += 0.1
            await self.manager.turn()
            await self.worker.obey()
            await self.worker.beat()

    async def restart(self) -> None:
        self.manager = self.successor()
        await self.manager.recover()

    async def record(self) -> str:
        return await self.bus.hash_get(names.JOBS, JOB) or ""

    async def store(self, record: str) -> None:
        await self.bus.transact([HashSet(names.JOBS, {JOB: record})])

    async def entries(self, stream: str) -> list[Message]:
        return [entry.message for entry in await read_all(self.bus, stream)]


@pytest.fixture
def stage() -> Stage:
    return Stage()


async def test_samples_of_a_job_that_is_set_aside_wait_with_what_they_have(stage: Stage) -> None:
    await stage.begin(n=2)
    await stage.turns()
    slow, quick = stage.worker.held.values()
    stage.worker.generate(3)
    slow.max_tokens = 3  # makes no more
    stage.worker.generate(3)
    slow.max_tokens, slow.done = TOKENS, False
    await stage.worker.flush()
    assert quick.done, "nobody has read yet that this one is complete"
    readable = await stage.record()
    await stage.store("{")
    await stage.restart()
    for _ in range(2):
        waiting = {
            sample.id: (sample.worker, sample.n_tokens) for sample in stage.manager.world.ledger.samples.values()
        }
        # The last token of the complete one is drawn again: that it was the last is nowhere else.
        assert waiting == {GROUP: ("", 3), GROUP + 1: ("", TOKENS - 1)}
        await stage.turns()
        await stage.restart()
    assert stage.worker.held == {}
    assert not [m for m in await stage.entries(names.rollouts_finished(JOB)) if isinstance(m, SampleFinished)]
    assert [s.attempt for s in stage.manager.world.ledger.samples.values()] == [2, 2], "set aside once is enough"
    await stage.store(readable)
    await stage.restart()
    await stage.turns()
    stage.worker.generate(TOKENS)
    await stage.worker.flush()
    await stage.turns()
    finished = [m for m in await stage.entries(names.rollouts_finished(JOB)) if isinstance(m, SampleFinished)]
    assert sorted(m.sample for m in finished) == [GROUP, GROUP + 1]
    for message in finished:
        check_completion(ints(message.tokens, I32), message.spans)


async def test_the_log_stays_short_beside_a_job_that_is_set_aside(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.rollout_manager.domain.compaction.MIN_LOG_TOKENS", 1)
    monkeypatch.setattr("services.rollout_manager.domain.compaction.MAX_LOG_RATIO", 0)
    await stage.begin(n=1)
    await stage.turns()
    stage.worker.generate(TOKENS)
    await stage.worker.flush()
    await stage.store("{")
    await stage.restart()
    world = stage.manager.world
    before = compact(world, "0-0")
    assert before == world.ledger.samples[GROUP].first_id
    await stage.turns()
    assert world.ledger.samples[GROUP].first_id != before, "written again at the tail"
    assert world.ledger.samples[GROUP].n_tokens == TOKENS - 1


async def test_a_create_that_cannot_be_read_hurts_no_other_job(stage: Stage) -> None:
    await stage.begin(n=1)
    unreadable = json.dumps({**json.loads(SPEC), "invented_later": 1})
    for job, no, stored in (("stored", 2, True), ("only told", 3, False)):
        if stored:
            await stage.bus.transact([HashSet(names.JOBS, {job: unreadable})])
            await stage.restart()
        command = JobCommand(command_id=job, action="create", job_id=job, job_no=no, spec_json=unreadable)
        await stage.bus.append(names.JOB_COMMANDS, command)
    await stage.turns()
    stage.worker.generate(TOKENS)
    await stage.worker.flush()
    await stage.turns()
    assert len(await stage.entries(names.rollouts_finished(JOB))) >= 1
    (letter,) = await stage.entries(names.DEAD_LETTERS)
    assert isinstance(letter, DeadLetter)
    assert letter.reason == (
        "the job file of only told cannot be read: invented_later: unknown key: remove it or mend its spelling"
    )
    assert await stage.bus.hash_get(names.JOBS, "stored") == unreadable


async def test_a_job_that_ended_while_it_was_set_aside_has_ended(stage: Stage) -> None:
    await stage.begin(n=1)
    await stage.turns()
    readable, audit = await stage.record(), await stage.bus.hash_get(names.job_audit(JOB), "counters")
    await stage.store("{")
    await stage.restart()
    await stage.bus.append(names.JOB_REPORTS, JobReport(job_id=JOB, state="failed", step=0, error="it broke"))
    await stage.turns()
    assert await stage.record() == "{"
    assert await stage.bus.hash_get(names.job_audit(JOB), "counters") == audit
    await stage.store(readable)
    await stage.restart()
    job = stage.manager.world.jobs[JOB]
    assert (job.state, job.error) == ("failed", "it broke")
    assert '"failed"' in await stage.record()
    assert await stage.entries(names.job_kept(JOB)) == []
    counters = Audit.model_validate_json(await stage.bus.hash_get(names.job_audit(JOB), "counters") or "")
    assert (counters.requested, dict(counters.dropped)) == (1, {"job failed": 1})
