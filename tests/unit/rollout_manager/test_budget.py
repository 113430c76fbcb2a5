"""A job's budget: spot workers are drained before the job has cost `elastic.max_dollars`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlboost.services.rollout_manager.domain.apply_messages import apply_message
from rlboost.services.rollout_manager.domain.decide import decide
from rlboost.services.rollout_manager.domain.effects import Now, Send
from rlboost.services.rollout_manager.domain.wait_status import job_wait_status
from rlboost.services.rollout_manager.domain.world import World
from rlboost.shared.messages import Drain, UseVersion, WorkerLeft
from tests.support.builders import group_requested, heartbeat, job_running, job_spec, trainer_status, worker_joined
from tests.support.scheduler_turns import events_in

DRAIN_S = 10
"""A drained worker hands off and exits within this time (invariant 7)."""


@dataclass
class Budgeted:
    """A manager's world on a clock of whole seconds; workers exit `DRAIN_S` after they are told to drain."""

    world: World = field(default_factory=lambda: World(lease_s=1e9))
    at_s: float = 0.0
    drained_at: dict[str, float] = field(default_factory=dict)
    commands: list[Send] = field(default_factory=list)
    events: list[str] = field(default_factory=list)
    n_messages: int = 0

    @property
    def now(self) -> Now:
        return Now(self.at_s, 1000.0 + self.at_s)

    @property
    def dollars(self) -> float:
        return self.world.jobs["j"].audit.cost.dollars

    def take(self, *messages: Any) -> None:
        for message in messages:
            self.n_messages += 1
            apply_message(self.world, message, f"{self.n_messages}-0", self.now)

    def join(self, name: str, **fields: Any) -> None:
        self.take(worker_joined(name, **fields), heartbeat(name, state="joining", job_id="", version=-1))

    def second(self) -> None:
        self.at_s += 1.0
        for name in [name for name, at in self.drained_at.items() if self.at_s - at >= DRAIN_S]:
            del self.drained_at[name]
            self.take(WorkerLeft(worker=name, reason="drained", at=0.0))
        effects = decide(self.world, self.now)
        self.commands += [effect for effect in effects if isinstance(effect, Send)]
        self.events += [found.kind for _, found in events_in(effects)]
        for effect in effects:
            if isinstance(effect, Send) and isinstance(effect.message, Drain):
                self.drained_at[effect.worker] = self.at_s

    def told(self, worker: str) -> list[type]:
        return [type(sent.message) for sent in self.commands if sent.worker == worker]


def job_with_budget(max_dollars: float | None) -> Budgeted:
    budgeted = Budgeted()
    budgeted.take(*job_running(spec=job_spec(elastic={"max_dollars": max_dollars})))
    return budgeted


def test_spot_worker_is_drained_before_the_budget_is_spent() -> None:
    job = job_with_budget(max_dollars=2.0)
    job.join("spot", price_per_hour=36.0)
    job.join("own", role="reserved", price_per_hour=0.0)
    for _ in range(3600):
        job.second()
    assert job.told("spot") == [UseVersion, Drain]
    assert Drain not in job.told("own")
    assert 2.0 - 36.0 * 30 / 3600 <= job.dollars < 2.0
    assert job.events.count("budget_reached") == job.events.count("worker_drained") == 1


def test_trainer_counts_in_the_budget_and_in_what_it_still_pays_for() -> None:
    job = job_with_budget(max_dollars=2.0)
    job.world.jobs["j"].progress.on_trainer_status(trainer_status(price_per_hour=36.0), job.now.wall)
    job.join("spot", price_per_hour=36.0)
    while Drain not in job.told("spot"):
        job.second()
    assert 2.0 - 2 * 36.0 * 32 / 3600 <= job.dollars < 2.0 - 2 * 36.0 * 28 / 3600


def test_worker_without_a_budget_stays() -> None:
    job = job_with_budget(max_dollars=None)
    job.join("spot", price_per_hour=36.0)
    for _ in range(600):
        job.second()
    assert job.told("spot") == [UseVersion]


def test_worker_that_the_rest_of_a_budget_cannot_pay_stays_idle() -> None:
    job = job_with_budget(max_dollars=1.0)
    job.join("slow-start", price_per_hour=36.0, startup_s=90.0)
    for _ in range(2):
        job.second()
    assert job.told("slow-start") == []
    assert job.dollars == 0.0


def test_worker_that_a_supervisor_restarts_after_its_drain_is_left_alone() -> None:
    job = job_with_budget(max_dollars=1.0)
    job.join("spot", price_per_hour=36.0)
    for _ in range(120):
        job.second()
    assert job.told("spot") == [UseVersion, Drain]
    job.join("spot-again", price_per_hour=36.0)
    for _ in range(120):
        job.second()
    assert job.told("spot-again") == []


def test_startup_is_charged_once_even_to_a_worker_that_serves_a_second_version() -> None:
    job = job_with_budget(max_dollars=None)
    job.join("spot", price_per_hour=36.0, startup_s=100.0)
    for _ in range(2):
        job.second()
    assert job.dollars == pytest.approx(36.0 * 101 / 3600)


def test_worker_moves_to_a_job_that_has_a_budget_left() -> None:
    job = job_with_budget(max_dollars=1.0)
    job.join("spot", price_per_hour=36.0)
    for _ in range(10):
        job.second()
    job.take(*job_running("k", 2))
    for _ in range(300):
        job.second()
    assert job.told("spot") == [UseVersion, UseVersion]
    assert job.world.fleet.workers["spot"].job == "k"
    assert job.dollars < 1.0


def test_job_without_workers_names_its_budget_as_the_cause() -> None:
    job = job_with_budget(max_dollars=1.0)
    job.join("spot", price_per_hour=36.0)
    job.take(group_requested())
    for _ in range(120):
        job.second()
    assert "spot" not in job.world.fleet.workers
    job.world.jobs["j"].progress.on_trainer_status(trainer_status(), job.now.wall)
    wait = job_wait_status(job.world.jobs, job.world.fleet, job.world.jobs["j"])
    assert wait
    assert "elastic.max_dollars: 1)" in wait["because"]


@given(
    max_dollars=st.floats(0.1, 20.0),
    joins=st.lists(
        st.tuples(st.integers(0, 300), st.floats(0.0, 100.0), st.floats(0.0, 120.0)), min_size=1, max_size=8
    ),
)
def test_no_fleet_passes_a_budget(max_dollars: float, joins: list[tuple[int, float, float]]) -> None:
    job = job_with_budget(max_dollars)
    for second in range(600):
        for number, (at_s, price, startup_s) in enumerate(joins):
            if at_s == second:
                job.join(f"w{number}", price_per_hour=price, startup_s=startup_s)
        job.second()
        assert job.dollars <= max_dollars
