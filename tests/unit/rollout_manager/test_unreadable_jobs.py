"""A job whose stored data cannot be parsed fails with the reason, and others continue."""

from __future__ import annotations

import json
from functools import partial

import pytest

from rlboost.services.rollout_manager.api.jobs import control
from rlboost.services.rollout_manager.domain.effects import Now
from rlboost.services.rollout_manager.domain.jobs import Audit
from rlboost.services.rollout_manager.leadership import manager_record
from rlboost.services.rollout_manager.loop import Manager
from rlboost.shared.ids import MAX_JOBS
from rlboost.shared.job.spec import to_json
from rlboost.shared.messages import (
    DeadLetter,
    JobCommand,
    Message,
    SampleDropped,
)
from rlboost.shared.streams import names
from rlboost.shared.streams.bus import HashSet
from tests.support.builders import group_id, group_requested, job_running, job_spec
from tests.support.memory_bus import MemoryBus
from tests.support.sim_worker import SimWorker
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
        record, stop = manager_record("h", 1, "m"), partial(control, action="cancel", token="t")
        return Manager(self.bus, lease_s=2.0, redis_limit_s=9.0, clock=clock, record=record, stop_trainer=stop)

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


async def test_unreadable_job_fails_once_and_ends_its_samples(stage: Stage) -> None:
    await stage.begin(n=2)
    await stage.turns()
    stage.worker.generate(3)
    await stage.worker.flush()
    await stage.turns()
    readable = json.loads(await stage.record())
    await stage.store(json.dumps(readable | {"step": 3, "invented": "later", "spec": {"steps": 7, "invented": 1}}))
    for _ in range(2):
        await stage.restart()
        job = stage.manager.world.jobs[JOB].record
        assert (job.state, job.step, job.spec.steps, job.no) == ("failed", 3, 7, 1)
        assert "field job of the hash rlboost:jobs in Redis cannot be parsed (" in job.error
        assert not job.is_file_readable
        assert not stage.manager.world.ledger.samples
        await stage.turns()
    assert stage.worker.held == {}
    dropped = [m.reason for m in await stage.entries(names.rollouts_finished(JOB)) if isinstance(m, SampleDropped)]
    assert dropped == ["job failed", "job failed"]
    counters = Audit.model_validate_json(await stage.bus.hash_get(names.job_audit(JOB), "counters") or "")
    assert (counters.requested, dict(counters.dropped)) == (2, {"job failed": 2})
    assert len(await stage.entries(names.DEAD_LETTERS)) == 1
    (stop,) = await stage.entries(names.JOB_CONTROLS)
    assert isinstance(stop, JobCommand)
    assert (stop.action, stop.job_id) == ("cancel", JOB)


@pytest.mark.parametrize("text", ["{", "[]", '{"no": 1, "state": 5, "spec": [], "created_at": "x"}'])
async def test_jobs_without_a_readable_record_get_numbers_of_their_own(stage: Stage, text: str) -> None:
    await stage.begin(n=1)
    await stage.bus.transact([HashSet(names.JOBS, {"one-a1": text, "two": text})])
    await stage.restart()
    jobs = stage.manager.world.jobs
    assert [(job.id, job.record.no, job.record.state) for job in jobs.values()] == [
        (JOB, 1, "running"),
        ("one-a1", MAX_JOBS - 1, "failed"),
        ("two", MAX_JOBS - 2, "failed"),
    ]
    assert jobs["one-a1"].record.spec.name == "one"


async def test_unreadable_job_that_had_ended_keeps_its_state(stage: Stage) -> None:
    await stage.begin(n=1)
    ended = {"state": "completed", "finished_at": 90.0, "no": 7}
    await stage.bus.transact([HashSet(names.JOBS, {"ended": json.dumps(ended)})])
    await stage.restart()
    job = stage.manager.world.jobs["ended"].record
    assert (job.state, job.finished_at, job.no) == ("completed", 90.0, 7)
    assert "cannot be parsed" in job.error
    assert await stage.entries(names.job_events("ended")) == []
    assert await stage.bus.hash_get(names.JOBS, "ended") == json.dumps(ended), "its record was overwritten"
    assert await stage.entries(names.DEAD_LETTERS) == []
    assert await stage.entries(names.JOB_CONTROLS) == []


async def test_job_with_unreadable_counters_fails_and_counts_anew(stage: Stage) -> None:
    await stage.begin(n=1)
    await stage.bus.transact([HashSet(names.job_audit(JOB), {"counters": "{"})])
    await stage.bus.transact([HashSet(names.job_lengths(JOB), {"prompt": "long"})])
    await stage.restart()
    job = stage.manager.world.jobs[JOB]
    assert (job.record.state, job.record.spec, job.record.is_file_readable) == ("failed", job_spec(), True)
    assert "field counters of the hash rlboost:job:job:audit in Redis cannot be parsed" in job.record.error
    assert Audit.model_validate_json(await stage.bus.hash_get(names.job_audit(JOB), "counters") or "")


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
    record, letter = await stage.entries(names.DEAD_LETTERS)
    assert isinstance(record, DeadLetter)
    assert isinstance(letter, DeadLetter)
    assert (record.stream, record.entry_id, record.body) == (names.JOBS, "stored", unreadable.encode())
    assert letter.reason == (
        "the job file of only-commanded cannot be parsed: invented_later: unknown key: remove it or fix its spelling"
    )
    assert stage.manager.world.jobs["stored"].record.state == "failed"
