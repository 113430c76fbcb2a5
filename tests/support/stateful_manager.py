"""The state machine of the manager on spot workers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Coroutine
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rlboost.services.rollout_manager.domain.effects import Effect, Now
from rlboost.services.rollout_manager.domain.jobs import Audit
from rlboost.services.rollout_manager.domain.placement import reclaim
from rlboost.services.rollout_manager.domain.tokens import FAILURES_LIMIT, WORKERS_LIMIT
from rlboost.services.rollout_manager.domain.world import World
from rlboost.services.rollout_manager.leadership import manager_record
from rlboost.services.rollout_manager.loop import Manager
from rlboost.shared.errors import BusUnavailable, Fenced
from rlboost.shared.job.spec import parse, to_json
from rlboost.shared.messages import (
    GroupRequested,
    JobCommand,
    JobReport,
    Role,
    SampleDropped,
    SampleFinished,
    StepReport,
)
from rlboost.shared.streams import names
from rlboost.shared.streams.bus import HashSet, Trim, after
from rlboost.shared.wire import I32, ints
from tests.support.builders import group_requested, weights_committed
from tests.support.memory_bus import MemoryBus
from tests.support.sim_worker import SimWorker, check_completion
from tests.support.stream_entries import read_all
from tests.support.worker_manager import at_once

T = TypeVar("T")


JOBS = {1: "job-1", 2: "job-2"}


LEASE_S = 2.0


STALENESS = {1: 0, 2: 2}


SPEC = {"model": "m", "data": {"train": "t"}, "reward": {"function": "a:b"}, "steps": 99}


def reclaim_two(worker_id: str, world: World, now: Now) -> list[Effect]:
    worker = world.fleet.workers.get(worker_id)
    if worker is None or not (running := worker.generating()):
        return []
    return reclaim(worker, running[:2], now)


class Spot(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.clock = 100.0
        self.bus = MemoryBus(clock=lambda: self.clock)
        self.workers: list[SimWorker] = []
        self.late: list[tuple[SimWorker, Any]] = []
        self.requested: dict[int, list[GroupRequested]] = {1: [], 2: []}
        self.version = {1: 0, 2: 0}
        self.names = 0
        self.failures: dict[int, list[str]] = defaultdict(list)
        """Sample -> the workers that failed on it, or with it."""
        self.managers = [self._new_manager(n) for n in range(2)]

    def run(self, what: Coroutine[Any, Any, T]) -> T:
        """Run it to its end in one go, as the in-memory bus never waits."""
        return at_once(what)

    def _new_manager(self, n: int) -> Manager:
        clock = lambda: Now(self.clock, self.clock)  # noqa: E731 - it is one
        record = manager_record("h", n, "m")
        return Manager(self.bus, lease_s=LEASE_S, redis_limit_s=9.0, clock=clock, record=record, stall_limit_s=3.0)

    def step(self, manager: Manager) -> None:
        """What the loop of a manager does once."""
        try:
            if manager.recovered or self.run(manager.try_lead()):
                self.run(manager.turn())
        except (BusUnavailable, Fenced):
            manager.recovered = False

    def turn(self) -> None:
        for manager in self.managers:
            self.step(manager)

    @property
    def leader(self) -> Manager | None:
        return next((manager for manager in self.managers if manager.leads), None)

    @initialize(jobs=st.integers(1, 2))
    def start(self, jobs: int) -> None:
        self.jobs = list(JOBS)[:jobs]
        for no in self.jobs:
            spec = {**SPEC, "elastic": {"seeding": 1.0 if no == 1 else "auto", "max_staleness": STALENESS[no]}}
            create = JobCommand(
                command_id="c", action="create", job_id=JOBS[no], job_no=no, spec_json=to_json(parse(spec))
            )
            self.run(self.bus.append(names.JOB_COMMANDS, create))
            self.run(self.bus.append(names.JOB_REPORTS, JobReport(job_id=JOBS[no], state="running", step=0)))
            self._commit(no)
        self.turn()
        self.request(self.jobs[-1], n=3, max_tokens=12, ahead=0)
        self.join(reserved=False)
        self.join(reserved=True)
        self.all_is_well_for_a_moment(n=1, turn_first=True)

    # --- the trainers ---

    def _commit(self, no: int) -> None:
        self.run(self.bus.append(names.WEIGHTS_COMMITTED, weights_committed(JOBS[no], self.version[no])))

    @precondition(lambda self: sum(map(len, self.requested.values())) < 9)
    @rule(no=st.integers(1, 2), n=st.integers(1, 4), max_tokens=st.integers(1, 12), ahead=st.integers(0, 2))
    def request(self, no: int, n: int, max_tokens: int, ahead: int) -> None:
        """For the step that is trained, or with staleness for one of the next."""
        if no not in self.jobs:
            return
        step = self.version[no] + min(ahead, STALENESS[no])
        number, staleness = len(self.requested[no]), STALENESS[no]
        request = group_requested(
            number, job_id=JOBS[no], job_no=no, step=step, n=n, max_tokens=max_tokens, max_staleness=staleness
        )
        self.requested[no].append(request)
        self.run(self.bus.append(names.rollouts_requested(JOBS[no]), request))

    @precondition(lambda self: any(self.requested.values()))
    @rule(data=st.data())
    def request_again(self, data: st.DataObject) -> None:
        """A restarted trainer requests the same groups."""
        request = data.draw(st.sampled_from([r for rs in self.requested.values() for r in rs]))
        self.run(self.bus.append(names.rollouts_requested(request.job_id), request))

    @rule(no=st.integers(1, 2))
    def the_next_version_is_committed(self, no: int) -> None:
        """Once all samples of the step are delivered, as a trainer does."""
        expected = {r.group + i for r in self.requested[no] for i in range(r.n) if r.version <= self.version[no]}
        if no not in self.jobs or not expected <= {m.sample for m in self._finished(no)}:
            return
        report = StepReport(job_id=JOBS[no], step=self.version[no], metrics={}, wait_s=0.4, train_s=1.0)
        self.version[no] += 1
        self._commit(no)
        self.run(self.bus.append(names.JOB_REPORTS, report))

    # --- workers ---

    @precondition(lambda self: len(self.workers) < 4)
    @rule(reserved=st.booleans())
    def join(self, reserved: bool) -> None:
        self.names += 1
        role: Role = "reserved" if reserved else "preemptible"
        worker = SimWorker(self.bus, f"w{self.names}", role, lease_s=LEASE_S, kv_block_tokens=1, own_stream=True)
        self.workers.append(worker)
        self.run(self.bus.transact([HashSet(names.WORKER_IDENTITIES, {worker.id: f'{{"role": "{role}"}}'})]))
        self.run(worker.join())
        for manager in self.managers:
            if manager.recovered:
                self.run(manager.identities.load())  # as if the worker had joined over HTTP

    @rule(n=st.integers(1, 3), turn_first=st.booleans())
    def all_is_well_for_a_moment(self, n: int, turn_first: bool) -> None:
        """Every worker sends a heartbeat, handles commands, generates and flushes, and the managers turn."""
        self.clock += 0.1
        if turn_first:
            self.turn()
        for worker in self.workers:
            self.run(worker.send_heartbeat())
            if not self._has_late(worker):
                self.run(worker.execute_commands())
        self._forget_dismissed()
        for worker in self.workers:
            worker.generate(n)
            if not self._has_late(worker):
                self.run(worker.flush())
        self.turn()

    @precondition(lambda self: self.workers)
    @rule(data=st.data(), n=st.integers(1, 9), flush=st.sampled_from(["no", "twice", "late"]))
    def one_works_badly(self, data: st.DataObject, n: int, flush: str) -> None:
        """Tokens are generated and not flushed, flushed twice, or delayed."""
        worker = data.draw(st.sampled_from(self.workers))
        if not self._has_late(worker):
            self.run(worker.execute_commands())
        self._forget_dismissed()
        worker.generate(n)
        if flush == "late" or self._has_late(worker):
            if frame := worker.frame():
                self.late.append((worker, frame))
        elif flush == "twice":
            self.run(worker.flush(copies=2))

    @precondition(lambda self: self.workers)
    @rule(data=st.data())
    def redis_loses_unread_commands(self, data: st.DataObject) -> None:
        worker = data.draw(st.sampled_from(self.workers))
        commands = names.worker_commands(worker.id)
        if entries := self.run(read_all(self.bus, commands)):
            self.run(self.bus.transact([Trim(commands, after(entries[-1].id))]))

    def _has_late(self, worker: SimWorker) -> bool:
        return any(other is worker for other, _ in self.late)

    @precondition(lambda self: self.late)
    @rule()
    def late_frames_arrive(self) -> None:
        """In order for each worker, but late: the worker may be dead already."""
        for worker, frame in self.late:
            self.run(worker.report(frame))
        self.late.clear()

    @precondition(lambda self: self.workers)
    @rule(data=st.data())
    def kill(self, data: st.DataObject) -> None:
        """SIGKILL: tokens that were not flushed are lost, and no message is sent."""
        self.workers.remove(data.draw(st.sampled_from(self.workers)))

    @precondition(lambda self: self.workers)
    @rule(data=st.data(), seconds=st.integers(0, 8), beating=st.booleans())
    def one_takes_and_gives_nothing(self, data: st.DataObject, seconds: int, beating: bool) -> None:
        """It is silent from now on, or generates again; its samples may be taken from it meanwhile."""
        worker = data.draw(st.sampled_from(self.workers))
        worker.is_silent = not worker.is_silent
        for _ in range(seconds if beating else 0):
            self.clock += 0.9
            self.all_is_well_for_a_moment(n=1, turn_first=True)

    @precondition(lambda self: self.workers)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        worker = data.draw(st.sampled_from(self.workers))
        self.late_frames_arrive()
        self.run(worker.leave())
        self.workers.remove(worker)

    @precondition(lambda self: any(worker.held for worker in self.workers))
    @rule(data=st.data())
    def an_engine_dies(self, data: st.DataObject) -> None:
        """Any sample that it ran may be the cause."""
        worker = data.draw(st.sampled_from([worker for worker in self.workers if worker.held]))
        self.late_frames_arrive()
        self.run(worker.flush())
        for sample in worker.running():
            self.failures[sample].append(worker.id)
        self.run(worker.die())
        self.workers.remove(worker)

    @precondition(lambda self: any(worker.held for worker in self.workers))
    @rule(data=st.data(), moments=st.integers(1, 6))
    def engines_refuse_a_sample(self, data: st.DataObject, moments: int) -> None:
        """On every worker: the sample is dropped at the failure limit."""
        sample = data.draw(st.sampled_from(sorted({i for worker in self.workers for i in worker.held})))
        for _ in range(moments):
            for worker in [worker for worker in self.workers if sample in worker.held]:
                self.late_frames_arrive()
                self.run(worker.flush())
                if sample in worker.held:
                    self.failures[sample].append(worker.id)
                    self.run(worker.refuse(sample))
            self.all_is_well_for_a_moment(n=1, turn_first=True)

    @rule(seconds=st.sampled_from([0.1, 1.0, 3.0, 7.0]), beating=st.booleans())
    def time_passes(self, seconds: float, beating: bool) -> None:
        """Without heartbeats, live workers are declared dead: their later frames must not count."""
        self.clock += seconds
        if beating:
            for worker in self.workers:
                self.run(worker.send_heartbeat())

    def _forget_dismissed(self) -> None:
        known = self.run(self.bus.hash_all(names.WORKER_IDENTITIES))  # Redis rejects others
        self.workers = [worker for worker in self.workers if not worker.dismissed and worker.id in known]

    # --- the managers ---

    @rule()
    def managers_work(self) -> None:
        self.turn()

    @precondition(lambda self: self.leader)
    @rule(data=st.data())
    def samples_are_reclaimed(self, data: st.DataObject) -> None:
        """As rebalancing does, independent of the loads."""
        leader = self.leader
        assert leader is not None
        if owners := [w.id for w in leader.world.fleet.workers.values() if len(w.samples) > len(w.releasing)]:
            leader.at_next_turn(partial(reclaim_two, data.draw(st.sampled_from(owners))))

    @rule(n=st.integers(0, 1))
    def manager_is_killed(self, n: int) -> None:
        self.managers[n] = self._new_manager(n)

    @rule(n=st.integers(0, 1))
    def reply_is_lost(self, n: int) -> None:
        self.bus.lose_next_reply = True
        self.step(self.managers[n])
        self.bus.lose_next_reply = False

    @rule(n=st.integers(0, 1), seconds=st.sampled_from([0.5, 4.0, 40.0]))
    def manager_pauses_in_the_middle_of_a_commit(self, n: int, seconds: float) -> None:
        """Possibly long enough for the other one to take over."""

        def pause() -> None:
            self.clock += seconds
            for worker in self.workers:
                self.run(worker.send_heartbeat())
            self.step(self.managers[1 - n])
            self.step(self.managers[1 - n])

        self.bus.before_next_transaction = pause
        self.step(self.managers[n])
        self.bus.before_next_transaction = None

    # --- what must hold ---

    @invariant()
    def delivered_at_most_once(self) -> None:
        for no in JOBS:
            ids = [m.sample for m in self._finished(no)]
            assert len(ids) == len(set(ids)), "a sample was delivered twice"

    @invariant()
    def kv_usage_equals_a_recount(self) -> None:
        if self.leader is None:
            return
        world = self.leader.world
        for worker in world.fleet.workers.values():
            fresh = replace(worker.kv)
            fresh.recount(worker.samples.values())
            assert all(world.ledger.samples[i] is sample for i, sample in worker.samples.items())
            assert worker.kv == fresh

    def _finished(self, no: int) -> list[SampleFinished | SampleDropped]:
        entries = self.run(read_all(self.bus, names.rollouts_finished(JOBS[no])))
        return [e.message for e in entries if isinstance(e.message, SampleFinished | SampleDropped)]

    def teardown(self) -> None:
        """With working workers, every sample must be delivered completely."""
        if any(self.requested.values()):
            self.workers.clear()
            self.clock += 100.0
            self.late_frames_arrive()
            for _ in self.jobs:
                self.join(reserved=False)
            self.turn()
            self.turn()
            for _ in range(200):
                leader = self.leader
                if leader is not None and not leader.world.ledger.samples and not self._versions_lack():
                    break
                self.clock += 0.5
                for worker in self.workers:
                    self.run(worker.send_heartbeat())
                self.turn()
                for no in self.jobs:
                    if self._versions_lack():
                        self.the_next_version_is_committed(no)
                for worker in self.workers:
                    self.run(worker.execute_commands())
                    worker.generate(2)
                    self.run(worker.flush())
            for no in self.jobs:
                self._check_everything_delivered(no)
            assert sum(manager.leads for manager in self.managers) == 1

    def _versions_lack(self) -> bool:
        return any(r.version > self.version[no] for no, requests in self.requested.items() for r in requests)

    def _check_everything_delivered(self, no: int) -> None:
        expected = {r.group + i: r for r in self.requested[no] for i in range(r.n)}
        finished = self._finished(no)
        assert {m.sample for m in finished} == set(expected), "a sample is missing"
        for message in finished:
            if isinstance(message, SampleDropped):
                where = self.failures[message.sample]
                assert len(set(where)) >= WORKERS_LIMIT or len(where) >= FAILURES_LIMIT, (
                    "an innocent sample was dropped"
                )
                continue
            request, tokens = expected[message.sample], ints(message.tokens, I32)
            assert len(tokens) == request.sampling.max_tokens
            check_completion(tokens, message.spans)
            assert all(request.version - STALENESS[no] <= v <= request.version for _, v, _ in message.spans)
        audit = Audit.model_validate_json(self.run(self.bus.hash_get(names.job_audit(JOBS[no]), "counters")) or "{}")
        discarded = sum(audit.tokens_regenerated.values()) + audit.serving.tokens_delivered
        assert audit.serving.requested == audit.serving.delivered + sum(audit.serving.dropped.values())
        delivered = [message for message in finished if isinstance(message, SampleFinished)]
        assert audit.requested == len(expected)
        assert audit.delivered == len(delivered)
        assert sum(audit.dropped.values()) == len(finished) - len(delivered)
        assert audit.tokens_delivered == sum(len(ints(m.tokens, I32)) for m in delivered)
        assert audit.tokens_generated == audit.tokens_delivered + discarded
        leader = self.leader
        assert leader is not None
        assert not leader.world.ledger.samples
        assert not leader.world.queues.in_flight.by_requirement
        assert not leader.world.queues
