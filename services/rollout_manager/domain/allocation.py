"""Decides for each worker which job and version it serves, and how many preemptible workers there should be."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

from rlboost.services.rollout_manager.domain.effects import Effect, Now, Send, event
from rlboost.services.rollout_manager.domain.jobs import FleetCounts, JobEntry, JobProgress, Jobs
from rlboost.services.rollout_manager.domain.money import charge_startup, has_budget, paying_workers
from rlboost.services.rollout_manager.domain.offers import (
    ROUNDING,
    Limit,
    Limits,
    Mix,
    Offer,
    OfferBook,
    choose_mix,
    dollars_of,
    explain,
    is_pooled,
    present_workers,
    until_replaced,
    work_of,
)
from rlboost.services.rollout_manager.domain.queue import Queues
from rlboost.services.rollout_manager.domain.workers import Fleet, Worker
from rlboost.services.rollout_manager.domain.world import PeriodicDecisions, refusal_of
from rlboost.shared.messages import Alongside, Resume, Suspend, UseVersion

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


# --- number of workers ------------------------------------------------------------------------------------------------
# How many preemptible workers of each kind a provider should run, and which of those present to drain.
#
# The fleet follows the number of workers worth having, each of them worth its price. It grows at most once per
# `COOL_DOWN_S`, and shrinks only to the largest number that was desired within the last `scale_in_delay_s` (the
# stabilization window of Kubernetes' HorizontalPodAutoscaler). A number that the operator sets applies at once. Of the
# offers it takes those with the cheapest tokens: see `offers.choose_mix`. Workers of an offer that it gives up stay
# until those that replace them are ready. No limit is passed.


COOL_DOWN_S = 30.0
"""Shortest time between two increases: what one adds is seen in the next steps only."""


@dataclass(frozen=True, slots=True)
class FleetView:
    """What the number of workers depends on."""

    desired: float | None
    """Number of mean preemptible workers worth having; None: unknown, so the fleet keeps its size, at least one."""
    offers: Sequence[Offer]
    present: Mapping[str, int] = field(default_factory=dict)
    """Kind -> preemptible workers that do not drain."""
    ready: Mapping[str, int] = field(default_factory=dict)
    """Kind -> those of them that have begun to generate."""
    other_dollars_per_hour: float = 0.0
    """Price of the workers that are in no pool."""
    late: Mapping[str, float] = field(default_factory=dict)
    """Job that no mix finishes by its deadline -> when it will end (Unix seconds)."""


@dataclass(frozen=True, slots=True)
class FleetTargets:
    """How many workers there should be, as an input of the manager's next turn."""

    workers: Mapping[str, int]
    """Kind -> workers."""
    before: Mapping[str, int]
    """Kind -> workers of the decision before; empty for the first."""
    max_dollars_per_hour: float | None
    """Limit on the price of all workers together; None: no limit."""
    present: Sequence[str]
    """Ids of the workers that the decision saw; it does not drain those that have joined since."""
    reason: str = ""
    """Why the mix changed."""
    late: Mapping[str, float] = field(default_factory=dict)
    """See `FleetView`."""

    def changes(self) -> dict[str, tuple[int, int]]:
        """Return kind -> the numbers before and now, where they differ."""
        return {kind: (n, self.workers[kind]) for kind, n in self.before.items() if n != self.workers[kind]}


def scale_fleet(jobs: Jobs, fleet: Fleet, targets: FleetTargets, now: Now) -> list[Effect]:
    """Report targets that have changed and deadlines that cannot be met, and drain the workers beyond the targets."""
    effects: list[Effect] = [
        event("fleet_scaled", now, worker_kind=kind, workers=n, before=before, reason=targets.reason)
        for kind, (before, n) in targets.changes().items()
    ]
    workers = fleet.workers
    seen = [workers[worker_id] for worker_id in targets.present if worker_id in workers]
    for worker_id, reason in surplus(seen, targets.workers, targets.max_dollars_per_hour).items():
        effects += fleet.drain(workers[worker_id], now, reason)
    for job in jobs.active():
        before, job.progress.finishes_at = job.progress.finishes_at, targets.late.get(job.id)
        if before is None and job.progress.finishes_at is not None:
            ends = datetime.fromtimestamp(job.progress.finishes_at, UTC).isoformat(timespec="seconds")
            effects += [event("deadline_unreachable", now, job.id, finishes_at=ends)]
    return effects


def fleet_view(jobs: Jobs, fleet: Fleet, book: OfferBook, limits: Limits, now: Now) -> FleetView:
    """Return what the manager's world shows of the fleet. Jobs that are paused or out of budget are not counted.

    Other models of a job are served by the workers that it is worth having.
    """
    active = (job for job in jobs.active() if job.record.state == "running" and not job.served_for)
    running = [job for job in active if not job.audit.cost.budget_reached]
    kinds = book.records
    other = sum(worker.price_per_hour for worker in fleet.workers.values() if not is_pooled(worker, kinds))
    # A worker that has its own price tells what the next one costs.
    prices = dict(fleet.prices)
    for worker in (*fleet.workers.values(), *fleet.gone.values()):
        kind = worker.joined.kind
        prices[kind] = max(prices.get(kind, 0.0), worker.price_per_hour)
    # Else a kind whose workers tell their price would change between free and dear.
    dearest = max((prices.get(kind, 0.0) for kind in kinds), default=0.0)
    prices |= {kind: dearest for kind in kinds if kind not in fleet.prices and not prices.get(kind)}
    offers = book.offers(fleet, prices, now.mono)
    limits = limits.without(other)
    desired: float | None = 0.0 if not running else None
    late: dict[str, float] = {}
    left, found = list(offers), Counter[str]()
    for job in running:  # each worker counts for one job only
        tuner = job.record.window_tuner
        # What the job counts as a worker: its mean one, which changes with the fleet.
        size = book.mean_workers(tuner.worker_tokens_per_s)
        sized = [offer._replace(speed=offer.speed / size) for offer in left]
        paying = paying_workers(jobs, fleet, job, sized, limits.without(dollars_of(offers, found)), now.wall)
        if paying is None:
            continue
        found += paying.workers
        late |= {job.id: paying.finishes_at} if paying.finishes_at is not None else {}
        left = [offer._replace(n_workers=offer.n_workers - found[offer.kind]) for offer in offers]
        desired = (desired or 0.0) + work_of(offers, paying.workers) + paying.missing * size
    pooled = [w for w in fleet.workers.values() if is_pooled(w, kinds) and w.state not in {"draining", "joining"}]
    ready = Counter(w.joined.kind for w in pooled if w.version >= 0)
    return FleetView(desired, offers, present_workers(fleet, kinds), ready, other, late)


class Autoscaler:
    """Targets over time. Times are of the manager's clock.

    Args:
        max_dollars_per_hour: limit on the price of all workers together; None: no limit.
        scale_in_delay_s: how long fewer workers must be enough before the fleet shrinks.
        max_share: part of the workers that may be of one pool.

    """

    def __init__(self, max_dollars_per_hour: float | None, scale_in_delay_s: float, max_share: float = 1.0) -> None:
        self.targets: dict[str, int] = {}
        """Kind -> workers; empty before the first decision."""
        self.limited_by: Limit | None = None
        """The limit that keeps the fleet from growing, if any."""
        self.reason = ""
        """Why the mix is as it is: of its last change."""
        self.max_dollars_per_hour = max_dollars_per_hour
        self._max_share = max_share
        self._scale_in_delay_s = scale_in_delay_s
        self._mix: dict[str, int] = {}
        """The targets without workers that wait for their successors."""
        self._began_at: float | None = None
        self._grew_at = float("-inf")
        self._desired: deque[tuple[float, float]] = deque()
        """(time, desired number) within the last `scale_in_delay_s`, without numbers that a later one reaches: they
        decrease, and the first one is the largest."""

    def is_settling(self, now: float) -> bool:
        """Return True in the first `scale_in_delay_s`.

        Until then an earlier manager or the operator may have started the present workers, and more may be starting.
        """
        return self._began_at is None or now - self._began_at < self._scale_in_delay_s

    def limits(self, other_dollars_per_hour: float = 0.0) -> Limits:
        """Return what no mix passes, given the price of the workers that are in no pool."""
        limit = float("inf") if self.max_dollars_per_hour is None else self.max_dollars_per_hour
        return Limits(limit, self._max_share).without(other_dollars_per_hour)

    def decide(self, seen: FleetView, fixed: int | None, now: float) -> None:
        """Set the targets.

        Args:
            seen: the fleet.
            fixed: the operator's number of workers; None: the number worth having.
            now: the time.

        """
        self._began_at = now if self._began_at is None else self._began_at
        limits, before = self.limits(seen.other_dollars_per_hour), self._mix or seen.present
        if fixed is None:
            mix = self._next_mix(seen, limits, before, now)
        else:
            mix = choose_mix(seen.offers, fixed, limits, before, by_count=True)
        self.targets = until_replaced(seen.offers, mix.workers, seen.ready, limits, by_count=fixed is not None)
        self.reason = explain(seen.offers, self._mix, mix.workers, limits) or self.reason
        self._mix, self.limited_by = mix.workers, mix.limited_by

    def _next_mix(self, seen: FleetView, limits: Limits, before: Mapping[str, int], now: float) -> Mix:
        """Return the mix that does the work worth doing, or as much of the change toward it as is due."""
        current = work_of(seen.offers, self._mix)
        is_settling = self.is_settling(now)
        if is_settling:  # an earlier manager or the operator started these, for a reason that is not known here
            current = max(current, work_of(seen.offers, seen.present))
        if seen.desired is None and not current:
            return choose_mix(seen.offers, 1, limits, before, by_count=True)
        desired = current if seen.desired is None else seen.desired
        while self._desired and self._desired[-1][1] <= desired:
            self._desired.pop()
        self._desired.append((now, desired))
        while now - self._desired[0][0] > self._scale_in_delay_s:
            self._desired.popleft()
        work = current
        if desired <= current:
            work = current if is_settling else min(self._desired[0][1], current)
        elif now - self._grew_at >= COOL_DOWN_S:
            work = desired
        mix = choose_mix(seen.offers, work, limits, before)
        if desired > 0 and not any(mix.workers.values()):  # it is less than half a worker of the cheapest offer
            mix = choose_mix(seen.offers, 1, limits, before, by_count=True)
        if work_of(seen.offers, mix.workers) > current:  # workers that were there already are no growth
            self._grew_at = now
        return mix


def surplus(
    workers: Iterable[Worker], targets: Mapping[str, int], max_dollars_per_hour: float | None
) -> dict[str, str]:
    """Return the preemptible workers to drain, with the reason.

    Of each kind that has too many, drains those with the fewest samples, machine by machine, so that machines can end.
    While the remaining workers together cost too much, drains those that joined last.
    """
    workers = [worker for worker in workers if worker.state != "draining"]
    drained = {}
    for kind, target in targets.items():
        members = sorted((w for w in workers if is_pooled(w, {kind})), key=lambda w: (len(w.samples), -w.joined.at))
        machines: dict[str, list[Worker]] = {}
        for worker in members:
            machines.setdefault(worker.joined.host, []).append(worker)
        by_machine = sorted(machines.values(), key=lambda found: sum(len(worker.samples) for worker in found))
        for worker in [one for found in by_machine for one in found][: max(0, len(members) - target)]:
            drained[worker.id] = f"scale-in: {target} workers of kind {kind} are enough"
    if max_dollars_per_hour is None:
        return drained
    remaining = [worker for worker in workers if worker.id not in drained]
    excess = sum(worker.price_per_hour for worker in remaining) - max_dollars_per_hour
    for worker in sorted(remaining, key=lambda worker: -worker.joined.at):
        if excess > ROUNDING and worker.price_per_hour and not worker.reserved:
            excess -= worker.price_per_hour
            drained[worker.id] = f"the workers cost more than {max_dollars_per_hour:g} dollars per hour"
    return drained


def workers_to_request(target: int, before: int | None, present: int) -> int:
    """Return the number of workers of a kind to request from the provider.

    A provider that is asked for fewer may stop any of them, so it is asked for fewer only as they leave.

    Args:
        target: how many there should be.
        before: the last request; None: unknown.
        present: workers of the kind that are there, those that drain included.

    """
    return max(target, present if before is None else min(before, present))
