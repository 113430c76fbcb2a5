"""Assigns queued samples to workers, and migrates running ones to balance the load."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rlboost.services.rollout_manager.domain.scheduling.candidates import (
    CandidatePool,
    admits,
    best_of,
    has_capacity,
    least_loaded,
)
from rlboost.services.rollout_manager.domain.scheduling.poison import worker_for_retry
from rlboost.services.rollout_manager.domain.scheduling.rebalance import RunningSample, WorkerLoad, select_migrations
from rlboost.services.rollout_manager.domain.scheduling.requirements import Requirement
from rlboost.services.rollout_manager.domain.token_log.sample import Sample
from rlboost.services.rollout_manager.domain.workers.kv_usage import tokens_of
from rlboost.services.rollout_manager.domain.workers.worker import Worker
from rlboost.services.rollout_manager.domain.world import Now, World
from rlboost.shared.ids import is_served
from rlboost.shared.messages import Assign, Assignment, Placed, Release
from rlboost.shared.wire.columns import U32, U64, pack

REBALANCE_EVERY_S = 0.2
"""How often loads are compared while no sample is queued."""
MAX_POSTPONED = 8
"""Samples that one turn postpones because only workers without capacity accept their length: each costs time."""
RELEASE_LIMIT_S = 5.0
"""How long a worker may take to release a sample before the sample is revoked."""


def place_queued(world: World, now: Now) -> None:
    """Assign queued samples to workers with capacity."""
    for requirement in world.queues.in_order():
        _place_queue(world, requirement, now)


def _place_queue(world: World, requirement: Requirement, now: Now) -> None:
    queue = world.queues[requirement]
    pools = world.candidates.matching(requirement)
    assigned: dict[str, list[Sample]] = {}
    postponed: list[Sample] = []
    n_too_long = 0
    while n_too_long < MAX_POSTPONED and (best := best_of(pools)) is not None:
        sample_id = queue.pop_next(world.is_queued)
        if sample_id is None:
            break
        sample = world.ledger.samples[sample_id]
        worker = _select_worker(world, requirement, sample, world.fleet.workers[best], pools)
        if worker is None:
            n_too_long += not sample.failed_on
            postponed.append(sample)
            continue
        # At once, so that a sample that was queued twice is assigned once.
        world.ledger.begin_attempt(sample, worker.id, sample.attempt + 1, sample.n_tokens, now.mono)
        assigned.setdefault(worker.id, []).append(sample)
        worker.add(sample)
        world.candidates.refresh()
    for sample in postponed:
        world.enqueue(sample)
    if not requirement.is_serving:
        _track_stall(world, requirement, stalled=not queue.empty and not any(pool.members for pool in pools), now=now)
    if queue.empty:
        del world.queues[requirement]
    for worker_id, samples in assigned.items():
        _send_assignments(world, world.fleet.workers[worker_id], samples, now)


def _select_worker(
    world: World, requirement: Requirement, sample: Sample, best: Worker, pools: Sequence[CandidatePool]
) -> Worker | None:
    """Return the worker for a sample, None to postpone it.

    A sample that no engine accepts goes to the best worker all the same: its engine reports the reason.
    """
    if not sample.failed_on:
        prefers = sample.request.preferred_worker
        worker = (_preferred(world, requirement, sample) if prefers else None) or best
        if admits(worker, sample):
            return worker
    members = [world.fleet.workers[i] for pool in pools for i in pool.members]
    admitting = [worker for worker in members if admits(worker, sample)]
    if sample.failed_on:
        return worker_for_retry(sample, admitting or members, world.ledger.samples)
    return least_loaded(filter(has_capacity, admitting)) if admitting else best


def _preferred(world: World, requirement: Requirement, sample: Sample) -> Worker | None:
    """Return the worker that a new sample prefers, if it is present and has capacity."""
    worker = world.fleet.workers.get(sample.request.preferred_worker)
    if worker is None or sample.attempt or not has_capacity(worker):
        return None
    return worker if requirement.is_met_by(worker) else None


def _track_stall(world: World, requirement: Requirement, *, stalled: bool, now: Now) -> None:
    progress = world.progress[requirement.job_id]
    if not stalled:
        progress.stalled_since_unix_s = None
    elif requirement.oldest_version <= progress.committed_version and progress.stalled_since_unix_s is None:
        progress.stalled_since_unix_s = now.wall


def _send_assignments(world: World, worker: Worker, samples: list[Sample], now: Now) -> None:
    """Record the attempts that begin on a worker, and command it to generate them."""
    world.outbox.record(
        Placed(
            worker=worker.id,
            samples=pack([sample.id for sample in samples], U64),
            attempts=pack([sample.attempt for sample in samples], U32),
            offsets=pack([sample.offset for sample in samples], U32),
        )
    )
    job_id = samples[0].request.job_id
    if migrated := [sample.offset for sample in samples if sample.attempt > 1]:
        worker.disturbed_at = now.mono
        n_migrated, tokens = len(migrated), sum(migrated)
        audit = world.audits[job_id]
        audit.migrations += n_migrated
        audit.tokens_saved += tokens
        world.emit_event("samples_migrated", now, job_id, worker=worker.id, samples=n_migrated, tokens=tokens)
    assignments = [_assignment(sample) for sample in samples]
    world.outbox.send(worker.id, Assign(job_id=job_id, version=worker.version, samples=assignments))
    window = world.progress[job_id].window
    if window is not None and not is_served(samples[0].id):
        window.on_placed(now.mono)


def _assignment(sample: Sample) -> Assignment:
    return Assignment(
        sample=sample.id,
        attempt=sample.attempt,
        prompt=sample.request.prompt,
        tokens=bytes(sample.tokens),
        sampling=sample.request.sampling,
        seed=(sample.request.seed + sample.id) & 0x7FFF_FFFF_FFFF_FFFF,
    )


# --- rebalancing ------------------------------------------------------------------------------------------------------


def rebalance(world: World, now: Now) -> None:
    """Reclaim samples that would end sooner on another worker (paper, algorithm 2, continuous balancing)."""
    if now.mono - world.periodic.rebalanced_at < REBALANCE_EVERY_S:
        return
    world.periodic.rebalanced_at = now.mono
    releasing = _revoke_overdue_releases(world, now)
    for (job_id, version), pool in world.candidates.by_serving().items():
        # Queued samples count in no load yet: they are placed first, then loads are compared again.
        queued = any(each.job_id == job_id and each.oldest_version <= version for each in world.queues)
        if queued or pool.is_balanced() or not releasing.isdisjoint(pool.members):
            continue
        workers = [world.fleet.workers[worker_id] for worker_id in sorted(pool.members)]
        if (job := world.jobs.get(job_id)) and job.spec.trainer.router_replay != "none":
            workers = [worker for worker in workers if worker.returns_routed_experts]
        loads = [_load_of(world, worker, now) for worker in workers]
        for worker_id, sample_ids in select_migrations([load for load in loads if load.profile.known]).items():
            reclaim(world, world.fleet.workers[worker_id], sample_ids, now)


def _load_of(world: World, worker: Worker, now: Now) -> WorkerLoad:
    return WorkerLoad(
        worker=worker.id,
        batch_cap=max(1, worker.batch_cap),
        load=len(worker.samples),
        tokens=worker.kv.held,
        profile=worker.profile if worker.profile.known else world.fleet.fallback_profile,
        speed=worker.speed,
        running=lambda: _running(world, worker, now),
    )


def _running(world: World, worker: Worker, now: Now) -> Iterable[RunningSample]:
    progress = world.progress.get(worker.job_id)
    if progress is None:
        return  # the worker still serves a job that has ended
    lengths = progress.lengths
    for sample_id in sorted(worker.samples):
        sample = world.ledger.samples[sample_id]
        if not sample.finish:
            yield RunningSample(
                id=sample_id,
                remaining_tokens=lengths.remaining_tokens(sample),
                tokens=tokens_of(sample),
                started=sample.n_tokens > 0,
                on_worker_s=now.mono - sample.placed_at,
            )


def reclaim(world: World, worker: Worker, sample_ids: list[int], now: Now) -> None:
    """Ask a worker to release samples; they are assigned to others once it has released them."""
    samples = [world.ledger.samples[i] for i in sample_ids]
    worker.release(sample_ids, now.mono)
    world.outbox.send(
        worker.id,
        Release(
            samples=pack([sample.id for sample in samples], U64),
            attempts=pack([sample.attempt for sample in samples], U32),
        ),
    )
    job_id, tokens = samples[0].request.job_id, sum(sample.n_tokens for sample in samples)
    world.emit_event("reclaim_requested", now, job_id, worker=worker.id, samples=len(samples), tokens=tokens)


def _revoke_overdue_releases(world: World, now: Now) -> set[str]:
    """Revoke samples that workers do not release in time; return the workers with releases that are not overdue."""
    releasing = set()
    for worker in world.fleet.workers.values():
        if not worker.releasing:
            continue
        for sample_id, since in list(worker.releasing.items()):
            if now.mono - since > RELEASE_LIMIT_S:
                sample = world.ledger.samples[sample_id]
                world.revoke(sample)
                world.unassign(sample)
        if worker.releasing:
            releasing.add(worker.id)
    return releasing
