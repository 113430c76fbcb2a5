"""Decides how many preemptible workers of each kind a provider should run, and which of those present to drain.

The fleet follows the number of workers worth having, each of them worth its price. It grows at most once per
`COOL_DOWN_S`, and shrinks only to the largest number that was desired within the last `scale_in_delay_s` (the
stabilization window of Kubernetes' HorizontalPodAutoscaler). A number that the operator sets applies at once. Of the
offers it takes those with the cheapest tokens: see `offers.choose_mix`. Workers of an offer that it gives up stay
until those that replace them are ready. No limit is passed.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

from rlboost.services.rollout_manager.domain.effects import Effect, Now, event
from rlboost.services.rollout_manager.domain.jobs import Jobs
from rlboost.services.rollout_manager.domain.money import paying_workers
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
from rlboost.services.rollout_manager.domain.workers import Fleet, Worker

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
