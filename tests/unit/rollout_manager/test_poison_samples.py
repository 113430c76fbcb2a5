"""Samples that fail on every worker are dropped; those that only ran when an engine died are not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Coroutine
from typing import Any, TypeVar

import pytest

from rlboost.services.rollout_manager.domain.effects import Now
from rlboost.services.rollout_manager.domain.jobs import Audit
from rlboost.services.rollout_manager.domain.tokens import FAILURES_LIMIT
from rlboost.services.rollout_manager.leadership import manager_record
from rlboost.services.rollout_manager.loop import Manager
from rlboost.shared.ids import SampleId
from rlboost.shared.messages import (
    DeadLetter,
    Event,
    Message,
    PreemptionNotice,
    Restated,
    SampleDropped,
    SampleFinished,
    Sampling,
)
from rlboost.shared.messages.codec import decode
from rlboost.shared.streams import names
from rlboost.shared.wire import I32, ints
from tests.support.builders import group_requested, job_running
from tests.support.memory_bus import MemoryBus
from tests.support.sim_worker import SimWorker, check_completion
from tests.support.stream_entries import read_all
from tests.support.worker_manager import at_once

T = TypeVar("T")
JOB = "job"
TOKENS = 60


class Fleet:
    """A manager and workers that are restarted whenever one has ended, driven step by step."""

    def __init__(self, workers: int, *, groups: int = 6, n: int = 4, **sampling: Any) -> None:
        self.sampling = Sampling(max_tokens=TOKENS, **sampling)
        self.clock = 100.0
        self.bus = MemoryBus(clock=lambda: self.clock)
        self.lives = Counter[str]()
        self.new_manager()
        create, report, committed = job_running(JOB)
        self.run(self.bus.append(names.JOB_COMMANDS, create))
        self.run(self.bus.append(names.JOB_REPORTS, report))
        self.run(self.bus.append(names.WEIGHTS_COMMITTED, committed))
        self.requested = [self._request(group, n) + i for group in range(groups) for i in range(n)]
        self.workers = [self._hire(f"w{i}") for i in range(workers)]

    def run(self, what: Coroutine[Any, Any, T]) -> T:
        """Run it to its end in one go, as the in-memory bus never waits."""
        return at_once(what)

    def new_manager(self) -> None:
        clock = lambda: Now(self.clock, self.clock)  # noqa: E731 - it is one
        self.manager = Manager(
            self.bus, lease_s=2.0, redis_limit_s=9.0, clock=clock, record=manager_record("h", 1, "m")
        )

    def _request(self, number: int, n: int) -> int:
        sampling = self.sampling
        request = group_requested(number, job_id=JOB, n=n, sampling=sampling)
        self.run(self.bus.append(names.rollouts_requested(JOB), request))
        return request.group

    def _hire(self, name: str) -> SimWorker:
        self.lives[name] += 1
        worker = SimWorker(self.bus, f"{name}-{self.lives[name]}", slots=8)
        self.run(worker.join())
        return worker

    def step(self) -> None:
        self.clock += 0.1
        if self.manager.recovered or self.run(self.manager.try_lead()):
            self.run(self.manager.turn())
        for worker in self.workers:
            self.run(worker.send_heartbeat())
            self.run(worker.execute_commands())
            worker.generate(2)
            self.run(worker.flush())

    def replace(self, worker: SimWorker) -> None:
        """A supervisor starts it again."""
        self.workers = [self._hire(one.id.rpartition("-")[0]) if one is worker else one for one in self.workers]

    def entries(self, stream: str) -> list[Message]:
        return [entry.message for entry in self.run(read_all(self.bus, stream))]

    def finished(self) -> list[SampleFinished | SampleDropped]:
        messages = self.entries(names.rollouts_finished(JOB))
        return [m for m in messages if isinstance(m, SampleFinished | SampleDropped)]

    @property
    def over(self) -> bool:
        return len(self.finished()) == len(self.requested)

    def audit(self) -> Audit:
        return Audit.model_validate_json(self.run(self.bus.hash_get(names.job_audit(JOB), "counters")) or "{}")

    def check(self) -> list[SampleDropped]:
        """Check that everything was answered once and adds up; return what was dropped."""
        assert sorted(m.sample for m in self.finished()) == sorted(self.requested)
        for message in self.finished():
            if isinstance(message, SampleFinished):
                check_completion(ints(message.tokens, I32), message.spans)
        audit, dropped = self.audit(), [m for m in self.finished() if isinstance(m, SampleDropped)]
        assert audit.requested == audit.delivered + len(dropped)
        assert audit.tokens_generated == audit.tokens_delivered + sum(audit.tokens_regenerated.values())
        return dropped


def kill_engines_that_run(fleet: Fleet, poison: int, at_token: int) -> list[str]:
    """Kill each engine that has generated this token of the sample, until all samples ended; return the workers."""
    died: list[str] = []
    for _ in range(600):
        fleet.step()
        for worker in list(fleet.workers):
            if poison in worker.running() and len(worker.held[poison].tokens) >= at_token:
                fleet.run(worker.die())
                died.append(worker.id)
                fleet.replace(worker)
        if fleet.over:
            break
    return died


def test_sample_that_kills_engines_is_dropped_after_the_third_worker() -> None:
    fleet = Fleet(4)
    poison = fleet.requested[5]
    died = kill_engines_that_run(fleet, poison, at_token=10)
    (dropped,) = fleet.check()
    assert dropped.sample == poison
    assert len({name.rpartition("-")[0] for name in died}) == len(died) == 3
    assert dropped.reason == "failed 3 times: the engine of its worker died or hung"
    assert fleet.audit().dropped == {"failed": 1}


def test_failures_of_a_sample_are_counted_across_manager_restarts() -> None:
    fleet = Fleet(4)
    poison, died = fleet.requested[5], 0
    for _ in range(600):
        fleet.step()
        for worker in list(fleet.workers):
            if poison in worker.running():
                fleet.run(worker.die())
                fleet.replace(worker)
                fleet.step()
                died += 1
                fleet.new_manager()
                fleet.clock += 10.0
        if fleet.over:
            break
    (dropped,) = fleet.check()
    assert (dropped.sample, died) == (poison, 3)


def test_poison_sample_with_one_worker_is_dropped_at_the_failure_limit() -> None:
    fleet = Fleet(1)
    died = kill_engines_that_run(fleet, fleet.requested[0], at_token=4)
    assert died == [f"w0-{life}" for life in range(1, FAILURES_LIMIT + 1)]
    assert [dropped.sample for dropped in fleet.check()] == [fleet.requested[0]]


def test_engines_that_die_of_other_causes_drop_no_sample() -> None:
    fleet = Fleet(3)
    for turn in range(600):
        fleet.step()
        if turn % 12 == 11 and turn < 200:
            worker = fleet.workers[turn // 12 % 3]
            fleet.run(worker.die())
            fleet.replace(worker)
        if fleet.over:
            break
    assert fleet.check() == []


def test_preemptions_make_no_sample_a_suspect() -> None:
    fleet = Fleet(2, groups=1, n=2)
    for turn in range(300):
        fleet.step()
        if turn % 3 == 2 and turn < 30:
            worker = fleet.workers[turn // 3 % 2]
            if turn % 2:
                notice = PreemptionNotice(worker=worker.id, lead_s=1.0, reason="spot", at=0.0)
                fleet.run(fleet.bus.append(names.WORKER_HEARTBEATS, notice))
                fleet.run(worker.die())
            else:
                worker.held.clear()
                fleet.clock += 9.0  # its lease runs out
            fleet.replace(worker)
            assert all(not sample.failed_on for sample in fleet.manager.world.ledger.samples.values())
        if fleet.over:
            break
    assert fleet.check() == []


def test_sample_refused_by_three_workers_is_dropped_and_dead_lettered() -> None:
    fleet = Fleet(4, groups=2)
    poison, refused = fleet.requested[2], []
    for _ in range(300):
        fleet.step()
        for worker in fleet.workers:
            if poison in worker.held and len(worker.held[poison].tokens) >= 6:
                fleet.run(worker.refuse(poison))
                refused.append(worker.id)
        if fleet.over:
            break
    (dropped,) = fleet.check()
    assert dropped.reason == "failed 3 times: the engine refuses it"
    assert len(set(refused)) == 3
    (letter,) = [m for m in fleet.entries(names.DEAD_LETTERS) if isinstance(m, DeadLetter)]
    assert letter.reason == f"{dropped.reason} (on {', '.join(name.rpartition('-')[0] for name in refused)})"
    body = decode(letter.body)
    assert isinstance(body, Restated)
    assert body.sample == poison
    assert len(ints(body.tokens, I32)) >= 6
    events = [m for m in fleet.entries(names.job_events(JOB)) if isinstance(m, Event) and m.kind == "sample_failed"]
    assert [event.fields["sample"] for event in events] == [str(SampleId.unpack(poison))]


def workers_of_a_run(fleet: Fleet, without: SimWorker) -> set[str]:
    """Run to the end, in which one worker must never hold a sample; return the workers that generated."""
    for _ in range(900):
        fleet.step()
        assert not without.held, "it would be refused, which counts as a failure"
        if fleet.over:
            break
    assert fleet.check() == []
    return {worker for m in fleet.finished() if isinstance(m, SampleFinished) for worker, _, _ in m.spans}


def test_long_sample_waits_for_a_worker_that_accepts_its_length() -> None:
    fleet = Fleet(2, groups=8)
    small, large = fleet.workers
    small.max_request_tokens = TOKENS
    assert large.id in workers_of_a_run(fleet, without=small)


def test_samples_with_routed_experts_wait_for_a_worker_that_returns_them() -> None:
    fleet = Fleet(2, groups=8, routed_experts=(2, 2, 8))
    unable, able = fleet.workers
    unable.returns_routed_experts = False
    assert workers_of_a_run(fleet, without=unable) == {able.id}


def test_samples_with_an_option_wait_for_a_worker_that_supports_it() -> None:
    fleet = Fleet(2, groups=8, min_p=0.1)
    unable, able = fleet.workers
    able.sampling_options = ("min_p",)
    assert workers_of_a_run(fleet, without=unable) == {able.id}


@pytest.mark.parametrize("cause", ["length", "option"])
def test_sample_that_no_engine_accepts_is_dropped_with_the_engines_reason(cause: str) -> None:
    fleet = Fleet(2, groups=2, top_k=0 if cause == "length" else 5)
    for worker in fleet.workers:
        worker.max_request_tokens = TOKENS if cause == "length" else 0
    for _ in range(300):
        fleet.step()
        for worker in fleet.workers:
            for sample in list(worker.held):
                fleet.run(worker.refuse(sample))
        if fleet.over:
            break
    assert {dropped.reason.partition(": ")[2] for dropped in fleet.check()} == {"the engine refuses it"}
    assert len(fleet.check()) == len(fleet.requested)
