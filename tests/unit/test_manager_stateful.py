"""Ledger, placement and recovery against workers that crash, stall, repeat and delay: nothing is lost or doubled.

The machine drives the real manager over the in-memory bus; a crash of the manager drops its memory, and a lost reply
leaves it not knowing whether its last transaction took place.
"""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any, TypeVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from services.rollout_manager.app import Manager
from services.rollout_manager.domain.audit import Audit
from services.rollout_manager.domain.world import Now
from services.rollout_manager.recovery import read_all
from shared import names
from shared.columns import I32, ints, pack
from shared.errors import BusUnavailable
from shared.fakes import MemoryBus
from shared.ids import SampleId
from shared.jobspec import parse, to_json
from shared.messages import (
    GroupRequested,
    JobCommand,
    JobReport,
    SampleDropped,
    SampleFinished,
    Sampling,
    WeightsCommitted,
)
from tests.support.sim_worker import SimWorker, check_completion

T = TypeVar("T")
JOB = "job-1"
LEASE_S = 2.0
SPEC = {
    "model": "m",
    "data": {"train": "t"},
    "reward": {"function": "a:b"},
    "steps": 9,
    "elastic": {"seeding": 1.0},
}


class Spot(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.clock = 100.0
        self.bus = MemoryBus(clock=lambda: self.clock)
        self.workers: list[SimWorker] = []
        self.late: list[tuple[SimWorker, Any]] = []
        self.requested: list[GroupRequested] = []
        self.names = 0
        self.manager = self._new_manager()

    def run(self, what: Coroutine[Any, Any, T]) -> T:
        """The in-memory bus never waits, so a coroutine on it runs to its end in one go."""
        try:
            what.send(None)
        except StopIteration as done:
            result: T = done.value
            return result
        raise AssertionError("the coroutine waits for something")

    def _new_manager(self) -> Manager:
        return Manager(self.bus, lease_s=LEASE_S, redis_limit_s=9.0, clock=lambda: Now(self.clock, self.clock))

    def turn(self) -> None:
        try:
            if not self.manager.recovered:
                self.run(self.manager.recover())
            self.run(self.manager.turn())
        except BusUnavailable:
            self.manager.recovered = False

    @initialize()
    def start(self) -> None:
        create = JobCommand(command_id="c", action="create", job_id=JOB, job_no=1, spec_json=to_json(parse(SPEC)))
        self.run(self.bus.append(names.JOB_COMMANDS, create))
        self.run(self.bus.append(names.JOB_REPORTS, JobReport(job_id=JOB, state="running", step=0)))
        self.run(
            self.bus.append(
                names.WEIGHTS_COMMITTED,
                WeightsCommitted(job_id=JOB, version=0, manifest_digest="", n_bytes=0, at=0.0),
            )
        )
        self.turn()
        self.request(n=3, max_tokens=12)
        self.join(reserved=False)
        self.join(reserved=True)
        self.all_is_well_for_a_moment(n=1, turn_first=True)

    # --- the trainer ---

    @precondition(lambda self: len(self.requested) < 6)
    @rule(n=st.integers(1, 4), max_tokens=st.integers(1, 12))
    def request(self, n: int, max_tokens: int) -> None:
        group = SampleId(1, False, 0, len(self.requested), 0).pack()
        request = GroupRequested(
            job_id=JOB,
            group=group,
            n=n,
            prompt=pack([1, 2], I32),
            sampling=Sampling(max_tokens=max_tokens),
            version=0,
            seed=7,
        )
        self.requested.append(request)
        self.run(self.bus.append(names.rollouts_requested(JOB), request))

    @precondition(lambda self: self.requested)
    @rule(data=st.data())
    def request_again(self, data: st.DataObject) -> None:
        """A trainer that was killed asks for the same groups."""
        request = data.draw(st.sampled_from(self.requested))
        self.run(self.bus.append(names.rollouts_requested(JOB), request))

    # --- workers ---

    @precondition(lambda self: len(self.workers) < 4)
    @rule(reserved=st.booleans())
    def join(self, reserved: bool) -> None:
        self.names += 1
        worker = SimWorker(self.bus, f"w{self.names}", "reserved" if reserved else "preemptible", lease_s=LEASE_S)
        self.workers.append(worker)
        self.run(worker.join())

    @rule(n=st.integers(1, 3), turn_first=st.booleans())
    def all_is_well_for_a_moment(self, n: int, turn_first: bool) -> None:
        """Everybody beats, obeys, makes tokens and flushes, and the manager works."""
        self.clock += 0.1
        if turn_first:
            self.turn()
        for worker in self.workers:
            self.run(worker.beat())
            self.run(worker.obey())
        self._forget_dismissed()
        for worker in self.workers:
            worker.generate(n)
            if not self._has_late(worker):
                self.run(worker.flush())
        self.turn()

    @precondition(lambda self: self.workers)
    @rule(data=st.data(), n=st.integers(1, 9), flush=st.sampled_from(["no", "twice", "late"]))
    def one_works_badly(self, data: st.DataObject, n: int, flush: str) -> None:
        """Tokens are made and not flushed, or flushed twice, or stay on the way for long."""
        worker = data.draw(st.sampled_from(self.workers))
        self.run(worker.obey())
        self._forget_dismissed()
        worker.generate(n)
        if flush == "late" or self._has_late(worker):
            if frame := worker.frame():
                self.late.append((worker, frame))
        elif flush == "twice":
            self.run(worker.flush(copies=2))

    def _has_late(self, worker: SimWorker) -> bool:
        return any(other is worker for other, _ in self.late)

    @precondition(lambda self: self.late)
    @rule()
    def late_frames_arrive(self) -> None:
        """In order for each worker, but long after: perhaps when it is dead already."""
        for _, frame in self.late:
            self.run(self.bus.append(names.TOKEN_LOG, frame))
        self.late.clear()

    @precondition(lambda self: self.workers)
    @rule(data=st.data())
    def kill(self, data: st.DataObject) -> None:
        """SIGKILL: what was not flushed is gone, and nobody is told."""
        self.workers.remove(data.draw(st.sampled_from(self.workers)))

    @precondition(lambda self: self.workers)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        worker = data.draw(st.sampled_from(self.workers))
        self.late_frames_arrive()
        self.run(worker.leave())
        self.workers.remove(worker)

    @rule(seconds=st.sampled_from([0.1, 1.0, 3.0]), beating=st.booleans())
    def time_passes(self, seconds: float, beating: bool) -> None:
        """Without beats, workers that live are taken for dead: their later frames must not count."""
        self.clock += seconds
        if beating:
            for worker in self.workers:
                self.run(worker.beat())

    def _forget_dismissed(self) -> None:
        self.workers = [worker for worker in self.workers if not worker.dismissed]

    # --- the manager ---

    @rule()
    def manager_works(self) -> None:
        self.turn()

    @rule()
    def manager_is_killed(self) -> None:
        self.manager = self._new_manager()

    @rule()
    def reply_is_lost(self) -> None:
        self.bus.lose_next_reply = True
        self.turn()
        self.bus.lose_next_reply = False

    # --- what must hold ---

    @invariant()
    def delivered_at_most_once(self) -> None:
        ids = [m.sample for m in self._finished()]
        assert len(ids) == len(set(ids)), "a sample was delivered twice"

    def _finished(self) -> list[SampleFinished | SampleDropped]:
        entries = self.run(read_all(self.bus, names.rollouts_finished(JOB)))
        return [e.message for e in entries if isinstance(e.message, SampleFinished | SampleDropped)]

    def teardown(self) -> None:
        """Let a good worker come, and everything must be delivered, whole."""
        if self.requested:
            self.workers.clear()
            self.clock += 10.0
            self.late_frames_arrive()
            self.join(reserved=False)
            self.turn()
            for _ in range(60):
                if not self.manager.world.ledger.samples and self.manager.recovered:
                    break
                self.clock += 0.5
                for worker in self.workers:
                    self.run(worker.beat())
                self.turn()
                for worker in self.workers:
                    self.run(worker.obey())
                    worker.generate(2)
                    self.run(worker.flush())
            self._check_everything_delivered()

    def _check_everything_delivered(self) -> None:
        wanted = {r.group + i: r for r in self.requested for i in range(r.n)}
        finished = self._finished()
        assert {m.sample for m in finished} == set(wanted), "a sample is missing"
        for message in finished:
            assert isinstance(message, SampleFinished)
            tokens = ints(message.tokens, I32)
            assert len(tokens) == wanted[message.sample].sampling.max_tokens
            check_completion(tokens, message.spans)
        audit = Audit.model_validate_json(self.run(self.bus.hash_get(names.job_audit(JOB), "counters")) or "{}")
        made_again = sum(audit.tokens_made_again.values())
        assert audit.requested == audit.delivered == len(wanted)
        assert audit.tokens_delivered == sum(len(ints(m.tokens, I32)) for m in finished)
        assert audit.tokens_generated == audit.tokens_delivered + made_again
        assert not self.manager.world.ledger.samples
        assert not self.manager.world.live


TestSpot = pytest.mark.timeout(600)(Spot.TestCase)  # finding is quick, shrinking what was found is not
TestSpot.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
