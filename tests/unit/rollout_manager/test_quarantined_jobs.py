"""Quarantined jobs: their samples stay in the log, and messages about them are stored."""

from __future__ import annotations

import json

import pytest

from rlboost.services.rollout_manager.app import Manager
from rlboost.services.rollout_manager.domain.compaction import compact
from rlboost.services.rollout_manager.domain.jobs.audit import Audit
from rlboost.services.rollout_manager.domain.world import Now
from rlboost.services.rollout_manager.leadership import manager_record
from rlboost.shared.job.spec import to_json
from rlboost.shared.messages import (
    DeadLetter,
    JobCommand,
    JobReport,
    Message,
    SampleFinished,
)
from rlboost.shared.streams import names
from rlboost.shared.streams.bus import HashSet
from rlboost.shared.streams.fakes import MemoryBus
from rlboost.shared.wire.columns import I32, ints
from tests.support.builders import group_id, group_requested, job_running, job_spec
from tests.support.sim_worker import SimWorker, check_completion
from tests.support.stream_entries import read_all

JOB = "job"
SPEC = to_json(job_spec())
GROUP = group_id()
TOKENS = 6


class Stage:
    """A manager and one worker, driven step by step."""

    def __init__(self) -> None:
        self.clock = 100.0
        self.bus = MemoryBus(clock=lambda: self.clock)
        self.manager = self.successor()
        self.worker = SimWorker(self.bus, "w-1", slots=8)

    def successor(self) -> Manager:
        clock = lambda: Now(self.clock, self.clock)  # noqa: E731 - it is one
        return Manager(self.bus, lease_s=2.0, redis_limit_s=9.0, clock=clock, record=manager_record("h", 1, "m"))

    async def begin(self, n: int) -> None:
        create, report, committed = job_running(JOB)
        await self.bus.append(names.JOB_COMMANDS, create)
        await self.bus.append(names.JOB_REPORTS, report)
        await self.bus.append(names.WEIGHTS_COMMITTED, committed)
        assert await self.manager.try_lead()
        await self.manager.turn()
        await self.bus.append(
            names.rollouts_requested(JOB),
            group_requested(job_id=JOB, n=n, max_tokens=TOKENS),
        )
        await self.worker.join()

    async def turns(self, n: int = 4) -> None:
        for _ in range(n):
            self.clock += 0.1
            await self.manager.turn()
            await self.worker.execute_commands()
            await self.worker.send_heartbeat()

    async def restart(self) -> None:
        self.manager = self.successor()
        assert await self.manager.try_lead()

    async def record(self) -> str:
        return await self.bus.hash_get(names.JOBS, JOB) or ""

    async def store(self, record: str) -> None:
        await self.bus.transact([HashSet(names.JOBS, {JOB: record})])

    async def entries(self, stream: str) -> list[Message]:
        return [entry.message for entry in await read_all(self.bus, stream)]


@pytest.fixture
def stage() -> Stage:
    return Stage()


async def test_samples_of_a_quarantined_job_keep_their_tokens(stage: Stage) -> None:
    await stage.begin(n=2)
    await stage.turns()
    slow, quick = stage.worker.held.values()
    stage.worker.generate(3)
    slow.max_tokens = 3  # makes no more
    stage.worker.generate(3)
    slow.max_tokens, slow.done = TOKENS, False
    await stage.worker.flush()
    assert quick.done, "the manager has not read yet that this one is complete"
    readable = await stage.record()
    await stage.store("{")
    await stage.restart()
    for _ in range(2):
        waiting = {
            sample.id: (sample.worker, sample.n_tokens) for sample in stage.manager.world.ledger.samples.values()
        }
        # The last token of the complete one is regenerated: only its last frame recorded the end.
        assert waiting == {GROUP: ("", 3), GROUP + 1: ("", TOKENS - 1)}
        await stage.turns()
        await stage.restart()
    assert stage.worker.held == {}
    assert not [m for m in await stage.entries(names.rollouts_finished(JOB)) if isinstance(m, SampleFinished)]
    assert [s.attempt for s in stage.manager.world.ledger.samples.values()] == [2, 2], "detached once"
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


async def test_log_with_a_quarantined_job_is_compacted(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlboost.services.rollout_manager.domain.compaction.MIN_LOG_TOKENS", 1)
    monkeypatch.setattr("rlboost.services.rollout_manager.domain.compaction.MAX_LOG_RATIO", 0)
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
    assert world.ledger.samples[GROUP].first_id != before, "restated at the tail"
    assert world.ledger.samples[GROUP].n_tokens == TOKENS - 1


async def test_create_command_that_cannot_be_parsed_affects_no_other_job(stage: Stage) -> None:
    await stage.begin(n=1)
    unreadable = json.dumps({**json.loads(SPEC), "invented_later": 1})
    for job, no, stored in (("stored", 2, True), ("only-commanded", 3, False)):
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
        "the job file of only-commanded cannot be parsed: invented_later: unknown key: remove it or fix its spelling"
    )
    assert await stage.bus.hash_get(names.JOBS, "stored") == unreadable


async def test_job_that_ended_in_quarantine_has_ended(stage: Stage) -> None:
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
    assert await stage.entries(names.job_quarantine(JOB)) == []
    counters = Audit.model_validate_json(await stage.bus.hash_get(names.job_audit(JOB), "counters") or "")
    assert (counters.requested, dict(counters.dropped)) == (1, {"job failed": 1})
