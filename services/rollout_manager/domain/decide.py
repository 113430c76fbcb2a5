"""Takes the manager's decisions once all available messages are applied; allocates workers to jobs and versions.

`decide` is called after every batch of messages and on every tick. A second call on an unchanged world decides nothing,
unless the first one left samples to deliver.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from rlboost.services.rollout_manager.domain.effects import (
    FAILED,
    Effect,
    Now,
    Record,
    Send,
    dead_letter,
    event,
    forget_job,
)
from rlboost.services.rollout_manager.domain.jobs import FleetCounts, JobEntry, JobProgress, Jobs
from rlboost.services.rollout_manager.domain.money import charge_jobs, charge_startup, has_budget
from rlboost.services.rollout_manager.domain.placement import place_queued, rebalance
from rlboost.services.rollout_manager.domain.queue import Queues, unassign, unassign_all
from rlboost.services.rollout_manager.domain.stalls import (
    dismiss_incompatible,
    dismiss_mismatched,
    lose_worker,
    take_stalled,
)
from rlboost.services.rollout_manager.domain.step_windows import advance_window, begin_step
from rlboost.services.rollout_manager.domain.tokens import Ledger, Sample
from rlboost.services.rollout_manager.domain.workers import Fleet, Worker
from rlboost.services.rollout_manager.domain.world import (
    NO_CLIENTS,
    Clients,
    PeriodicDecisions,
    World,
    deliver_to_trainer,
    drop,
    drop_refused,
    end_served_samples,
    refusal_of,
)
from rlboost.shared.ids import SampleId, is_served
from rlboost.shared.messages import ENDED_JOB_RETENTION_S, FINISH_NONE, Alongside, Resume, Suspend, UseVersion
from rlboost.shared.streams import names

# --- compaction -------------------------------------------------------------------------------------------------------
#
# Bounds the token log and the manager's memory by the work in flight.
#
# Samples that have been in flight for long are restated at the tail of the log, so that older entries can be trimmed.


MIN_LOG_TOKENS = 1 << 20
"""A log with fewer tokens is not compacted."""
MAX_LOG_RATIO = 4
"""The log is compacted when it holds this many times the tokens in flight."""
AUDIT_OPEN_S = 60.0
"""How long after a job's end late frames are audited: longer than a worker generates without contact."""
MAX_RESTATED = 1024
"""Maximum number of samples that one call restates."""
MAX_RESTATED_TOKENS = 1 << 20
"""Approximate maximum of tokens that one call restates: 8 MiB in the log, a few milliseconds of the manager."""


def compact(ledger: Ledger) -> list[Effect]:
    """Restate the oldest samples when the log is long.

    Amortized, each token is written a bounded number of times: a sample is restated only after the log has grown by
    `MAX_LOG_RATIO` times all tokens in flight.
    """
    oldest = ledger.oldest(1)
    limit = max(MIN_LOG_TOKENS, MAX_LOG_RATIO * ledger.tokens_live)
    if oldest and ledger.tokens_in_log - oldest[0].log_tokens_before > limit:
        return _restate(ledger, older_than=ledger.tokens_in_log - limit // 2)
    return []


def forget_ended(jobs: Jobs, wall: float) -> list[Effect]:
    """Drop the audits of ended jobs once no late frame can arrive (Redis has them), and later the jobs themselves.

    Args:
        jobs: changed in place.
        wall: this moment in Unix seconds.

    """
    effects: list[Effect] = []
    for job in list(jobs.values()):
        ended_s = 0.0 if job.record.finished_at is None else wall - job.record.finished_at
        if ended_s > AUDIT_OPEN_S:
            job.close_audit()
        if ended_s > ENDED_JOB_RETENTION_S:
            jobs.forget(job.id)
            effects.append(forget_job(job.id))
    return effects


def _restate(ledger: Ledger, older_than: int) -> list[Effect]:
    effects: list[Effect] = []
    tokens = 0
    for sample in ledger.oldest(MAX_RESTATED):
        if sample.log_tokens_before >= older_than or tokens > MAX_RESTATED_TOKENS:
            break
        if sample.finish == FINISH_NONE:
            tokens += sample.n_tokens
            effects.append(Record(ledger.restatement_of(sample)))
    return effects


# --- fair share -------------------------------------------------------------------------------------------------------
#
# Allocates preemptible workers to jobs: fair shares by weight, among the jobs with samples to generate.
#
# A worker serves one model at a time, and a change of model costs a pull of weights. So workers change only to a job
# with queued samples: at once if they are idle, otherwise after the job has been below its share for `PATIENCE_S`.
# Jobs in opposite phases thereby fill each other's gaps. Jobs that train adapters of the same model share the workers
# that can serve several: these get workers as one job, and `placement.fair_limits` divides their slots.


PATIENCE_S = 1.0
"""How long a job stays below its share before it takes a busy worker from another job."""


@dataclass(frozen=True, slots=True)
class Demand:
    """What a job asks for, or several that share workers."""

    job_id: str
    """The job's id, or what stands for those that share workers."""
    weight: float
    """Its share relative to the other jobs' shares."""
    samples: int
    """Its admissible samples in flight: queued and running."""
    queued: int
    """How many of `samples` have no worker."""
    below_share_s: float = 0.0
    """How long it has been below its share with samples queued."""


@dataclass(frozen=True, slots=True)
class AllocatedWorker:
    """A preemptible worker that is allocated to a job, or to none."""

    id: str
    job_id: str
    """The job that it is allocated to; empty: none."""
    load: int
    batch_cap: int


def fair_shares(demands: Sequence[Demand], n_workers: int, batch_cap: float) -> dict[str, int]:
    """Return the fair share of each job in workers: in proportion to the weights, none more than it can fill.

    Args:
        demands: the jobs.
        n_workers: number of workers.
        batch_cap: mean number of samples that one worker runs.

    """
    shares = {demand.job_id: 0 for demand in demands}
    fillable = {demand.job_id: -(-demand.samples // max(1, int(batch_cap))) for demand in demands}
    for _ in range(n_workers):
        unfilled = [d for d in demands if shares[d.job_id] < fillable[d.job_id]]
        if not unfilled:
            break
        # The job that would still be farthest below its share with one more (Jefferson's method).
        poorest = min(unfilled, key=lambda d: ((shares[d.job_id] + 1) / d.weight, d.job_id))
        shares[poorest.job_id] += 1
    return shares


def shares_of(demands: Sequence[Demand], workers: Sequence[AllocatedWorker]) -> dict[str, int]:
    """Return the fair share of each job in `workers`, which must not be empty."""
    return fair_shares(demands, len(workers), sum(worker.batch_cap for worker in workers) / len(workers))


def reallocate(
    demands: Sequence[Demand], workers: Sequence[AllocatedWorker], shares: Mapping[str, int]
) -> dict[str, str]:
    """Return which workers should change to which job, given each job's fair share."""
    have = {demand.job_id: 0 for demand in demands}
    for worker in workers:
        if worker.job_id in have:
            have[worker.job_id] += 1
    changes: dict[str, str] = {}
    by_load = sorted(workers, key=lambda w: (w.load, w.id))
    for demand in sorted(demands, key=lambda d: (have[d.job_id] - shares[d.job_id], d.job_id)):
        for worker in by_load:
            if have[demand.job_id] >= shares[demand.job_id] or not demand.queued:
                break
            if worker.id not in changes and _may_change(worker, demand, shares, have):
                changes[worker.id] = demand.job_id
                have[demand.job_id] += 1
                if worker.job_id in have:
                    have[worker.job_id] -= 1
    return changes


def _may_change(worker: AllocatedWorker, demand: Demand, shares: Mapping[str, int], have: Mapping[str, int]) -> bool:
    if worker.job_id == demand.job_id:
        return False
    if worker.job_id not in shares:
        return True
    above_share = have[worker.job_id] > shares[worker.job_id]
    return above_share and (worker.load == 0 or demand.below_share_s >= PATIENCE_S)


# --- allocate ---------------------------------------------------------------------------------------------------------


REALLOCATE_EVERY_S = 0.25
"""How often workers are reallocated among several jobs."""


def allocate(jobs: Jobs, fleet: Fleet, queues: Queues, periodic: PeriodicDecisions, now: Now) -> list[Effect]:
    """Command workers which version to serve, and count the workers of each job.

    Reallocates workers among several jobs every `REALLOCATE_EVERY_S`.
    """
    versions = {job.id: version for job in jobs.active() if (version := _version_to_serve(queues, job)) >= 0}
    for job_id in {requirement.job_id for requirement in queues.in_flight.by_requirement}:
        if job := jobs.get_active(job_id):
            job.progress.used_at = now.mono
    served = [jobs[job_id] for job_id in versions]
    effects: list[Effect] = []
    payers = [job for job in served if _pays(jobs, queues, job)]
    if len(payers) > 1 and now.mono - periodic.reallocated_at >= REALLOCATE_EVERY_S:
        periodic.reallocated_at = now.mono
        effects += _reallocate(fleet, queues, payers, versions, now)
    for worker in fleet.workers.values():
        if worker.state == "draining":
            continue
        if job := _select_job(jobs, fleet, queues, worker, served if worker.reserved else payers):
            effects += _use_version(worker, job, versions, alongside_of(fleet, queues, worker, job, payers))
        elif served and worker.job and not worker.reserved:  # others stay idle: a supervisor would restart them
            effects += fleet.drain(worker, now, "no job's budget pays for it any longer: see elastic.max_dollars")
    for job in jobs.active():
        job.progress.fleet = _count_workers(jobs, fleet, queues, job)
    return effects


def _pays(jobs: Jobs, queues: Queues, job: JobEntry) -> bool:
    """Return True if spot workers may serve the job; another model of a job without a budget only what it was asked."""
    owner = jobs.get_active(job.served_for) if job.served_for else None
    if owner is not None and owner.audit.cost.budget_reached and not queues.in_flight.of_job(job.id):
        return False
    return not job.audit.cost.budget_reached


def activate_reserved(jobs: Jobs, fleet: Fleet) -> list[Effect]:
    """Command reserved workers to resume or suspend generation, as the windows of their jobs require."""
    owners = [job for job in jobs.active() if not job.served_for and _uses_reserved(job.progress)]
    generating = {job_id for job in owners for job_id in jobs.family_of(job.id)}
    effects: list[Effect] = []
    for worker in fleet.workers.values():
        if worker.reserved and worker.has_reported and worker.state != "draining":
            effects += _activate(jobs, worker, active=worker.job in generating)
    return effects


def _uses_reserved(progress: JobProgress) -> bool:
    return progress.window is not None and progress.window.uses_reserved(progress.fleet.preemptible)


def _count_workers(jobs: Jobs, fleet: Fleet, queues: Queues, job: JobEntry) -> FleetCounts:
    # With those that serve its other models for a while: they come back, spot workers only while its budget lasts.
    family, has_budget = jobs.family_of(job.id), not job.audit.cost.budget_reached
    available = (w for w in fleet.workers.values() if not family.isdisjoint(w.jobs) and w.is_available)
    workers = [w for w in available if job.id in w.jobs or w.reserved or has_budget]
    requirements = [each for each in queues.in_flight.of_job(job.id) if not each.is_serving]
    reserved = [worker for worker in workers if worker.reserved]
    ready = [w for w in workers if not w.reserved and any(each.is_met_by(w) for each in requirements)]
    awake = [worker for worker in reserved if worker.state != "suspended"]
    return FleetCounts(len(reserved), len(awake), len(workers) - len(reserved), len(ready))


def _is_reserved_for(worker: Worker, job: JobEntry) -> bool:
    # Trainers and reserved workers without names: there is one trainer, which runs one job at a time.
    return not worker.joined.trainer or not job.record.trainer or worker.joined.trainer == job.record.trainer


def _version_to_serve(queues: Queues, job: JobEntry) -> int:
    """Return the version to serve: the newest one, unless samples in flight require an older one."""
    required = [requirement.newest_version for requirement in queues.in_flight.of_job(job.id)]
    return min([job.progress.committed_version, *required])


def _select_job(jobs: Jobs, fleet: Fleet, queues: Queues, worker: Worker, served: list[JobEntry]) -> JobEntry | None:
    if worker.reserved:
        candidates = [job for job in served if not job.served_for and _is_reserved_for(worker, job)]
        running = (job for job in candidates if job.record.state == "running")
        job = next(running, candidates[0] if candidates else None)
        return None if job is None else _model_in_need(jobs, queues, job, served) or job
    # First its own job, then one that it can serve without other weights; a new manager knows both from its heartbeats.
    own = worker.jobs or (worker.job_id, *worker.alongside)
    if worker.unavailable and worker.unavailable == worker.assigned_version:  # it takes samples of none as the first
        own = (*own[1:], own[0])
    allocated = (job for job_id in own for job in served if job.id == job_id)
    return next(allocated, None) or next((job for job in served if has_budget(fleet, job, worker)), None)


def _model_in_need(jobs: Jobs, queues: Queues, job: JobEntry, served: list[JobEntry]) -> JobEntry | None:
    """Return the other model that a job's reserved workers serve now: one with requests, once the job has none."""
    if queues.in_flight.of_job(job.id) or not _uses_reserved(job.progress):
        return None
    return next((one for one in jobs.models_of(job.id) if one in served and queues.in_flight.of_job(one.id)), None)


def _shares(worker: Worker, job: JobEntry, queues: Queues) -> bool:
    """Return True if a worker can serve a job next to others whose adapters are of the same weights."""
    if worker.max_adapters <= 1 or worker.reserved or not job.progress.base:
        return False
    return job.id not in worker.unshared or worker.unshared[job.id] not in (None, _version_to_serve(queues, job))


def alongside_of(
    fleet: Fleet, queues: Queues, worker: Worker, job: JobEntry, payers: Sequence[JobEntry]
) -> list[JobEntry]:
    """Return the other jobs that a worker serves next to its own: those with adapters of the same weights.

    If they are more than it can serve, those that have samples there come first, then those with samples in flight
    that the fewest workers serve, then those used last.
    """
    if not _shares(worker, job, queues):
        return []
    same = [one for one in payers if one is not job and one.progress.base == job.progress.base]
    able = [one for one in same if _shares(worker, one, queues)]
    able = [one for one in able if one.id in worker.jobs or has_budget(fleet, one, worker)]
    if len(able) < worker.max_adapters:
        return able

    def rank(one: JobEntry) -> tuple[bool, bool, int, float, int]:
        others = sum(one.id in other.jobs for other in fleet.workers.values() if other is not worker)
        in_flight = bool(queues.in_flight.of_job(one.id))
        return not worker.n_samples_of(one.id), not in_flight, others, -one.progress.used_at, one.record.no

    return sorted(able, key=rank)[: worker.max_adapters - 1]


def _use_version(
    worker: Worker, job: JobEntry, versions: Mapping[str, int], others: Sequence[JobEntry]
) -> list[Effect]:
    assigned, alongside = (job.id, versions[job.id]), {one.id: versions[one.id] for one in others}
    if (worker.assigned_version, worker.assigned_alongside) == (assigned, alongside):
        return []
    charge_startup(worker, job)
    worker.assigned_version, worker.assigned_alongside = assigned, alongside
    in_addition = tuple(
        Alongside(job_id=one.id, version=versions[one.id], in_flight=one.record.spec.elastic.in_flight)
        for one in others
    )
    in_flight = job.record.spec.elastic.in_flight
    command = UseVersion(job_id=job.id, version=versions[job.id], in_flight=in_flight, alongside=in_addition)
    return [Send(worker.id, command)]


def _activate(jobs: Jobs, worker: Worker, *, active: bool) -> list[Effect]:
    if worker.assigned_active is active:
        return []
    worker.assigned_active = active
    job = jobs.get_active(worker.job)
    owner = jobs.get_active(job.served_for) if job and job.served_for else job
    step = owner.progress.window.step if owner and owner.progress.window else 0
    return [Send(worker.id, Resume(step=step) if active else Suspend(step=step))]


# --- several jobs -----------------------------------------------------------------------------------------------------


def _reallocate(
    fleet: Fleet, queues: Queues, payers: list[JobEntry], versions: dict[str, int], now: Now
) -> list[Effect]:
    present = [worker for worker in fleet.workers.values() if not worker.reserved and worker.is_available]
    if not present:
        return []
    served = [job for job in payers if not refusal_of(fleet, job, versions[job.id])]
    # Jobs that all workers can serve at once get workers as one. A worker without an engine may turn out to be able to.
    equipped = [worker for worker in present if worker.version >= 0]
    groups: dict[str, list[JobEntry]] = {}
    for job in served:
        is_shared = job.progress.base and all(_shares(worker, job, queues) for worker in equipped)
        key = job.progress.base if is_shared else job.id
        groups.setdefault(key, []).append(job)
    group_of = {job.id: key for key, members in groups.items() for job in members}
    workers = [
        AllocatedWorker(
            worker.id,
            group_of.get(worker.job, worker.job),
            len(worker.samples),
            int(min(worker.batch_cap, worker.sample_limit)),
        )
        for worker in present
    ]
    demands = [_demand(fleet, queues, key, members, now) for key, members in groups.items()]
    shares = shares_of(demands, workers)
    _track_jobs_below_share(groups, demands, workers, shares, now)
    effects: list[Effect] = []
    for worker_id, key in reallocate(demands, workers, shares).items():
        worker = fleet.workers[worker_id]
        first = next((job for job in groups[key] if has_budget(fleet, job, worker)), None)
        if first is None:
            continue
        before, samples = worker.job, len(worker.samples)
        effects += [event("worker_reassigned", now, worker=worker_id, job_id=first.id, before=before, samples=samples)]
        effects += _use_version(worker, first, versions, alongside_of(fleet, queues, worker, first, payers))
    return effects


def _demand(fleet: Fleet, queues: Queues, key: str, members: list[JobEntry], now: Now) -> Demand:
    requirements = [
        each
        for job in members
        for each in queues.in_flight.of_job(job.id)
        if each.oldest_version <= job.progress.committed_version
    ]
    assigned = sum(worker.n_samples_of(job.id) for worker in fleet.workers.values() for job in members)
    samples = sum(queues.in_flight.by_requirement[requirement] for requirement in requirements)
    since = members[0].progress.below_share_since_mono_s
    below_share_s = 0.0 if since is None else now.mono - since
    weight = sum(job.record.spec.elastic.share for job in members)
    return Demand(key, weight, samples, max(0, samples - assigned), below_share_s)


def _track_jobs_below_share(
    groups: Mapping[str, list[JobEntry]],
    demands: list[Demand],
    workers: list[AllocatedWorker],
    shares: dict[str, int],
    now: Now,
) -> None:
    for demand in demands:
        have = sum(worker.job_id == demand.job_id for worker in workers)
        is_served = not demand.queued or have >= shares[demand.job_id]
        for progress in (job.progress for job in groups[demand.job_id]):
            if is_served:
                progress.below_share_since_mono_s = None
            elif progress.below_share_since_mono_s is None:
                progress.below_share_since_mono_s = now.mono


# --- decisions --------------------------------------------------------------------------------------------------------


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
) -> list[Effect]:
    """Decide everything that is due; return the effects.

    Args:
        world: changed in place.
        now: this moment.
        dead: silent workers whose lease has run out.
        clients: the state of the clients of serving requests.
        mismatched: workers that have missed commands.

    """
    jobs, fleet, ledger, queues, periodic = world.jobs, world.fleet, world.ledger, world.queues, world.periodic
    effects: list[Effect] = []
    for worker_id in dead:
        if worker := fleet.workers.get(worker_id):
            effects += lose_worker(jobs, fleet, queues, worker, now)
    for worker_id in mismatched:
        if worker := fleet.workers.get(worker_id):
            effects += dismiss_mismatched(jobs, fleet, queues, worker, now)
    for worker in fleet.take_incompatible():
        if worker.id in fleet.workers:
            effects += dismiss_incompatible(jobs, fleet, queues, worker, now)
    effects += _deliver_finished(world)
    effects += _reject_workers(fleet, queues, now)
    effects += _retry_failed(world, now)
    effects += drop_refused(world)
    effects += end_served_samples(world, clients, now)
    effects += allocate(jobs, fleet, queues, periodic, now)
    for job in jobs.active():
        # May open a window, for which reserved workers are activated.
        effects += begin_step(ledger, periodic, job, now)
    effects += activate_reserved(jobs, fleet)
    periodic.decided_once = True
    for job in jobs.active():
        effects += advance_window(jobs, fleet, ledger, queues, job, now)
    effects += place_queued(world, now)
    effects += rebalance(world, now)
    effects += world.siblings.send(fleet, now)
    effects += take_stalled(jobs, fleet, queues, periodic, now)
    effects += charge_jobs(jobs, fleet, periodic, now)
    return effects


def _deliver_finished(world: World) -> list[Effect]:
    effects: list[Effect] = []
    n_bytes = 0
    for sample_id in list(world.ledger.finished):
        sample = world.ledger.samples[sample_id]
        if not is_served(sample_id):
            if n_bytes > MAX_DELIVERED_BYTES:
                continue
            n_bytes += len(sample.tokens) + len(sample.logprobs) + len(sample.routed_experts)
            effects += deliver_to_trainer(world, sample)
        elif sample.worker:
            unassign(world.fleet, world.queues, sample)  # the client reads the rest from the ledger
    return effects


def _reject_workers(fleet: Fleet, queues: Queues, now: Now) -> list[Effect]:
    """Take all samples from workers that send invalid tokens where others do not, and drain these workers."""
    effects: list[Effect] = []
    for worker in fleet.take_rejected():
        reason = f"it sent invalid tokens for {worker.n_invalid_confirmed} samples that other workers completed"
        for sample in worker.in_order():
            effects += fleet.revoke(sample)
        effects += unassign_all(fleet, queues, worker, worker.in_order(), now, "invalid")
        effects += fleet.reject(worker, now, reason)
    return effects


def _retry_failed(world: World, now: Now) -> list[Effect]:
    effects: list[Effect] = []
    for sample_id, reason in list(world.ledger.failed.items()):
        sample = world.ledger.samples[sample_id]
        if sample.is_over_limit():
            effects += _dead_letter(world, sample, f"failed {len(sample.failed_on)} times: {reason}", now)
        elif sample.worker:
            unassign(world.fleet, world.queues, sample)
    return effects


def _dead_letter(world: World, sample: Sample, reason: str, now: Now) -> list[Effect]:
    """Drop a sample that fails on every worker, and store it among the dead letters for inspection."""
    where = f"{reason} (on {', '.join(sample.failed_on)})"
    name, job_id = str(SampleId.unpack(sample.id)), sample.request.job_id
    return [
        dead_letter(names.TOKEN_LOG, sample.first_id, world.ledger.restatement_of(sample), where, now),
        event("sample_failed", now, job_id, sample=name, reason=reason, workers=list(sample.failed_on)),
        *drop(world, sample, FAILED, reason),
    ]
