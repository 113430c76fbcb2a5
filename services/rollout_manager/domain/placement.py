"""Assigns queued samples to workers, and migrates running ones to balance the load."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence

from rlboost.services.rollout_manager.domain.candidates import (
    Candidates,
    RunningSample,
    WorkerLoad,
    admits,
    has_capacity,
    least_loaded,
    select_migrations,
    supports,
    worker_for_retry,
)
from rlboost.services.rollout_manager.domain.effects import Effect, Now, Record, Send, event
from rlboost.services.rollout_manager.domain.jobs import Jobs
from rlboost.services.rollout_manager.domain.measurements import tokens_of
from rlboost.services.rollout_manager.domain.queue import Queues, Requirement, unassign
from rlboost.services.rollout_manager.domain.tokens import Sample
from rlboost.services.rollout_manager.domain.workers import Fleet, Serving, Worker
from rlboost.services.rollout_manager.domain.world import World
from rlboost.shared.ids import is_served
from rlboost.shared.messages import SAMPLING_OPTIONS, Assign, Assignment, Placed, Release
from rlboost.shared.wire import U32, U64, pack

REBALANCE_EVERY_S = 0.2
"""How often loads are compared while no sample is queued."""
MAX_POSTPONED = 8
"""Samples that one turn postpones because only workers without capacity accept their length: each costs time."""
RELEASE_LIMIT_S = 5.0
"""How long a worker may take to release a sample before the sample is revoked."""


def place_queued(world: World, now: Now) -> list[Effect]:
    """Assign queued samples to workers with capacity."""
    effects: list[Effect] = []
    if limits := fair_limits(world):
        effects += _place_in_order(world, now, limits)
    return effects + _place_in_order(world, now, {})  # what no job's share takes is anyone's


def _place_in_order(world: World, now: Now, limits: dict[str, float]) -> list[Effect]:
    effects: list[Effect] = []
    for requirement in world.queues.in_order():
        job_id = requirement.job_id
        for worker, samples in _place_queue(world, requirement, now, limits.get(job_id, math.inf)):
            effects += _send_assignments(world.jobs, worker, samples, now)
            if job_id in limits:
                limits[job_id] -= len(samples)
    return effects


def fair_limits(world: World) -> dict[str, float]:
    """Return how many more samples each job may get that shares workers with others, until each has its fair share.

    A job's share of the slots of the workers that serve it is in proportion to its weight, among the jobs there that
    have samples in flight. A job that is alone on its workers has no limit.
    """
    limits: dict[str, float] = {}
    shared = [worker for worker in world.fleet.workers.values() if worker.assigned_alongside]
    if not shared or not world.queues:
        return limits
    in_flight = {requirement.job_id for requirement in world.queues.in_flight.by_requirement}
    for worker in shared:
        jobs = [job for job_id in worker.jobs if job_id in in_flight and (job := world.jobs.get_active(job_id))]
        if len(jobs) < 2:
            continue
        weight = sum(job.record.spec.elastic.share for job in jobs)
        held = Counter(sample.request.job_id for sample in worker.samples.values())
        for job in jobs:
            share = worker.sample_limit * job.record.spec.elastic.share / weight
            limits[job.id] = limits.get(job.id, 0.0) + share - held[job.id]
    return limits


def _place_queue(world: World, requirement: Requirement, now: Now, limit: float) -> list[tuple[Worker, list[Sample]]]:
    """Assign up to `limit` queued samples of a requirement; return the workers with the samples that each got."""
    queue = world.queues[requirement]
    workers = (worker for worker in world.fleet.workers.values() if requirement.is_met_by(worker))
    candidates = Candidates(workers, world.fleet.fallback_profile)
    assigned: dict[str, list[Sample]] = {}
    postponed: list[Sample] = []
    n_too_long = n_assigned = 0
    while n_assigned < limit and n_too_long < MAX_POSTPONED and (best := candidates.best()) is not None:
        sample_id = queue.pop_next(world.ledger.is_queued)
        if sample_id is None:
            break
        sample = world.ledger.samples[sample_id]
        worker = _select_worker(world.fleet, requirement, sample, best, candidates.members)
        if worker is None:
            n_too_long += not sample.failed_on
            postponed.append(sample)
            continue
        # At once, so that a sample that was queued twice is assigned once.
        world.ledger.begin_attempt(sample, worker.id, sample.attempt + 1, sample.n_tokens, now.mono)
        assigned.setdefault(worker.id, []).append(sample)
        n_assigned += 1
        worker.add(sample)
    for sample in postponed:
        world.queues.add(sample)
    if not requirement.is_serving:
        stalled = not queue.empty and not candidates.members
        _track_stall(world.jobs, requirement, stalled=stalled, now=now)
    if queue.empty:
        del world.queues[requirement]
    return [(world.fleet.workers[worker_id], samples) for worker_id, samples in assigned.items()]


def _select_worker(
    fleet: Fleet, requirement: Requirement, sample: Sample, best: Worker, members: Sequence[Worker]
) -> Worker | None:
    """Return the worker for a sample, None to postpone it.

    A sample that no engine accepts goes to the best worker all the same: its engine reports the reason. A client's
    waits for a worker that supports its options.
    """
    if not sample.failed_on:
        prefers = sample.request.preferred_worker
        worker = (_preferred(fleet, requirement, sample) if prefers else None) or best
        if worker.id == sample.taken_from:
            worker = _another(members, worker, sample)
        if admits(worker, sample):
            return worker
    if is_served(sample.id):
        members = [worker for worker in members if supports(worker, sample)]
    admitting = [worker for worker in members if admits(worker, sample)]
    if sample.failed_on:
        return worker_for_retry(sample, admitting or members)
    if not admitting:
        return best if best in members else least_loaded(members)
    return least_loaded(filter(has_capacity, admitting))


def _another(members: Sequence[Worker], worker: Worker, sample: Sample) -> Worker:
    """Return another worker than the one that held the sample without generating it, if another one can take it."""
    others = (each for each in members if each is not worker and has_capacity(each) and admits(each, sample))
    return least_loaded(others) or worker


def _preferred(fleet: Fleet, requirement: Requirement, sample: Sample) -> Worker | None:
    """Return the worker that a new sample prefers, if it is present and has capacity."""
    worker = fleet.workers.get(sample.request.preferred_worker)
    if worker is None or sample.attempt or not has_capacity(worker):
        return None
    return worker if requirement.is_met_by(worker) else None


def _track_stall(jobs: Jobs, requirement: Requirement, *, stalled: bool, now: Now) -> None:
    progress = jobs[requirement.job_id].progress
    if not stalled:
        progress.stalled_since_unix_s = None
    elif requirement.oldest_version <= progress.committed_version and progress.stalled_since_unix_s is None:
        progress.stalled_since_unix_s = now.wall


def _send_assignments(jobs: Jobs, worker: Worker, samples: list[Sample], now: Now) -> list[Effect]:
    """Record the attempts that begin on a worker, and command it to generate them."""
    placed = Placed(
        worker=worker.id,
        samples=pack([sample.id for sample in samples], U64),
        attempts=pack([sample.attempt for sample in samples], U32),
        offsets=pack([sample.offset for sample in samples], U32),
    )
    effects: list[Effect] = [Record(placed)]
    job_id = samples[0].request.job_id
    if migrated := [sample.offset for sample in samples if sample.attempt > 1]:
        worker.disturbed_at = now.mono
        n_migrated, tokens = len(migrated), sum(migrated)
        audit = jobs[job_id].audit
        audit.migrations += n_migrated
        audit.tokens_saved += tokens
        effects.append(event("samples_migrated", now, job_id, worker=worker.id, samples=n_migrated, tokens=tokens))
    assignments = [_assignment(sample) for sample in samples]
    version = worker.serving_version(job_id)
    assert version is not None, "it met the requirement"
    effects.append(Send(worker.id, Assign(job_id=job_id, version=version, samples=assignments)))
    window = jobs[job_id].progress.window
    if window is not None and not is_served(samples[0].id):
        window.on_placed(now.mono)
    return effects


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


def rebalance(world: World, now: Now) -> list[Effect]:
    """Reclaim samples that would end sooner on another worker (paper, algorithm 2, continuous balancing)."""
    if now.mono - world.periodic.rebalanced_at < REBALANCE_EVERY_S:
        return []
    world.periodic.rebalanced_at = now.mono
    effects = _revoke_overdue_releases(world.fleet, world.queues, now)
    by_serving: dict[tuple[Serving, ...], list[Worker]] = {}
    for worker in world.fleet.workers.values():
        if worker.generates:
            by_serving.setdefault(worker.serving(), []).append(worker)
    for serving, workers in sorted(by_serving.items()):
        # Queued samples count in no load yet: they are placed first, then loads are compared again.
        versions = dict(serving)
        queued = any(each.oldest_version <= versions.get(each.job_id, -1) for each in world.queues)
        if queued or any(worker.releasing for worker in workers):
            continue
        specs = [job.record.spec for job_id, _ in serving if (job := world.jobs.get(job_id))]
        replays = any(spec.trainer.router_replay != "none" for spec in specs)
        options = {name for spec in specs for name in SAMPLING_OPTIONS if getattr(spec.sampling, name, None)}
        options |= {"batch_invariant"} if any(spec.trainer.deterministic for spec in specs) else set()
        able = [
            worker
            for worker in workers
            if (worker.returns_routed_experts or not replays) and options <= worker.sampling_options
        ]
        loads = [_load_of(world.jobs, world.fleet, worker, now) for worker in able]
        for worker_id, sample_ids in select_migrations([load for load in loads if load.profile.known]).items():
            worker = world.fleet.workers[worker_id]
            effects += reclaim(worker, [worker.samples[i] for i in sample_ids], now)
    return effects


def _load_of(jobs: Jobs, fleet: Fleet, worker: Worker, now: Now) -> WorkerLoad:
    return WorkerLoad(
        worker=worker.id,
        batch_cap=max(1, worker.batch_cap),
        limit=worker.trust.allowance,
        load=len(worker.samples),
        tokens=worker.kv.held,
        profile=worker.profile if worker.profile.known else fleet.fallback_profile,
        speed=worker.speed,
        running=lambda: _running(jobs, worker, now),
    )


def _running(jobs: Jobs, worker: Worker, now: Now) -> Iterable[RunningSample]:
    served = {job_id for job_id, _ in worker.serving()}
    for sample in worker.in_order():
        job = jobs.get_active(sample.request.job_id) if sample.request.job_id in served else None
        if job is None:
            continue  # the worker still serves a job that has ended, or will not serve this one any more
        if not sample.finish and not sample.request.sampling.grammar:  # few engines continue one
            yield RunningSample(
                id=sample.id,
                remaining_tokens=job.progress.lengths.remaining_tokens(sample),
                tokens=tokens_of(sample),
                started=sample.n_tokens > 0,
                on_worker_s=now.mono - sample.placed_at,
            )


def reclaim(worker: Worker, samples: Sequence[Sample], now: Now) -> list[Effect]:
    """Ask a worker to release samples; they are assigned to others once it has released them."""
    worker.release([sample.id for sample in samples], now.mono)
    release = Release(
        samples=pack([sample.id for sample in samples], U64), attempts=pack([sample.attempt for sample in samples], U32)
    )
    tokens: dict[str, list[int]] = {}
    for sample in samples:
        tokens.setdefault(sample.request.job_id, []).append(sample.n_tokens)
    requested = [
        event("reclaim_requested", now, job_id, worker=worker.id, samples=len(each), tokens=sum(each))
        for job_id, each in tokens.items()
    ]
    return [Send(worker.id, release), *requested]


def _revoke_overdue_releases(fleet: Fleet, queues: Queues, now: Now) -> list[Effect]:
    """Revoke samples that workers do not release in time."""
    effects: list[Effect] = []
    for worker in fleet.workers.values():
        for sample_id, since in list(worker.releasing.items()):
            if now.mono - since > RELEASE_LIMIT_S:
                sample = worker.samples[sample_id]
                effects += fleet.revoke(sample)
                unassign(fleet, queues, sample)
    return effects
