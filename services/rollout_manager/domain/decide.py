"""What the manager decides once everything that was there to read has been read.

Called after every batch of messages and on every tick; deciding twice on the same world decides nothing the second
time.
"""

from __future__ import annotations

from collections.abc import Iterable

from services.rollout_manager.domain.direct import activate, direct
from services.rollout_manager.domain.intake import lose_worker
from services.rollout_manager.domain.ledger import FAILURE_LIMIT
from services.rollout_manager.domain.placing import balance, place
from services.rollout_manager.domain.steps import advance_window, begin_step
from services.rollout_manager.domain.world import Now, World


def decide(world: World, now: Now, dead: Iterable[str] = ()) -> None:
    """Act on the world as it stands.

    Args:
        world: changed in place; what is to be done is left in its actions.
        now: this moment.
        dead: suspects whose lease has run out.

    """
    for worker_id in dead:
        if worker := world.fleet.workers.get(worker_id):
            lose_worker(world, worker, now)
    _finish(world)
    direct(world, now)
    for job in world.active_jobs():
        begin_step(world, job, now)
    activate(world)
    world.restless = world.resumed = False
    for job in world.active_jobs():
        advance_window(world, job, now)
    place(world, now)
    balance(world, now)


def _finish(world: World) -> None:
    for sample_id in list(world.ledger.finished):
        world.deliver(world.ledger.samples[sample_id])
    for sample_id, reason in list(world.ledger.failed.items()):
        sample = world.ledger.samples[sample_id]
        if sample.failures >= FAILURE_LIMIT:
            world.drop(sample, f"failed {sample.failures} times: {reason}")
        elif sample.worker:
            world.orphan(sample)
