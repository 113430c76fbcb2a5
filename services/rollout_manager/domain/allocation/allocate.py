"""Decides for each worker which job and version it serves, and for each reserved one whether it generates."""

from __future__ import annotations

from collections.abc import Hashable

from rlboost.services.rollout_manager.domain.allocation.charging import charge_startup, has_budget
from rlboost.services.rollout_manager.domain.jobs.progress import JobProgress
from rlboost.services.rollout_manager.domain.jobs.record import Job
from rlboost.services.rollout_manager.domain.scheduling.fair_share import AllocatedWorker, Demand, reallocate, shares_of
from rlboost.services.rollout_manager.domain.workers.fleet_counts import FleetCounts
from rlboost.services.rollout_manager.domain.workers.worker import Worker
from rlboost.services.rollout_manager.domain.world import Now, World
from rlboost.shared.messages import Resume, Suspend, UseVersion

REALLOCATE_EVERY_S = 0.25
"""How often workers are reallocated among several jobs."""


def allocate(world: World, now: Now) -> None:
    """Command workers which version to serve, and count the workers of each job.

    Reallocates workers among several jobs every `REALLOCATE_EVERY_S`. Does the rest only if its inputs have changed
    since the last time.
    """
    versions = {job.id: version for job in world.jobs.active() if (version := _version_to_serve(world, job.id)) >= 0}
    jobs = [world.jobs[job_id] for job_id in versions]
    payers = [job for job in jobs if not world.audits[job.id].cost.budget_reached]
    if len(payers) > 1 and now.mono - world.periodic.reallocated_at >= REALLOCATE_EVERY_S:
        world.periodic.reallocated_at = now.mono
        _reallocate(world, payers, versions, now)
    if _allocation_inputs(world) == world.periodic.allocated_for:
        return
    for worker in world.fleet.workers.values():
        if worker.state == "draining":
            continue
        if job := _select_job(world, worker, jobs if worker.reserved else payers):
            _use_version(world, worker, job, versions[job.id])
        elif jobs and worker.job and not worker.reserved:  # others stay idle: a supervisor would restart them
            world.drain(worker, now, "no job's budget pays for it any longer: see elastic.max_dollars")
    for job in world.jobs.active():
        world.progress[job.id].fleet = _count_workers(world, job)
    world.periodic.allocated_for = _allocation_inputs(world)  # read again: the commands are among the inputs


def _allocation_inputs(world: World) -> Hashable:
    """Return everything that the allocation of workers depends on, except for time."""
    jobs = tuple(
        (
            job.id,
            job.state,
            job.trainer,
            world.committed_version(job.id),
            world.audits[job.id].cost.budget_reached,
        )
        for job in world.jobs.active()
    )
    return world.fleet.revision, world.in_flight.revision, jobs


def activate_reserved(world: World) -> None:
    """Command reserved workers to resume or suspend generation, as the windows of their jobs require.

    Looks at the workers only if the fleet has changed since the last time, or the jobs whose windows use them.
    """
    generating = tuple(job.id for job in world.jobs.active() if _uses_reserved(world.progress[job.id]))
    inputs = world.fleet.revision, generating
    if inputs == world.periodic.activated_for:
        return
    for worker in world.fleet.workers.values():
        if worker.reserved and worker.has_reported and worker.state != "draining":
            _activate(world, worker, active=worker.job in generating)
    world.periodic.activated_for = inputs


def _uses_reserved(progress: JobProgress) -> bool:
    return progress.window is not None and progress.window.uses_reserved(progress.fleet.preemptible)


def _count_workers(world: World, job: Job) -> FleetCounts:
    workers = [w for w in world.fleet.workers.values() if w.job == job.id and w.state != "draining"]
    requirements = [each for each in world.in_flight.of_job(job.id) if not each.is_serving]
    reserved = [worker for worker in workers if worker.reserved]
    ready = [w for w in workers if not w.reserved and any(each.is_met_by(w) for each in requirements)]
    awake = [worker for worker in reserved if worker.state != "suspended"]
    return FleetCounts(len(reserved), len(awake), len(workers) - len(reserved), len(ready))


def _is_reserved_for(worker: Worker, job: Job) -> bool:
    # Trainers and reserved workers without names: there is one trainer, which runs one job at a time.
    return not worker.joined.trainer or not job.trainer or worker.joined.trainer == job.trainer


def _version_to_serve(world: World, job_id: str) -> int:
    """Return the version to serve: the newest one, unless samples in flight require an older one."""
    required = [requirement.newest_version for requirement in world.in_flight.of_job(job_id)]
    return min([world.committed_version(job_id), *required])


def _select_job(world: World, worker: Worker, jobs: list[Job]) -> Job | None:
    if worker.reserved:
        candidates = [job for job in jobs if _is_reserved_for(worker, job)]
        running = (job for job in candidates if job.state == "running")
        return next(running, candidates[0] if candidates else None)
    allocated = (job for job in jobs if job.id == worker.job)
    return next(allocated, None) or next((job for job in jobs if has_budget(world, job, worker)), None)


def _use_version(world: World, worker: Worker, job: Job, version: int) -> None:
    if worker.assigned_version == (job.id, version):
        return
    charge_startup(world, worker, job)
    world.fleet.assign(worker, (job.id, version))
    world.outbox.send(worker.id, UseVersion(job_id=job.id, version=version, in_flight=job.spec.elastic.in_flight))


def _activate(world: World, worker: Worker, *, active: bool) -> None:
    if worker.assigned_active is active:
        return
    worker.set_active(active=active)
    progress = world.progress.get(worker.job)
    step = progress.window.step if progress and progress.window else 0
    world.outbox.send(worker.id, Resume(step=step) if active else Suspend(step=step))


# --- several jobs -----------------------------------------------------------------------------------------------------


def _reallocate(world: World, jobs: list[Job], versions: dict[str, int], now: Now) -> None:
    workers = [
        AllocatedWorker(worker.id, worker.job, len(worker.samples), worker.batch_cap)
        for worker in world.fleet.workers.values()
        if not worker.reserved and worker.state != "draining"
    ]
    if not workers:
        return
    demands = [_demand(world, job, now) for job in jobs]
    shares = shares_of(demands, workers)
    _track_jobs_below_share(world, demands, workers, shares, now)
    for worker_id, job_id in reallocate(demands, workers, shares).items():
        worker = world.fleet.workers[worker_id]
        if not has_budget(world, world.jobs[job_id], worker):
            continue
        samples = len(worker.samples)
        before = worker.job
        world.emit_event("worker_reassigned", now, worker=worker_id, job_id=job_id, before=before, samples=samples)
        _use_version(world, worker, world.jobs[job_id], versions[job_id])


def _demand(world: World, job: Job, now: Now) -> Demand:
    progress = world.progress[job.id]
    of_job = world.in_flight.of_job(job.id)
    requirements = [each for each in of_job if each.oldest_version <= progress.committed_version]
    assigned = sum(len(w.samples) for w in world.fleet.workers.values() if w.job == job.id)
    samples = sum(world.in_flight.by_requirement[requirement] for requirement in requirements)
    since = progress.below_share_since_mono_s
    below_share_s = 0.0 if since is None else now.mono - since
    return Demand(job.id, job.spec.elastic.share, samples, max(0, samples - assigned), below_share_s)


def _track_jobs_below_share(
    world: World, demands: list[Demand], workers: list[AllocatedWorker], shares: dict[str, int], now: Now
) -> None:
    for demand in demands:
        progress = world.progress[demand.job_id]
        have = sum(worker.job_id == demand.job_id for worker in workers)
        if not demand.queued or have >= shares[demand.job_id]:
            progress.below_share_since_mono_s = None
        elif progress.below_share_since_mono_s is None:
            progress.below_share_since_mono_s = now.mono
