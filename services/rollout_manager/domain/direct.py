"""What each worker should be doing: which job and version it serves, and whether a reserved one generates."""

from __future__ import annotations

from services.rollout_manager.domain.fleet import Worker
from services.rollout_manager.domain.jobs import Job
from services.rollout_manager.domain.shares import Demand, Member, due_of, reassign
from services.rollout_manager.domain.world import Crew, Now, World
from shared.messages import Resume, Suspend, UseVersion

DIRECT_EVERY_S = 0.25
"""How often workers are shared out anew among jobs."""


def direct(world: World, now: Now) -> None:
    """Tell workers what to serve, and count what each job has.

    Looks at all workers only after something that may matter to it: somebody came, went or changed state, a version or
    a step.
    """
    jobs = [job for job in world.active_jobs() if _version(world, job.id) >= 0]
    if len(jobs) > 1 and now.mono - world.directed_at >= DIRECT_EVERY_S:
        world.directed_at = now.mono
        _share_out(world, jobs, now)
        world.restless = True
    if not world.restless:
        return
    versions = {job.id: _version(world, job.id) for job in jobs}
    for worker in world.fleet.workers.values():
        if worker.state != "draining" and (job := _job_of(worker, jobs, versions)):
            _serve(world, worker, job, versions[job.id])
    for job in world.active_jobs():
        world.crews[job.id] = _crew(world, job)


def activate(world: World) -> None:
    """Tell reserved workers whether to generate."""
    jobs = world.active_jobs()
    for worker in world.fleet.workers.values() if world.restless else ():
        if worker.reserved and worker.known and worker.state != "draining":
            _activate(world, worker, next((job for job in jobs if job.id == worker.job), None))


def _crew(world: World, job: Job) -> Crew:
    """Count the workers that a job can count on: there, not on their way out, and not another job's."""
    there = [w for w in world.fleet.workers.values() if w.job == job.id and w.state != "draining"]
    needs = [need for need in world.live if need.job_id == job.id and not need.serves]
    reserved = [worker for worker in there if worker.reserved]
    ready = [w for w in there if not w.reserved and any(w.serves(job.id, n.oldest, n.version) for n in needs)]
    awake = [worker for worker in reserved if worker.state != "suspended"]
    return Crew(len(reserved), len(awake), len(there) - len(reserved), len(ready))


def _is_reserved_for(worker: Worker, job: Job) -> bool:
    # Where trainers and reserved workers have no names there is one trainer, which runs one job at a time.
    return not worker.joined.trainer or not job.trainer or worker.joined.trainer == job.trainer


def _version(world: World, job_id: str) -> int:
    """Return the version to serve: the newest one, unless samples in flight are for an older one only."""
    wanted = [need.version for need in world.live if need.job_id == job_id]
    return min([world.committed.get(job_id, -1), *wanted])


def _job_of(worker: Worker, jobs: list[Job], versions: dict[str, int]) -> Job | None:
    if worker.reserved:
        mine = [job for job in jobs if _is_reserved_for(worker, job)]
        return next((job for job in mine if job.state == "running"), mine[0] if mine else None)
    if worker.job in versions:
        return next(job for job in jobs if job.id == worker.job)
    return jobs[0] if jobs else None


def _serve(world: World, worker: Worker, job: Job, version: int) -> None:
    if worker.told_version == (job.id, version):
        return
    worker.told_version = job.id, version
    world.changed(worker)
    world.send(worker, UseVersion(job_id=job.id, version=version, in_flight=job.spec.elastic.in_flight))


def _activate(world: World, worker: Worker, job: Job | None) -> None:
    window = world.windows.get(job.id) if job else None
    active = job is not None and window is not None and window.seeds(world.crews[job.id].preemptible)
    if worker.told_active is active:
        return
    worker.told_active = active
    world.changed(worker)
    step = window.step if window else 0
    world.send(worker, Resume(step=step) if active else Suspend(step=step))


# --- several jobs -----------------------------------------------------------------------------------------------------


def _share_out(world: World, jobs: list[Job], now: Now) -> None:
    members = [
        Member(worker.id, worker.job, len(worker.samples), worker.at_once())
        for worker in world.fleet.workers.values()
        if not worker.reserved and worker.state != "draining"
    ]
    if not members:
        return
    demands = [_demand(world, job, now) for job in jobs]
    due = due_of(demands, members)
    _note_who_is_below(world, demands, members, due, now)
    for worker_id, job_id in reassign(demands, members, due).items():
        worker = world.fleet.workers[worker_id]
        world.tell("worker_changes_job", now, job_id, worker=worker_id, before=worker.job, samples=len(worker.samples))
        _serve(world, worker, world.jobs[job_id], _version(world, job_id))


def _demand(world: World, job: Job, now: Now) -> Demand:
    committed = world.committed.get(job.id, -1)
    needs = [need for need in world.live if need.job_id == job.id and need.oldest <= committed]
    held = sum(len(w.samples) for w in world.fleet.workers.values() if w.job == job.id)
    samples = sum(world.live[need] for need in needs)
    since = world.below_share_since.get(job.id, now.mono)
    return Demand(job.id, job.spec.elastic.share, samples, max(0, samples - held), now.mono - since)


def _note_who_is_below(
    world: World, demands: list[Demand], members: list[Member], due: dict[str, int], now: Now
) -> None:
    for demand in demands:
        have = sum(member.job_id == demand.job_id for member in members)
        if demand.waiting and have < due[demand.job_id]:
            world.below_share_since.setdefault(demand.job_id, now.mono)
        else:
            world.below_share_since.pop(demand.job_id, None)
