"""What the manager does after long outages, and while Redis's clock is wrong."""

from __future__ import annotations

import pytest

from rlboost.services.rollout_manager.domain import decide as decisions
from rlboost.services.rollout_manager.domain.effects import Deliver, Now
from rlboost.services.rollout_manager.domain.workers import LONGEST_SILENCE_S
from rlboost.services.rollout_manager.domain.world import World
from rlboost.services.rollout_manager.loop import Manager
from rlboost.shared.messages import FINISH_STOP, SampleFinished
from rlboost.shared.streams import names
from tests.support.builders import group_id, group_requested, heartbeat, job_running, token_frame, worker_joined
from tests.support.memory_bus import MemoryBus
from tests.support.scheduler_turns import NOW, apply, prove
from tests.support.sim_worker import SimWorker

N_SAMPLES = 5


def test_samples_of_a_long_outage_are_delivered_in_several_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(lease_s=2.0)
    apply(world, *job_running(), worker_joined(slots=N_SAMPLES), heartbeat(), group_requested(n=N_SAMPLES))
    prove(world)
    decisions.decide(world, NOW)
    ids = [group_id() + i for i in range(N_SAMPLES)]
    apply(world, token_frame([(i, 1, 0, 2, 0, FINISH_STOP) for i in ids]))
    monkeypatch.setattr(decisions, "MAX_DELIVERED_BYTES", 20)  # a sample has 16
    delivered = []
    for _ in range(3):
        messages = [effect.message for effect in decisions.decide(world, NOW) if isinstance(effect, Deliver)]
        delivered.append([message.sample for message in messages if isinstance(message, SampleFinished)])
    assert [len(turn) for turn in delivered] == [2, 2, 1]
    assert sorted(sample for turn in delivered for sample in turn) == ids
    assert not world.ledger.samples


async def test_worker_that_died_before_redis_clock_stepped_back_is_lost() -> None:
    redis_clock = manager_clock = 10_000.0
    bus = MemoryBus(clock=lambda: redis_clock)
    manager = Manager(bus, lease_s=2.0, redis_limit_s=9.0, clock=lambda: Now(manager_clock, redis_clock))
    for message in job_running():
        stream = {"JobCommand": names.JOB_COMMANDS, "JobReport": names.JOB_REPORTS}
        await bus.append(stream.get(message.tag, names.WEIGHTS_COMMITTED), message)
    assert await manager.try_lead()
    await SimWorker(bus, "w1").join()
    await manager.turn()
    redis_clock -= 3600.0
    for _ in range(2):
        assert list(manager.world.fleet.workers) == ["w1"]
        step_s = LONGEST_SILENCE_S / 2 + 1
        redis_clock, manager_clock = redis_clock + step_s, manager_clock + step_s
        await manager.turn()
    assert not manager.world.fleet.workers
