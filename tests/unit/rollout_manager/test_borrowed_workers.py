"""Spot workers that yield their device to a serving engine count as absent, keep their assignment, and come back."""

from __future__ import annotations

import pytest

from rlboost.services.rollout_manager.domain.apply_messages import apply_message
from rlboost.services.rollout_manager.domain.decide import decide
from rlboost.services.rollout_manager.domain.effects import Deliver, Effect, Now, Send
from rlboost.services.rollout_manager.domain.money import charge_jobs
from rlboost.services.rollout_manager.domain.wait_status import job_wait_status
from rlboost.services.rollout_manager.domain.world import World
from rlboost.shared.messages import Assign, JobReport, Message, Resume, SeedingReopened, Suspend, UseVersion
from rlboost.shared.wire import I32, ints
from tests.support.builders import (
    group_requested,
    heartbeat,
    job_created,
    token_frame,
    trainer_status,
    weights_committed,
    worker_joined,
)


class Scene:
    """A job, its workers, and a clock."""

    def __init__(self, *workers: str, reserved: bool = False) -> None:
        self.world, self._at, self._entries = World(lease_s=2.0), 1.0, 0
        self.apply(job_created(), JobReport(job_id="j", state="running", step=0))
        if reserved:
            self.apply(worker_joined("own", role="reserved"))
        for worker in workers:
            self.apply(worker_joined(worker, price_per_hour=2.0))
        self.apply(weights_committed(version=0))
        self.turn()
        for worker in (*workers, *(["own"] if reserved else [])):
            self.apply(heartbeat(worker))

    @property
    def now(self) -> Now:
        return Now(mono=self._at, wall=1000.0 + self._at)

    def apply(self, *messages: Message) -> list[Effect]:
        effects: list[Effect] = []
        for message in messages:
            self._entries += 1
            effects += apply_message(self.world, message, f"{self._entries}-0", self.now)
        return effects

    def turn(self, seconds: float = 1.0) -> list[Effect]:
        self._at += seconds
        return decide(self.world, self.now, [])

    def sent(self, effects: list[Effect], worker: str) -> list[Message]:
        return [each.message for each in effects if isinstance(each, Send) and each.worker == worker]


def yielded(worker: str) -> Message:
    return heartbeat(worker, state="suspended")


def test_samples_of_a_yielded_worker_go_on_elsewhere_with_their_tokens() -> None:
    scene = Scene("borrowed")
    scene.apply(group_requested(n=2))
    (first,) = [m for m in scene.sent(scene.turn(), "borrowed") if isinstance(m, Assign)]
    rows = [(sample.sample, 1, 0, 3, 0, 0) for sample in first.samples]
    scene.apply(token_frame(rows, worker="borrowed"))
    scene.apply(yielded("borrowed"), worker_joined("other"))
    assert not [m for m in scene.sent(scene.turn(), "borrowed") if isinstance(m, Assign)]
    scene.apply(heartbeat("other"))
    (again,) = [m for m in scene.sent(scene.turn(), "other") if isinstance(m, Assign)]
    assert [(one.attempt, len(ints(one.tokens, I32))) for one in again.samples] == [(2, 3), (2, 3)]
    audit = scene.world.jobs["j"].audit
    assert (audit.tokens_regenerated.total(), audit.preemptions.total()) == (0, 0)


def test_worker_gets_as_many_samples_as_it_has_seats() -> None:
    scene = Scene("serving")
    scene.apply(heartbeat("serving", slots=1), group_requested(n=3))
    (first,) = [m for m in scene.sent(scene.turn(), "serving") if isinstance(m, Assign)]
    assert len(first.samples) == 1
    scene.apply(heartbeat("serving"))
    (rest,) = [m for m in scene.sent(scene.turn(), "serving") if isinstance(m, Assign)]
    assert len(rest.samples) == 2


def test_yielded_worker_gets_new_versions_and_no_samples_until_it_is_back() -> None:
    scene = Scene("borrowed")
    scene.apply(yielded("borrowed"))
    scene.turn()
    scene.apply(weights_committed(version=1))
    assert scene.sent(scene.turn(), "borrowed") == [UseVersion(job_id="j", version=1)]
    scene.apply(group_requested(step=1, version=1))
    assert not scene.sent(scene.turn(), "borrowed")
    scene.apply(heartbeat("borrowed", version=1))
    assert [type(m) for m in scene.sent(scene.turn(), "borrowed")] == [Assign]


def test_reserved_workers_generate_while_all_others_yield() -> None:
    scene = Scene("borrowed", reserved=True)
    scene.apply(group_requested(n=4))
    scene.turn()
    window = scene.world.jobs["j"].progress.window
    assert window
    window.length_s = 0.0
    assert Suspend(step=0) in scene.sent(scene.turn(), "own")
    scene.apply(heartbeat("own", state="suspended"))
    scene.turn()
    assert window.phase == "ended"
    scene.apply(yielded("borrowed"))
    effects = scene.turn() + scene.turn()
    assert [each for each in effects if isinstance(each, Deliver) and isinstance(each.message, SeedingReopened)]
    assert Resume(step=0) in scene.sent(effects, "own")


def test_yielded_worker_is_not_in_the_size_of_the_fleet() -> None:
    scene = Scene("one", "two")
    scene.turn()
    assert scene.world.jobs["j"].progress.fleet.preemptible == 2
    scene.apply(yielded("two"))
    scene.turn()
    assert scene.world.jobs["j"].progress.fleet.preemptible == 1


def test_job_says_that_its_only_worker_yields() -> None:
    scene = Scene("borrowed")
    job = scene.world.jobs["j"]
    job.progress.on_trainer_status(trainer_status(), scene.now.wall)
    scene.apply(yielded("borrowed"), group_requested())
    scene.turn()
    wait = job_wait_status(scene.world.jobs, scene.world.fleet, job)
    assert wait
    assert wait["kind"] == "worker"
    assert "1 yielding to the serving engine beside it" in wait["because"]


def test_yielded_worker_costs_nothing() -> None:
    scene = Scene("borrowed")
    world, cost = scene.world, scene.world.jobs["j"].audit.cost
    scene.turn()
    before = cost.dollars
    scene.apply(yielded("borrowed"))
    scene.turn(1800.0)
    charge_jobs(world.jobs, world.fleet, world.periodic, scene.now)
    assert cost.dollars == pytest.approx(before)


def test_yield_of_a_worker_that_starts_is_no_part_of_its_startup() -> None:
    scene = Scene()
    scene.apply(worker_joined("borrowed"), heartbeat("borrowed", state="joining", job_id="", version=-1, at=1.0))
    scene.apply(yielded("borrowed"), heartbeat("borrowed", at=5000.0))
    assert scene.world.fleet.lifetimes["k"].startup_s == 0.0
