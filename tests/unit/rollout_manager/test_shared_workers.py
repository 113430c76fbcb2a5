"""Jobs with adapters of the same model share workers: what each worker serves, and which samples it gets."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from rlboost.services.rollout_manager.domain.apply_messages import apply_message
from rlboost.services.rollout_manager.domain.decide import decide
from rlboost.services.rollout_manager.domain.effects import Effect, Now, Send
from rlboost.services.rollout_manager.domain.money import charge_jobs
from rlboost.services.rollout_manager.domain.world import World
from rlboost.services.rollout_manager.loop import Manager
from rlboost.services.rollout_worker.domain.session import PullWeights, Session
from rlboost.shared.ids import WeightsRef
from rlboost.shared.messages import Alongside, Assign, JobReport, Message, UseVersion, WorkerEvent
from rlboost.shared.streams import names
from tests.support.builders import (
    group_requested,
    heartbeat,
    job_created,
    job_spec,
    weights_committed,
    worker_joined,
)
from tests.support.memory_bus import MemoryBus

JOBS = ("a", "b", "c")


class Shared:
    """A manager's world with running jobs on one model, and workers that serve what they are commanded to."""

    def __init__(self, *jobs: str, slots: int = 4, max_adapters: int = 8, **shares: float) -> None:
        self.world, self.now_s, self.entries = World(lease_s=60.0), 1.0, 0
        self.numbers = {job: number for number, job in enumerate(jobs, 1)}
        self.slots, self.max_adapters = slots, max_adapters
        for job, number in self.numbers.items():
            spec = job_spec(elastic={"share": shares.get(job, 1.0)})
            self.apply(job_created(job, number, spec), JobReport(job_id=job, state="running", step=0))

    def apply(self, *messages: Message) -> list[Effect]:
        effects: list[Effect] = []
        for message in messages:
            self.entries += 1
            effects += apply_message(self.world, message, f"{self.entries}-0", self.now)
        return effects

    @property
    def now(self) -> Now:
        return Now(self.now_s, 1000.0 + self.now_s)

    def commit(self, *jobs: str, version: int = 0, base: str = "base") -> None:
        self.apply(*(weights_committed(job, version, base) for job in jobs))

    def join(self, *workers: str) -> None:
        self.apply(*(worker_joined(worker, slots=self.slots) for worker in workers))

    def beat(self, worker: str, job: str, version: int = 0, **alongside: int) -> None:
        pairs = tuple(alongside.items())
        fields: dict[str, Any] = {"job_id": job, "version": version, "alongside": pairs}
        self.apply(heartbeat(worker, max_adapters=self.max_adapters, **fields))

    def request(self, job: str, n: int, *, number: int = 0, step: int = 0) -> None:
        self.apply(group_requested(number, job_id=job, job_no=self.numbers[job], step=step, n=n))

    def decide(self) -> list[Effect]:
        self.now_s += 0.3
        return decide(self.world, self.now, [])

    def uses(self) -> list[UseVersion]:
        sent = (effect.message for effect in self.decide() if isinstance(effect, Send))
        return [message for message in sent if isinstance(message, UseVersion)]

    def assigned(self) -> list[tuple[str, int, int]]:
        """Decide; return the job, version and number of samples of each assignment."""
        sent = (effect.message for effect in self.decide() if isinstance(effect, Send))
        found = (message for message in sent if isinstance(message, Assign))
        return [(message.job_id, message.version, len(message.samples)) for message in found]


def use(job: str, version: int = 0, **alongside: int) -> UseVersion:
    others = tuple(Alongside(job_id=other, version=number) for other, number in alongside.items())
    return UseVersion(job_id=job, version=version, alongside=others)


@pytest.fixture
def shared() -> Shared:
    """One worker that serves three jobs."""
    shared = Shared(*JOBS)
    shared.join("w")
    shared.commit(*JOBS)
    assert shared.uses() == [use("a")]
    shared.beat("w", "a")
    assert shared.uses() == [use("a", b=0, c=0)]
    shared.beat("w", "a", b=0, c=0)
    assert shared.uses() == []
    return shared


def test_samples_of_all_jobs_go_to_a_worker_that_serves_them(shared: Shared) -> None:
    for job in JOBS:
        shared.request(job, 1)
    assert sorted(shared.assigned()) == [("a", 0, 1), ("b", 0, 1), ("c", 0, 1)]
    assert shared.uses() == []


def test_new_version_of_one_job_holds_up_that_job_alone(shared: Shared) -> None:
    shared.commit("b", version=1)
    assert shared.uses() == [use("a", b=1, c=0)]
    shared.request("b", 1, step=1)
    shared.request("c", 1)
    assert shared.assigned() == [("c", 0, 1)]
    shared.beat("w", "a", b=1, c=0)
    assert shared.assigned() == [("b", 1, 1)]


def test_first_job_that_ends_hands_the_worker_to_one_that_it_serves(shared: Shared) -> None:
    shared.apply(JobReport(job_id="a", state="completed", step=9))
    assert shared.uses() == [use("b", c=0)]


def test_another_model_and_an_unknown_one_are_not_shared() -> None:
    shared = Shared(*JOBS)
    shared.join("w")
    shared.commit("a")
    shared.commit("b", base="another")
    shared.commit("c", base="")
    assert shared.uses() == [use("a")]
    shared.beat("w", "a")
    assert shared.uses() == []


def test_engine_that_merges_adapters_is_switched_as_before() -> None:
    shared = Shared("a", "b", max_adapters=0)
    shared.join("w")
    shared.commit("a", "b")
    shared.uses()
    shared.beat("w", "a")
    shared.request("b", 1)
    assert shared.uses() == [use("b")]


def test_worker_without_an_engine_is_not_switched_between_jobs_on_one_model(shared: Shared) -> None:
    shared.join("new")
    shared.apply(heartbeat("new", state="joining", job_id="", version=-1))
    for job in JOBS:
        shared.request(job, 9)
    for _ in range(8):
        assert {message.job_id for message in shared.uses()} <= {"a"}


def test_job_that_a_worker_cannot_share_gets_it_by_a_switch(shared: Shared) -> None:
    shared.apply(WorkerEvent(worker="w", job_id="c", kind="adapter_not_shared", at=1.0, fields={"version": 0}))
    assert shared.uses() == [use("a", b=0)]
    shared.beat("w", "a", b=0)
    shared.request("c", 1)
    assert shared.uses()[0] == use("c")


def test_next_version_of_a_job_that_was_not_shared_is_tried_unless_none_can_be(shared: Shared) -> None:
    for job, more in (("b", {}), ("c", {"lasting": 1.0})):
        fields = {"version": 0, **more}
        shared.apply(WorkerEvent(worker="w", job_id=job, kind="adapter_not_shared", at=1.0, fields=fields))
    assert shared.uses() == [use("a")]
    shared.beat("w", "a")
    shared.commit("b", "c", version=1)
    assert shared.uses() == [use("a", b=1)]


def test_first_job_whose_version_is_unavailable_makes_another_the_first(shared: Shared) -> None:
    shared.commit("a", version=1)
    assert shared.uses() == [use("a", 1, b=0, c=0)]
    shared.apply(WorkerEvent(worker="w", job_id="a", kind="weights_unavailable", at=1.0, fields={"version": 1}))
    (used,) = shared.uses()
    assert (used.job_id, {one.job_id: one.version for one in used.alongside}) == ("b", {"a": 1, "c": 0})
    shared.beat("w", "b", c=0)
    shared.request("c", 1)
    assert shared.assigned() == [("c", 0, 1)]
    assert shared.uses() == []


def test_reallocated_worker_is_commanded_all_jobs_of_its_new_model_at_once() -> None:
    shared = Shared("d", "a", "b")
    shared.join("w", "x")
    shared.commit("d", base="another")
    for worker in ("w", "x"):
        shared.beat(worker, "d")
    shared.uses()
    shared.commit("a", "b")
    for job in ("a", "b"):
        shared.request(job, 9)
    assert shared.uses() == [use("a", b=0)] * 2


@pytest.mark.parametrize(("share", "expected"), [(1.0, {"a": 4, "b": 4}), (3.0, {"a": 6, "b": 2})])
def test_slots_of_a_shared_worker_are_divided_by_share(share: float, expected: dict[str, int]) -> None:
    shared = Shared("a", "b", slots=8, a=share)
    shared.join("w")
    shared.commit("a", "b")
    shared.uses()
    shared.beat("w", "a")
    shared.uses()
    shared.beat("w", "a", b=0)
    worker = shared.world.fleet.workers["w"]
    worker.trust.allowance, worker.batch_cap, worker.headroom = 8, 8, 0
    for job in ("a", "b"):
        shared.request(job, 20)
    got: Counter[str] = Counter()
    for job, _, n in shared.assigned():
        got[job] += n
    assert got == expected


def test_slots_that_a_job_does_not_need_are_the_others(shared: Shared) -> None:
    worker = shared.world.fleet.workers["w"]
    worker.trust.allowance, worker.batch_cap, worker.headroom = 8, 8, 0
    shared.request("a", 20)
    shared.request("b", 1)
    got: Counter[str] = Counter()
    for job, _, n in shared.assigned():
        got[job] += n
    assert got == {"a": 7, "b": 1}


def test_job_without_samples_makes_room_for_one_with_samples() -> None:
    shared = Shared("a", "b", "c", "d", max_adapters=3)
    shared.join("w")
    shared.commit("a", "b", "c", "d")
    shared.uses()
    shared.beat("w", "a")
    assert shared.uses() == [use("a", b=0, c=0)]
    shared.beat("w", "a", b=0, c=0)
    shared.request("c", 1)
    shared.request("d", 1)
    assert use("a", c=0, d=0) in [effect.message for effect in shared.decide() if isinstance(effect, Send)]


def test_cost_of_a_shared_worker_is_divided_among_its_jobs(shared: Shared) -> None:
    worker = shared.world.fleet.workers["w"]
    worker.price_per_hour = 3600.0
    shared.now_s += 5.0  # longer than between two charges
    charge_jobs(shared.world.jobs, shared.world.fleet, shared.world.periodic, shared.now)
    before = [shared.world.jobs[job].audit.cost.dollars for job in JOBS]
    shared.now_s += 30.0
    charge_jobs(shared.world.jobs, shared.world.fleet, shared.world.periodic, shared.now)
    after = [shared.world.jobs[job].audit.cost.dollars for job in JOBS]
    assert [end - start for start, end in zip(before, after, strict=True)] == pytest.approx([10.0] * 3)


def test_manager_and_worker_compute_the_same_digest(shared: Shared) -> None:
    session = Session("w")
    pulls = session.on_command(use("a", b=0, c=0))
    while pulls:
        (pull,) = pulls
        assert isinstance(pull, PullWeights)
        pulls = session.on_weights_loaded(WeightsRef(pull.job_id, pull.version))
    for job in JOBS:
        shared.request(job, 1)
    for effect in shared.decide():
        if isinstance(effect, Send):
            session.on_command(effect.message)
    assert len(session.held) == 3
    assert shared.world.fleet.workers["w"].command_digest() == session.command_digest()


async def test_next_manager_knows_which_jobs_have_the_same_model() -> None:
    now_s = 10_000.0

    def clock() -> Now:
        return Now(now_s, now_s)

    bus = MemoryBus(clock=lambda: now_s)
    for number, job in enumerate(JOBS, 1):
        await bus.append(names.JOB_COMMANDS, job_created(job, number))
        await bus.append(names.JOB_REPORTS, JobReport(job_id=job, state="running", step=0))
    bases = []
    for version in range(2):
        manager = Manager(bus, lease_s=2.0, redis_limit_s=9.0, clock=clock)
        assert await manager.try_lead()
        await manager.turn()
        if not version:
            for job in JOBS:
                await bus.append(names.WEIGHTS_COMMITTED, weights_committed(job, base="base"))
            await manager.turn()
        bases.append([job.progress.base for job in manager.world.jobs.active()])
        now_s += 100.0
    assert bases == [["base"] * 3] * 2
