"""Takes the manager's decisions once all available messages are applied.

Called after every batch of messages and on every tick. A second call on an unchanged world decides nothing, unless the
first one left samples to deliver.
"""

from __future__ import annotations

from collections.abc import Iterable

from rlboost.services.rollout_manager.domain.allocation.allocate import activate_reserved, allocate
from rlboost.services.rollout_manager.domain.allocation.charging import charge_jobs
from rlboost.services.rollout_manager.domain.effects import FAILED, DeadLetterSample
from rlboost.services.rollout_manager.domain.sample_ends import deliver_to_trainer, drop
from rlboost.services.rollout_manager.domain.scheduler import place_queued, rebalance
from rlboost.services.rollout_manager.domain.serving import NO_CLIENTS, Clients, end_served_samples
from rlboost.services.rollout_manager.domain.step_windows import advance_window, begin_step
from rlboost.services.rollout_manager.domain.token_log.sample import Sample
from rlboost.services.rollout_manager.domain.worker_removal import dismiss_incompatible, dismiss_mismatched, lose_worker
from rlboost.services.rollout_manager.domain.world import Now, World
from rlboost.shared.ids import SampleId, is_served

MAX_DELIVERED_BYTES = 16 << 20
"""About how much one turn delivers: the samples of a long outage need several transactions, each of which Redis
executes well within the client's timeout.
"""


def decide(
    world: World,
    now: Now,
    dead: Iterable[str] = (),
    clients: Clients = NO_CLIENTS,
    mismatched: Iterable[str] = (),
) -> None:
    """Decide everything that is due.

    Args:
        world: changed in place; the effects are left in its outbox.
        now: this moment.
        dead: silent workers whose lease has run out.
        clients: the state of the clients of serving requests.
        mismatched: workers that have missed commands.

    """
    for worker_id in dead:
        if worker := world.fleet.workers.get(worker_id):
            lose_worker(world, worker, now)
    for worker_id in mismatched:
        if worker := world.fleet.workers.get(worker_id):
            dismiss_mismatched(world, worker, now)
    for worker in world.fleet.take_incompatible():
        if worker.id in world.fleet.workers:
            dismiss_incompatible(world, worker, now)
    _deliver_finished(world)
    _reject_workers(world, now)
    _retry_failed(world, now)
    end_served_samples(world, clients, now)
    allocate(world, now)
    for job in world.jobs.active():
        begin_step(world, job, now)  # may open a window, for which reserved workers are activated
    activate_reserved(world)
    world.periodic.decided_once = True
    for job in world.jobs.active():
        advance_window(world, job, now)
    place_queued(world, now)
    rebalance(world, now)
    charge_jobs(world, now)


def _deliver_finished(world: World) -> None:
    n_bytes = 0
    for sample_id in list(world.ledger.finished):
        sample = world.ledger.samples[sample_id]
        if world.is_quarantined(sample):
            continue
        if not is_served(sample_id):
            if n_bytes > MAX_DELIVERED_BYTES:
                continue
            n_bytes += len(sample.tokens) + len(sample.logprobs) + len(sample.routed_experts)
            deliver_to_trainer(world, sample)
        elif sample.worker:
            world.unassign(sample)  # the client reads the rest from the ledger


def _reject_workers(world: World, now: Now) -> None:
    """Take all samples from workers that send invalid tokens where others do not, and drain these workers."""
    for worker in world.fleet.take_rejected():
        reason = f"it sent invalid tokens for {worker.n_invalid_confirmed} samples that other workers completed"
        for sample_id in worker.samples:
            world.revoke(world.ledger.samples[sample_id])
        world.unassign_all(worker, now, "invalid")
        world.command_drain(worker, reason)
        world.emit_event("worker_rejected", now, worker=worker.id, job_id=worker.job, reason=reason)


def _retry_failed(world: World, now: Now) -> None:
    for sample_id, reason in list(world.ledger.failed.items()):
        sample = world.ledger.samples[sample_id]
        if world.is_quarantined(sample):
            continue
        if sample.is_over_limit():
            _dead_letter(world, sample, f"failed {len(sample.failed_on)} times: {reason}", now)
        elif sample.worker:
            world.unassign(sample)


def _dead_letter(world: World, sample: Sample, reason: str, now: Now) -> None:
    """Drop a sample that fails on every worker, and store it among the dead letters for inspection."""
    where = f"{reason} (on {', '.join(sample.failed_on)})"
    world.outbox.add(DeadLetterSample(sample.first_id, world.ledger.restatement_of(sample), where))
    name, job_id = str(SampleId.unpack(sample.id)), sample.request.job_id
    world.emit_event("sample_failed", now, job_id, sample=name, reason=reason, workers=list(sample.failed_on))
    drop(world, sample, FAILED, reason)
