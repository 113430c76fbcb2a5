"""Decides how many preemptible workers of each kind a provider should run, and which of those present to drain.

The fleet follows the number of workers worth having, each of them worth its price. It grows at most once per
`COOL_DOWN_S`, and shrinks only to the largest number that was desired within the last `scale_in_delay_s` (the
stabilization window of Kubernetes' HorizontalPodAutoscaler). A number that the operator sets applies at once. Neither
passes a limit of workers or dollars.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from rlboost.services.rollout_manager.domain.allocation.worth import Offer, paying_workers
from rlboost.services.rollout_manager.domain.jobs.record import Job
from rlboost.services.rollout_manager.domain.seeding.tuner import target_workers
from rlboost.services.rollout_manager.domain.workers.worker import Worker
from rlboost.services.rollout_manager.domain.world import Now, World

COOL_DOWN_S = 30.0
"""Shortest time between two increases: what one adds is seen in the next steps only."""
_ROUNDING = 1e-6
"""Dollars by which a sum of prices may pass a limit, since floating-point numbers are rounded."""
Limit = Literal["max_workers", "max_dollars_per_hour"]


class Pool(BaseModel):
    """A kind of preemptible worker that a provider can start."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """`RLBOOST_WORKER_KIND` of its workers, and the provider's name for it."""
    max_workers: int = Field(ge=0)
    price_per_hour: float = Field(0.0, ge=0, allow_inf_nan=False)
    """Dollars for one worker without a price of its own, unless the price file has its kind."""


@dataclass(frozen=True, slots=True)
class FleetView:
    """What the number of workers depends on."""

    desired: int | None
    """Number of preemptible workers worth having; None: not known yet, so the fleet keeps its size, at least one."""
    present: Mapping[str, int] = field(default_factory=dict)
    """Kind -> preemptible workers that do not drain."""
    price_per_hour: Mapping[str, float] = field(default_factory=dict)
    """Kind -> highest price of one worker: that of the price file, or of a worker that is or was in the fleet."""
    other_dollars_per_hour: float = 0.0
    """Price of the workers that are in no pool."""
    paying: Mapping[str, int] = field(default_factory=dict)
    """Kind -> workers among the desired ones that are worth their price."""


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

    def changes(self) -> dict[str, tuple[int, int]]:
        """Return kind -> the numbers before and now, where they differ."""
        return {kind: (n, self.workers[kind]) for kind, n in self.before.items() if n != self.workers[kind]}


def scale_fleet(world: World, targets: FleetTargets, now: Now) -> None:
    """Report targets that have changed, and drain the workers beyond them."""
    for kind, (before, workers) in targets.changes().items():
        world.emit_event("fleet_scaled", now, worker_kind=kind, workers=workers, before=before)
    fleet = world.fleet.workers
    seen = [fleet[worker_id] for worker_id in targets.present if worker_id in fleet]
    for worker_id, reason in surplus(seen, targets.workers, targets.max_dollars_per_hour).items():
        world.drain(fleet[worker_id], now, reason)


def fleet_view(world: World, pools: Sequence[Pool]) -> FleetView:
    """Return what the manager's world shows of the fleet. Jobs that are paused or out of budget are not counted."""
    jobs = [j for j in world.jobs.active() if j.state == "running" and not world.audits[j.id].cost.budget_reached]
    kinds = {pool.kind for pool in pools}
    prices = dict(world.fleet.prices)
    other = 0.0
    for worker in world.fleet.workers.values():
        if not _is_pooled(worker, kinds):
            other += worker.price_per_hour
    for worker in (*world.fleet.workers.values(), *world.fleet.gone.values()):
        kind = worker.joined.kind
        prices[kind] = max(prices.get(kind, 0.0), worker.price_per_hour)
    paying = _paying(world, jobs, pools, prices)
    desired = target_workers(job.window_tuner for job in jobs) if jobs else 0
    # If all workers of all pools pay, the pools limit the fleet, and not the price.
    if desired is not None and paying.total() < sum(pool.max_workers for pool in pools):
        desired = min(desired, paying.total())
    return FleetView(desired, present_workers(world, kinds), prices, other, paying)


def _paying(world: World, jobs: Iterable[Job], pools: Iterable[Pool], prices: Mapping[str, float]) -> Counter[str]:
    """Return how many workers of each kind are worth their price; each counts for one job only."""
    offers = [
        Offer(pool.kind, pool.max_workers, prices.get(pool.kind, 0.0), world.fleet.availability_of(pool.kind))
        for pool in pools
    ]
    found: Counter[str] = Counter()
    for job in jobs:
        left = [offer._replace(n_workers=offer.n_workers - found[offer.kind]) for offer in offers]
        found += paying_workers(world, job, left) or Counter()
    return found


def present_workers(world: World, kinds: Collection[str]) -> Counter[str]:
    """Return how many preemptible workers of each kind do not drain."""
    workers = world.fleet.workers.values()
    return Counter(w.joined.kind for w in workers if _is_pooled(w, kinds) and w.state != "draining")


class Autoscaler:
    """Targets over time. Times are of the manager's clock.

    Args:
        pools: the kinds of workers, preferred first.
        max_dollars_per_hour: limit on the price of all workers together; None: no limit.
        scale_in_delay_s: how long fewer workers must be enough before the fleet shrinks.

    """

    def __init__(self, pools: Sequence[Pool], max_dollars_per_hour: float | None, scale_in_delay_s: float) -> None:
        self.pools = pools
        self.targets: dict[str, int] = {}
        """Kind -> workers; empty before the first decision."""
        self.limited_by: Limit | None = None
        """The limit that keeps the fleet from growing, if any."""
        self.max_dollars_per_hour = max_dollars_per_hour
        self._scale_in_delay_s = scale_in_delay_s
        self._began_at: float | None = None
        self._grew_at = float("-inf")
        self._desired: deque[tuple[float, int]] = deque()
        """(time, desired number) within the last `scale_in_delay_s`, without numbers that a later one reaches: they
        decrease, and the first one is the largest."""

    def is_settling(self, now: float) -> bool:
        """Return True in the first `scale_in_delay_s`.

        Until then an earlier manager or the operator may have started the present workers, and more may be starting.
        """
        return self._began_at is None or now - self._began_at < self._scale_in_delay_s

    def decide(self, seen: FleetView, fixed: int | None, now: float) -> None:
        """Set the targets.

        Args:
            seen: the fleet.
            fixed: the operator's number of workers; None: the number worth having.
            now: the time.

        """
        self._began_at = now if self._began_at is None else self._began_at
        if fixed is None:
            self.targets, self.limited_by = self._within_limits(self._next_total(seen, now), seen, seen.paying)
        else:
            self.targets, self.limited_by = self._within_limits(fixed, seen, {})

    def _next_total(self, seen: FleetView, now: float) -> int:
        """Return the number worth having, or as much of the change toward it as is due."""
        current = sum(self.targets.values())
        is_settling = self.is_settling(now)
        if is_settling:  # an earlier manager or the operator started these, for a reason that is not known here
            current = max(current, sum(seen.present.values()))
        desired = max(1, current) if seen.desired is None else seen.desired
        while self._desired and self._desired[-1][1] <= desired:
            self._desired.pop()
        self._desired.append((now, desired))
        while now - self._desired[0][0] > self._scale_in_delay_s:
            self._desired.popleft()
        if desired <= current:
            return current if is_settling else min(self._desired[0][1], current)
        if now - self._grew_at < COOL_DOWN_S:
            return current
        self._grew_at = now
        return desired

    def _within_limits(
        self, total: int, seen: FleetView, paying: Mapping[str, int]
    ) -> tuple[dict[str, int], Limit | None]:
        """Divide a number of workers among the pools in their order: first those that pay, then the others."""
        targets, missing = {pool.kind: 0 for pool in self.pools}, total
        limited_by: Limit = "max_workers"
        limit = self.max_dollars_per_hour
        budget = float("inf") if limit is None else limit - seen.other_dollars_per_hour
        worth_their_price = [(pool, min(paying.get(pool.kind, 0), pool.max_workers)) for pool in self.pools]
        possible = [(pool, pool.max_workers) for pool in self.pools]
        for pool, max_workers in worth_their_price + possible:
            price = seen.price_per_hour.get(pool.kind, 0.0)
            n_possible = min(missing, max_workers - targets[pool.kind])
            n = _affordable(n_possible, price, budget)
            if n < n_possible:
                limited_by = "max_dollars_per_hour"
            targets[pool.kind] += n
            missing, budget = missing - n, budget - price * n
        return targets, limited_by if missing else None


def _affordable(workers: int, price: float, budget: float) -> int:
    """Return how many of these workers the budget pays for; price and budget are in dollars per hour."""
    if not price or price * workers <= budget + _ROUNDING:
        return workers
    return int(max(0.0, budget + _ROUNDING) / price)


def surplus(
    workers: Iterable[Worker], targets: Mapping[str, int], max_dollars_per_hour: float | None
) -> dict[str, str]:
    """Return the preemptible workers to drain, with the reason.

    Drains the workers with the fewest samples of each kind that has too many. While the remaining workers together cost
    too much, drains those that joined last.
    """
    workers = [worker for worker in workers if worker.state != "draining"]
    drained = {}
    for kind, target in targets.items():
        members = [worker for worker in workers if _is_pooled(worker, {kind})]
        members.sort(key=lambda worker: (len(worker.samples), -worker.joined.at))
        for worker in members[: max(0, len(members) - target)]:
            drained[worker.id] = f"scale-in: {target} workers of kind {kind} are enough"
    if max_dollars_per_hour is None:
        return drained
    remaining = [worker for worker in workers if worker.id not in drained]
    excess = sum(worker.price_per_hour for worker in remaining) - max_dollars_per_hour
    for worker in sorted(remaining, key=lambda worker: -worker.joined.at):
        if excess > _ROUNDING and worker.price_per_hour and not worker.reserved:
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


def _is_pooled(worker: Worker, kinds: Collection[str]) -> bool:
    return not worker.reserved and worker.joined.kind in kinds
