"""Offers of spot workers: what the operator lists, what is known of each, and the mix with the cheapest tokens.

An offer is a kind of worker in one place at one price, which a provider can start: a *pool* of the settings. Its
expected dollars per token are its price, divided by what a worker generates in the part of its paid time in which it
is ready. They follow from the measured throughput of its GPU, and from its own start-up time and preemptions.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, model_validator

from rlboost.services.rollout_manager.domain.workers import Fleet, Worker, availability
from rlboost.shared.job.fleet import HOUR_S

ROUNDING = 1e-6
"""Dollars by which a sum of prices may pass a limit, since floating-point numbers are rounded."""

# --- settings ---------------------------------------------------------------------------------------------------------

ProviderName = Literal["none", "command", "kubernetes", "aws"]


AWS_IDLE_S = 1800.0
"""How long a machine may have no worker, from its launch on or since one left, until it is terminated and replaced."""


class AwsMachine(BaseModel):
    """A spot machine of AWS EC2 that runs workers of a pool."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    instance_type: str = Field(pattern=r"^[a-z0-9-]+\.[a-z0-9-]+$")
    zone: str = Field(pattern=r"^[a-z]+(-[a-z]+)+-\d[a-z0-9-]*[a-z0-9]$")
    """Availability zone, such as `us-east-1a`."""
    launch_template: str = Field(min_length=1)
    """Name or id of the EC2 launch template that has the image, security groups and disks."""
    subnet: str = ""
    """A subnet in the zone; if empty, the zone's default one."""
    workers: int = Field(1, ge=1)
    """Workers that a machine runs."""

    @property
    def region(self) -> str:
        """Return the zone's region."""
        found = re.match(r"[a-z]+(-[a-z]+)+-\d", self.zone)
        return found.group() if found else self.zone


class Pool(BaseModel):
    """A kind of preemptible worker that a provider can start."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    kind: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """`RLBOOST_WORKER_KIND` of its workers, and the provider's name for it."""
    max_workers: int = Field(4096, ge=0)
    price_per_hour: float | None = Field(None, ge=0)
    """Dollars for one worker without a price of its own, unless the price file has its kind; 0: it is free."""
    gpu: str = ""
    """Its GPU, as it is shown; pools of the same GPU share their measured throughput. If empty, the kind."""
    place: str = ""
    """Cloud, region or zone, as it is shown."""
    provider: ProviderName | None = None
    """What starts its workers; None: the manager's provider, or `command` or `aws` if the pool has that key."""
    command: str = ""
    """Its shell command, in place of the manager's."""
    aws: AwsMachine | None = None
    """Its machines, with provider aws."""
    tokens_per_s: float | None = Field(None, gt=0)
    """Planned throughput of one worker, until one was measured; None: the mean of the measured ones."""
    preemptions_per_hour: float = Field(0.0, ge=0)
    """Expected preemptions of one worker, which measured ones replace over `PRIOR_HOURS`."""
    boot_s: float = Field(0.0, ge=0)
    """Seconds from the request of a machine to the start of its worker, which the manager does not see."""

    @model_validator(mode="after")
    def _keys_are_used(self) -> Pool:
        for key, value in (("command", self.command), ("aws", self.aws)):
            if value and self.provider not in {None, key}:
                raise ValueError(
                    f"pool {self.kind} has the key {key}, which provider {self.provider} does not use: remove one"
                )
        if self.aws and self.boot_s >= AWS_IDLE_S:
            raise ValueError(
                f"pool {self.kind}: boot_s is {self.boot_s:.0f}, and a machine of AWS without a worker for "
                f"{AWS_IDLE_S:.0f} s is replaced: use an image that is prepared, and lower it"
            )
        if self.command and self.aws:
            raise ValueError(f"pool {self.kind} has the keys command and aws, and needs one provider: remove one")
        return self

    @property
    def label(self) -> str:
        """Return its GPU and place for people."""
        place = self.place or (self.aws.zone if self.aws else "")
        return f"{self.gpu or self.kind} in {place}" if place else self.gpu or self.kind


# --- the mix ----------------------------------------------------------------------------------------------------------

KEEP_BELOW = 1.1
"""A worker is replaced only by one whose tokens cost at least this factor less: prices and measurements fluctuate."""
Limit = Literal["max_workers", "max_dollars_per_hour", "max_share"]


class Offer(NamedTuple):
    """Preemptible workers of one kind that a provider can start."""

    kind: str
    n_workers: int
    price_per_hour: float
    """Price of one worker in dollars; 0 if it is free or unknown."""
    availability: float = 1.0
    """Fraction of its paid time in which a worker generates."""
    speed: float = 1.0
    """Throughput of one worker in mean workers: of what they generate, see `OfferBook.unit`."""
    label: str = ""
    closed: str = ""
    """Why no further workers are expected of it at present; empty: they are."""
    n_present: int = 0
    """Workers that a closed offer still has, starting ones included."""

    @property
    def cost(self) -> float:
        """Return the expected dollars per hour for the tokens of one mean worker: in proportion to those per token."""
        return self.price_per_hour / (self.speed * self.availability)


@dataclass(frozen=True, slots=True)
class Limits:
    """What no mix passes."""

    dollars_per_hour: float = math.inf
    """Of the workers of all offers together."""
    max_share: float = 1.0
    """Part of the workers that may be of one offer, rounded up to a worker."""

    def without(self, dollars_per_hour: float) -> Limits:
        """Return these limits for the workers next to others that cost this much."""
        return Limits(max(0.0, self.dollars_per_hour - dollars_per_hour), self.max_share)

    def reached_by(self, offer: Offer, counts: Mapping[str, int], dollars: float) -> Limit | None:
        """Return what forbids one more worker of an offer; None if nothing does.

        Args:
            offer: the offer.
            counts: kind -> workers in the mix so far.
            dollars: what these cost per hour.

        """
        n = counts.get(offer.kind, 0)
        if n >= offer.n_workers:
            return "max_workers"
        if offer.price_per_hour and dollars + offer.price_per_hour > self.dollars_per_hour + ROUNDING:
            return "max_dollars_per_hour"
        if n + 1 > math.ceil(self.max_share * (sum(counts.values()) + 1) - ROUNDING):
            return "max_share"
        return None


NO_LIMITS = Limits()


def cheapest_first(
    offers: Sequence[Offer], limits: Limits = NO_LIMITS, before: Mapping[str, int] | None = None
) -> Iterator[Offer]:
    """Yield, one worker at a time, the offer with the cheapest tokens that no limit forbids.

    Offers with equal costs keep their order. A worker of the mix before counts as cheaper by `KEEP_BELOW`. A closed
    offer beyond the workers that it has comes after all others.

    Args:
        offers: what there is.
        limits: what the yielded workers together do not pass.
        before: kind -> workers of the mix that is in use.

    """
    counts: Counter[str] = Counter()
    dollars = 0.0
    before = before or {}

    def order(offer: Offer) -> tuple[bool, float]:
        n = counts[offer.kind]
        is_kept = n < before.get(offer.kind, 0)
        return bool(offer.closed) and n >= offer.n_present, offer.cost / (KEEP_BELOW if is_kept else 1.0)

    while possible := [offer for offer in offers if limits.reached_by(offer, counts, dollars) is None]:
        best = min(possible, key=order)
        counts[best.kind] += 1
        dollars += best.price_per_hour
        yield best


class Mix(NamedTuple):
    """How many workers of each offer."""

    workers: dict[str, int]
    limited_by: Limit | None = None
    """The limit that keeps it from doing all the work; None if it does."""


def choose_mix(
    offers: Sequence[Offer],
    work: float,
    limits: Limits = NO_LIMITS,
    before: Mapping[str, int] | None = None,
    *,
    by_count: bool = False,
) -> Mix:
    """Return the mix with the cheapest tokens that does the work of a number of mean workers, to the nearest worker.

    Args:
        offers: what there is.
        work: number of mean workers, at least 0.
        limits: what the mix does not pass.
        before: kind -> workers of the mix that is in use.
        by_count: `work` is a number of workers, whatever their speeds.

    """
    counts: Counter[str] = Counter({offer.kind: 0 for offer in offers})
    missing, before = work, before or {}
    for offer in cheapest_first(offers, limits, before):
        # One that is present is removed only if less than a quarter of it is needed: speeds are measured.
        least = 0.25 if counts[offer.kind] < before.get(offer.kind, 0) else 0.5
        size = 1.0 if by_count else offer.speed
        if missing < least * size:
            return Mix(dict(counts))
        counts[offer.kind] += 1
        missing -= size
    smallest = min((1.0 if by_count else offer.speed for offer in offers), default=math.inf)
    if missing < 0.5 * smallest:
        return Mix(dict(counts))
    dollars = dollars_of(offers, counts)
    reached = {limits.reached_by(offer, counts, dollars) for offer in offers}
    order: tuple[Limit, ...] = ("max_dollars_per_hour", "max_share")
    return Mix(dict(counts), next((limit for limit in order if limit in reached), "max_workers"))


def work_of(offers: Iterable[Offer], workers: Mapping[str, int]) -> float:
    """Return the number of mean workers that do the work of these."""
    return sum(workers.get(offer.kind, 0) * offer.speed for offer in offers)


def dollars_of(offers: Iterable[Offer], workers: Mapping[str, int]) -> float:
    """Return what these workers cost per hour."""
    return sum(workers.get(offer.kind, 0) * offer.price_per_hour for offer in offers)


def until_replaced(
    offers: Sequence[Offer], mix: Mapping[str, int], ready: Mapping[str, int], limits: Limits, *, by_count: bool = False
) -> dict[str, int]:
    """Return the mix, with the workers that it replaces as long as their successors are not ready.

    Args:
        offers: what there is.
        mix: kind -> workers to have in the end.
        ready: kind -> workers that are ready and do not drain.
        limits: those of the mix; replaced workers beyond the limit on dollars are given up at once.
        by_count: the mix is of a number of workers, whatever their speeds.

    """
    held = dict(mix)
    sizes = {offer.kind: 1.0 if by_count else offer.speed for offer in offers}
    missing = sum(max(0, mix[kind] - ready.get(kind, 0)) * size for kind, size in sizes.items())
    dollars = dollars_of(offers, mix)
    for offer in sorted(offers, key=lambda offer: offer.cost):
        for _ in range(max(0, ready.get(offer.kind, 0) - mix[offer.kind])):
            size = sizes[offer.kind]
            if missing < 0.5 * size or dollars + offer.price_per_hour > limits.dollars_per_hour + ROUNDING:
                break
            held[offer.kind] += 1
            missing -= size
            dollars += offer.price_per_hour
    return held


def explain(offers: Sequence[Offer], before: Mapping[str, int], mix: Mapping[str, int], limits: Limits) -> str:
    """Return one line that says why the mix changed; empty if it did not."""
    more = [offer for offer in offers if mix.get(offer.kind, 0) > before.get(offer.kind, 0)]
    fewer = [offer for offer in offers if mix.get(offer.kind, 0) < before.get(offer.kind, 0)]
    parts = []
    for offer in more:
        others = fewer or [other for other in offers if other not in more]
        rival = min(others, key=lambda other: other.cost, default=None)
        without = {**mix, offer.kind: mix[offer.kind] - 1}
        dollars = dollars_of(offers, without)
        why = _comparison(offer, rival, without, dollars, limits) if rival else "more work to do"
        parts.append(f"{mix[offer.kind]} x {offer.label}: {why}")
    if not more:
        parts = [f"{mix.get(offer.kind, 0)} x {offer.label}: these do the work" for offer in fewer]
    return "; ".join(parts)


def _comparison(offer: Offer, rival: Offer, others: Mapping[str, int], dollars: float, limits: Limits) -> str:
    """Return why a worker of an offer was added to `others`, which cost `dollars` per hour, and none of its rival."""
    if offer.cost < rival.cost:
        return f"{_percent(1 - offer.cost / rival.cost)} cheaper per token than {rival.label}"
    reached = limits.reached_by(rival, others, dollars)
    if rival.closed:
        why = f"{rival.label} {rival.closed}"
    elif reached == "max_workers":
        why = f"there are no more than {rival.n_workers} x {rival.label}"
    elif reached == "max_share":
        why = f"no more than {_percent(limits.max_share)} of the workers may be {rival.label}"
    elif reached == "max_dollars_per_hour":
        why = f"one more {rival.label} would cost more than {limits.dollars_per_hour:.4g} dollars per hour in all"
    elif offer.cost > rival.cost:
        why = f"{rival.label} is cheaper per token by less than {_percent(1 - 1 / KEEP_BELOW)}"
    else:
        why = f"as cheap per token as {rival.label}, and listed first"
    return why


def _percent(part: float) -> str:
    return f"{100 * part:.0f} %"


# --- what is known of each --------------------------------------------------------------------------------------------

HALF_LIFE_S = 3600.0
"""Time after which a preemption counts half: the hazard of an offer changes within hours."""
PRIOR_HOURS = 0.5
"""Hours of one worker that the expected preemptions of the settings count as much as."""
RETRY_S, LONGEST_RETRY_S = 10.0, 1800.0
"""Time for which an offer is closed after its first failure, and the longest: it doubles with each further one."""
UNFILLED_S = 300.0
"""Time after a machine's boot within which a worker must have joined: else the place has no capacity at present."""
NO_CAPACITY, NO_PRICE = "has no capacity", "has no known price"
AVERAGED_S = 1800.0
"""Time over which a throughput is averaged: several steps, so that the mix does not follow the phases of one."""


class Failure(NamedTuple):
    """Why a provider did not do all that it was asked for."""

    why: str = "starts no workers"
    """Continues the offer's name."""
    retry_s: float = RETRY_S
    """For how long the offer is closed at first."""
    workers: int | None = None
    """Workers that it has, starting ones included; None: unknown."""


@dataclass(slots=True)
class Record:
    """What was seen of one offer. Times are of the manager's clock."""

    worker_s: float = 0.0
    """Time of its workers, the recent one mostly: see `HALF_LIFE_S`."""
    preemptions: float = 0.0
    """Its preemptions in that time."""
    counted: int = 0
    """Its preemptions that the fleet has counted so far."""
    short_since: float | None = None
    """Since when fewer workers are there than were requested, and neither number has risen."""
    seen: tuple[int, int] = (0, 0)
    """Workers that were there, and requested ones, when it was observed last."""
    failures: int = 0
    """Failures in a row."""
    retry_at: float = -math.inf
    """It is closed until then."""
    why: str = ""
    """Why it was closed last."""
    n_workers: int = 0
    """Workers that were there or starting when it was closed last."""
    starting_until: float = -math.inf
    """Until then, those are expected to join."""

    def fail(
        self, why: str, n_workers: int, now: float, retry_s: float = RETRY_S, starting_until: float = -math.inf
    ) -> None:
        """Close the offer for a while, each time for longer."""
        self.retry_at, self.starting_until = now + min(retry_s * 2.0**self.failures, LONGEST_RETRY_S), starting_until
        self.failures, self.why, self.n_workers, self.short_since = self.failures + 1, why, n_workers, None

    def on_workers(self, n_workers: int, now: float) -> None:
        """Forget failures once more workers are there, or after a long time."""
        if self.failures and (n_workers > self.n_workers or now - self.retry_at > LONGEST_RETRY_S):
            self.failures, self.retry_at = 0, -math.inf


@dataclass(slots=True)
class OfferBook:
    """What the leader has seen of its offers."""

    pools: Sequence[Pool]
    records: dict[str, Record] = field(default_factory=dict)
    """By kind."""
    tokens_per_s: dict[str, float] = field(default_factory=dict)
    """GPU -> measured throughput of one worker, a mean over the last `AVERAGED_S`: it falls as samples get longer."""
    unpriced: Collection[str] = ()
    """Kinds whose provider has not told their price yet, so that no further workers are started."""
    unit: float | None = None
    """Tokens per second of one mean worker, in which all work is counted. It is the mean when the first throughput was
    known and never changes, whatever workers are present: numbers of mean workers stay comparable. None: unknown."""
    _observed_at: float | None = None
    _measured_s: dict[str, float] = field(default_factory=dict)
    """GPU -> time over which its throughput was measured, at most `AVERAGED_S`."""

    def __post_init__(self) -> None:
        """Start without records."""
        self.records = {pool.kind: Record() for pool in self.pools}
        self.unit = self._mean_tokens_per_s()

    def observe(self, fleet: Fleet, requested: Mapping[str, int], now: float) -> None:
        """Learn from the present fleet.

        Args:
            fleet: the workers.
            requested: kind -> workers that the provider was asked for and has accepted.
            now: the manager's clock.

        """
        elapsed_s = 0.0 if self._observed_at is None else now - self._observed_at
        present = present_workers(fleet, self.records)
        decay = 0.5 ** (elapsed_s / HALF_LIFE_S)
        for pool in self.pools:
            record, n, counted = self.records[pool.kind], present[pool.kind], fleet.lifetimes[pool.kind].preemptions
            record.worker_s = record.worker_s * decay + n * elapsed_s
            record.preemptions = record.preemptions * decay + counted - record.counted
            record.counted = counted
            record.on_workers(n, now)
            n_requested = requested.get(pool.kind, 0)
            has_risen = n > record.seen[0] or n_requested > record.seen[1]
            record.seen = n, n_requested
            if n >= n_requested:
                record.short_since = None
            elif record.short_since is None or has_risen:
                record.short_since = now
            elif now - record.short_since > UNFILLED_S + pool.boot_s:
                record.fail(NO_CAPACITY, n, now, UNFILLED_S)
        self._observed_at = now
        gpus = {pool.kind: _gpu(pool) for pool in self.pools}
        measured: dict[str, list[float]] = {}
        for worker in fleet.workers.values():
            is_trusted = worker.trust.is_full and is_pooled(worker, gpus)
            if is_trusted and (speed := worker.expected_tokens_per_s()):
                measured.setdefault(gpus[worker.joined.kind], []).append(speed)
        for gpu, speeds in measured.items():
            self._measured_s[gpu] = min(self._measured_s.get(gpu, 0.0) + elapsed_s, AVERAGED_S)
            before, weight = self.tokens_per_s.get(gpu), elapsed_s / max(self._measured_s[gpu], elapsed_s, 1.0)
            found = median(speeds)
            self.tokens_per_s[gpu] = found if before is None else before + weight * (found - before)
        self.unit = self.unit or self._mean_tokens_per_s()

    def _mean_tokens_per_s(self) -> float | None:
        """Return the mean throughput of the measured GPUs, else of the planned pools; None if there is neither."""
        speeds = list(self.tokens_per_s.values()) or [pool.tokens_per_s for pool in self.pools if pool.tokens_per_s]
        return fmean(speeds) if speeds else None

    def mean_workers(self, tokens_per_s: float | None) -> float:
        """Return how many mean workers generate this much; None or 0: a worker of unknown throughput."""
        if self.unit is None:
            return 1.0
        return (tokens_per_s or self._mean_tokens_per_s() or self.unit) / self.unit

    def offers(self, fleet: Fleet, prices: Mapping[str, float], now: float) -> list[Offer]:
        """Return the offers, in the order of the pools.

        An offer whose throughput is neither measured nor planned counts as the mean of the others.

        Args:
            fleet: the workers.
            prices: kind -> dollars per hour of one worker.
            now: the manager's clock.

        """
        found = present_workers(fleet, self.records)
        present = {pool.kind: self._n_expected(pool, found[pool.kind], now) for pool in self.pools}
        return [
            Offer(
                pool.kind,
                self._n_workers(pool, present[pool.kind]),
                prices.get(pool.kind, 0.0),
                availability(self.preemptions_per_s(pool), pool.boot_s + fleet.lifetimes[pool.kind].startup_s),
                self.mean_workers(self.tokens_per_s_of(pool)),
                pool.label,
                self._why_closed(pool, now),
                present[pool.kind],
            )
            for pool in self.pools
        ]

    def on_failure(self, kind: str, failure: Failure, n_present: int, now: float, n_accepted: int = 0) -> None:
        """Close an offer whose provider did not do all that it was asked for.

        Args:
            kind: the offer's.
            failure: what the provider told.
            n_present: its workers that have joined.
            now: the manager's clock.
            n_accepted: workers of the request before, if that did not fail; they may be starting.

        """
        limit_s = UNFILLED_S + next(pool.boot_s for pool in self.pools if pool.kind == kind)
        record = self.records[kind]
        n_workers, starting_until = failure.workers, now + limit_s
        if n_workers is None and now < record.starting_until:
            n_workers, starting_until = record.n_workers, record.starting_until
        elif n_workers is None:
            n_workers = n_accepted
            starting_until = limit_s + (now if record.short_since is None else record.short_since)
        if n_workers <= n_present:
            n_workers, starting_until = n_present, -math.inf
        record.fail(failure.why, n_workers, now, failure.retry_s, starting_until)

    def _n_expected(self, pool: Pool, n_present: int, now: float) -> int:
        """Return the workers of a pool that are there, with those that its provider has started although it failed."""
        record = self.records[pool.kind]
        return max(n_present, record.n_workers) if now < record.starting_until else n_present

    def _why_closed(self, pool: Pool, now: float) -> str:
        record = self.records[pool.kind]
        return record.why if now < record.retry_at else NO_PRICE if pool.kind in self.unpriced else ""

    def _n_workers(self, pool: Pool, n_present: int) -> int:
        """Return how many workers a pool may have: one more than it has if it lacked capacity, until one joins."""
        record = self.records[pool.kind]
        lacked = record.failures > 0 and record.why == NO_CAPACITY
        n_more = 0 if pool.kind in self.unpriced else 1 if lacked else pool.max_workers
        return min(pool.max_workers, n_present + n_more)

    def preemptions_per_s(self, pool: Pool) -> float:
        """Return the hazard of one worker of a pool."""
        record, prior_s = self.records[pool.kind], PRIOR_HOURS * HOUR_S
        return (record.preemptions + pool.preemptions_per_hour * PRIOR_HOURS) / (record.worker_s + prior_s)

    def tokens_per_s_of(self, pool: Pool) -> float | None:
        """Return the throughput of one worker of a pool: measured, else planned; None if it is unknown."""
        return self.tokens_per_s.get(_gpu(pool), pool.tokens_per_s)

    def dollars_per_million_tokens(self, pool: Pool, offer: Offer) -> float | None:
        """Return the expected dollars of a million tokens; None while the throughput is unknown."""
        tokens_per_s = self.tokens_per_s_of(pool)
        return 1e6 * offer.price_per_hour / (HOUR_S * tokens_per_s * offer.availability) if tokens_per_s else None


def _gpu(pool: Pool) -> str:
    return pool.gpu or pool.kind


def present_workers(fleet: Fleet, kinds: Collection[str]) -> Counter[str]:
    """Return how many preemptible workers of each kind do not drain."""
    workers = fleet.workers.values()
    return Counter(w.joined.kind for w in workers if is_pooled(w, kinds) and w.state != "draining")


def is_pooled(worker: Worker, kinds: Collection[str]) -> bool:
    """Return True if a worker is of one of these kinds, and preemptible."""
    return not worker.reserved and worker.joined.kind in kinds
