"""What the manager decides once everything that was there to read has been read.

Called after every batch of messages and on every tick; deciding twice on the same world decides nothing the second
time.
"""

from __future__ import annotations

from collections.abc import Iterable

from services.rollout_manager.domain.actions import BurySample
from services.rollout_manager.domain.direct import activate, direct
from services.rollout_manager.domain.intake import lose_worker
from services.rollout_manager.domain.ledger import Sample
from services.rollout_manager.domain.placing import balance, place
from services.rollout_manager.domain.serving import NOBODY, Clients, serve
from services.rollout_manager.domain.steps import advance_window, begin_step
from services.rollout_manager.domain.world import Now, World
from shared.ids import SampleId, is_served


def decide(world: World, now: Now, dead: Iterable[str] = (), clients: Clients = NOBODY) -> None:
    """Act on the world as it stands.

    Args:
        world: changed in place; what is to be done is left in its actions.
        now: this moment.
        dead: suspects whose lease has run out.
        clients: who waits for samples of serving requests.

    """
    for worker_id in dead:
        if worker := world.fleet.workers.get(worker_id):
            lose_worker(world, worker, now)
    _finish(world, now)
    serve(world, clients, now)
    direct(world, now)
    for job in world.active_jobs():
        begin_step(world, job, now)
    activate(world)
    world.restless = world.resumed = False
    for job in world.active_jobs():
        advance_window(world, job, now)
    place(world, now)
    balance(world, now)


def _finish(world: World, now: Now) -> None:
    for sample_id in list(world.ledger.finished):
        sample = world.ledger.samples[sample_id]
        if world.is_aside(sample):
            continue
        if not is_served(sample_id):
            world.deliver(sample)
        elif sample.worker:
            world.orphan(sample)  # its worker has done its part; the client takes it when it likes
    for sample_id, reason in list(world.ledger.failed.items()):
        sample = world.ledger.samples[sample_id]
        if world.is_aside(sample):
            continue
        if sample.is_over_limit():
            _condemn(world, sample, f"failed {len(sample.failed_on)} times: {reason}", now)
        elif sample.worker:
            world.orphan(sample)


def _condemn(world: World, sample: Sample, reason: str, now: Now) -> None:
    """Drop a sample that fails wherever it runs, and keep it for people to look at."""
    where = f"{reason} (on {', '.join(sample.failed_on)})"
    world.actions.append(BurySample(sample.first_id, world.ledger.restated(sample), where))
    name, job_id = str(SampleId.unpack(sample.id)), sample.request.job_id
    world.tell("sample_failed", now, job_id, sample=name, reason=reason, workers=list(sample.failed_on))
    world.drop(sample, reason)
