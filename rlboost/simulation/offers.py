"""Simulates a fleet that is bought from several offers, over traces of their prices and of their capacity.

    replay(market, Replay(tokens_per_s=4000.0), "mix")

The mix, its limits, what is learned of each offer, and when workers are replaced are decided by the rollout manager's
own code, once per minute of virtual time. Markets, machines and tokens are simulated: a worker costs from its request
on, generates once it has started, and is preempted when the trace reclaims its instance.
"""

from __future__ import annotations

import math
import random
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from rlboost.services.rollout_manager.domain.allocation import Autoscaler, FleetView
from rlboost.services.rollout_manager.domain.offers import Offer, OfferBook, Pool, choose_mix
from rlboost.services.rollout_manager.domain.workers import Fleet
from rlboost.shared.job.fleet import HOUR_S
from rlboost.shared.messages import WorkerJoined
from rlboost.shared.messages.codec import PROTOCOL
from rlboost.simulation.traces import FleetTrace

TICK_S = 60.0
"""Virtual time between two decisions."""
SCALE_IN_DELAY_S = 300.0
Policy = Literal["mix", "cheapest-now"]


class PricePath(NamedTuple):
    """Dollars per hour of one worker, as steps."""

    at_s: Sequence[float]
    """Times of changes, from 0 on, in order."""
    dollars: Sequence[float]

    def at(self, now: float) -> float:
        """Return the price at a time."""
        return self.dollars[max(0, bisect_right(self.at_s, now) - 1)]


def price_path(mean: float, duration_s: float, seed: int, every_s: float = HOUR_S) -> PricePath:
    """Return random prices, the same for the same seed: each hour a tenth of the way back to the mean, and noise.

    In one hour of fifty the price jumps by a factor of up to two, as spot prices do when capacity gets scarce.
    """
    draw = random.Random(seed)  # noqa: S311 - not a secret
    level, times, dollars = 0.0, [], []
    for i in range(math.ceil(duration_s / every_s) + 1):
        level = 0.9 * level + draw.gauss(0.0, 0.05)
        if draw.random() < 0.02:
            level += draw.choice((-1.0, 1.0)) * draw.uniform(0.2, math.log(2.0))
        times.append(i * every_s)
        dollars.append(mean * math.exp(level))
    return PricePath(times, dollars)


@dataclass(frozen=True, slots=True)
class MarketOffer:
    """An offer, and what becomes of it."""

    pool: Pool
    """With its planned throughput, `tokens_per_s`."""
    prices: PricePath
    trace: FleetTrace
    """The instances that can be had."""
    startup_s: float = 120.0
    """From the request of an instance until its worker generates."""

    @property
    def tokens_per_s(self) -> float:
        """Return the throughput of one worker."""
        return self.pool.tokens_per_s or 1.0


class Replay(NamedTuple):
    """What the fleet is for."""

    tokens_per_s: float
    """The throughput worth having; more is of no use."""
    reserved_tokens_per_s: float = 0.0
    reserved_dollars_per_hour: float = 0.0
    """What generates, and what costs, without any spot worker."""
    max_share: float = 1.0


class ReplayResult(NamedTuple):
    """What was paid and generated."""

    dollars: float
    tokens: float
    preemptions: int = 0
    starts: int = 0
    reasons: tuple[str, ...] = ()
    """Why the mix changed, one line each."""

    @property
    def dollars_per_million_tokens(self) -> float:
        """Return the cost of a million tokens."""
        return 1e6 * self.dollars / self.tokens


@dataclass(slots=True)
class _Machine:
    kind: str
    instance: str
    ready_at: float
    worker: str


class _Market:
    """The fleet in virtual time."""

    def __init__(self, market: Sequence[MarketOffer], replay: Replay) -> None:
        self.offers = {offer.pool.kind: offer for offer in market}
        self.replay = replay
        self.fleet = Fleet(lease_s=1e9, prices={})
        self.machines: list[_Machine] = []
        self.dollars = self.tokens = 0.0
        self.preemptions = self.starts = 0
        self.available: dict[str, dict[str, None]] = {kind: {} for kind in self.offers}
        self._next = dict.fromkeys(self.offers, 0)

    def advance(self, now: float) -> None:
        """Apply the events of the traces up to a time, and preempt the workers of reclaimed instances."""
        for kind, offer in self.offers.items():
            events, available = offer.trace.events, self.available[kind]
            while self._next[kind] < len(events) and events[self._next[kind]].at_s <= now:
                event = events[self._next[kind]]
                self._next[kind] += 1
                if event.kind == "add":
                    available[event.instance] = None
                    continue
                available.pop(event.instance)
                for machine in [m for m in self.machines if (m.kind, m.instance) == (kind, event.instance)]:
                    self.preemptions += 1
                    self.fleet.lifetimes[kind].preemptions += 1
                    self._remove(machine)
        for machine in self.machines:
            worker = self.fleet.workers[machine.worker]
            worker.last_heartbeat_at = now
            if worker.state == "joining" and now >= machine.ready_at:
                worker.state, worker.version = "ready", 0
                self.fleet.lifetimes[machine.kind].on_startup(worker.age_s)

    def scale(self, kind: str, target: int, now: float) -> None:
        """Have this many machines of a kind, as far as there is capacity; those that start are given up first."""
        mine = [machine for machine in self.machines if machine.kind == kind]
        for machine in sorted(mine, key=lambda machine: -machine.ready_at)[: max(0, len(mine) - target)]:
            self._remove(machine)
        used = {machine.instance for machine in mine}
        free = [instance for instance in self.available[kind] if instance not in used]
        for instance in free[: max(0, target - len(mine))]:
            self.starts += 1
            name = f"{kind}-{self.starts}"
            joined = WorkerJoined(
                worker=name,
                role="preemptible",
                kind=kind,
                slots=1,
                host="",
                pid=0,
                price_per_hour=0.0,
                at=now,
                protocol=PROTOCOL,
            )
            self.fleet.join(joined, now)
            self.machines.append(_Machine(kind, instance, now + self.offers[kind].startup_s, name))

    def count(self, now: float) -> None:
        """Count what is paid and generated until the next tick."""
        ready = sum(self.offers[m.kind].tokens_per_s for m in self.machines if now >= m.ready_at)
        spent = sum(self.offers[m.kind].prices.at(now) for m in self.machines)
        self.dollars += (spent + self.replay.reserved_dollars_per_hour) * TICK_S / HOUR_S
        self.tokens += (min(ready, self.replay.tokens_per_s) + self.replay.reserved_tokens_per_s) * TICK_S

    def _remove(self, machine: _Machine) -> None:
        self.machines.remove(machine)
        self.fleet.remove(self.fleet.workers[machine.worker], "left", "")


def duration_s(market: Iterable[MarketOffer]) -> float:
    """Return how long all traces last."""
    return min(offer.trace.duration_s for offer in market)


def replay(market: Sequence[MarketOffer], what: Replay, policy: Policy) -> ReplayResult:
    """Buy a fleet over the traces.

    Args:
        market: the offers.
        what: what the fleet is for.
        policy: `mix` decides as the manager does. `cheapest-now` has at each moment the offers whose price is lowest
            for their throughput, whatever their start-up and preemptions. With one offer, both keep to one kind.

    """
    state = _Market(market, what)
    book = OfferBook([offer.pool for offer in market])
    scaler = Autoscaler(None, SCALE_IN_DELAY_S, what.max_share)
    mean = sum(offer.tokens_per_s for offer in market) / len(market)
    reasons: list[str] = []
    requested: dict[str, int] = {}
    for tick in range(int(duration_s(market) / TICK_S)):
        now = tick * TICK_S
        state.advance(now)
        prices = {offer.pool.kind: offer.prices.at(now) for offer in market}
        book.observe(state.fleet, requested, now)
        offers = book.offers(state.fleet, prices, now)
        if policy == "mix":
            present = {offer.kind: offer.n_present for offer in offers}
            ready = {
                kind: sum(m.kind == kind and state.fleet.workers[m.worker].state == "ready" for m in state.machines)
                for kind in present
            }
            scaler.decide(FleetView(what.tokens_per_s / mean, offers, present, ready), None, now)
            targets = scaler.targets
            if scaler.reason and (not reasons or reasons[-1] != scaler.reason):
                reasons.append(scaler.reason)
        else:
            capacity = {kind: len(state.available[kind]) for kind in prices}
            now_only = [
                Offer(one.kind, capacity[one.kind], one.price_per_hour, speed=one.speed, label=one.label)
                for one in offers
            ]
            targets = choose_mix(now_only, what.tokens_per_s / mean).workers
        for kind, target in targets.items():
            state.scale(kind, target, now)
        requested = dict(targets)
        state.count(now)
    return ReplayResult(state.dollars, state.tokens, state.preemptions, state.starts, tuple(reasons))


def hindsight_bound(market: Sequence[MarketOffer], what: Replay) -> ReplayResult:
    """Return dollars and tokens whose ratio no policy is below, also one that knows the traces.

    At each moment it has the cheapest workers that exist then, in fractions, without start-up, preemptions or cost of
    a change, and none that would raise the ratio.
    """
    moments = []
    state = _Market(market, what)
    for tick in range(int(duration_s(market) / TICK_S)):
        now = tick * TICK_S
        state.advance(now)
        speeds = [
            (offer.prices.at(now), offer.tokens_per_s, len(state.available[kind]))
            for kind, offer in state.offers.items()
        ]
        moments.append(sorted(speeds, key=lambda one: one[0] / one[1]))
    ratio = math.inf
    while True:
        dollars = tokens = 0.0
        for offers in moments:
            missing = what.tokens_per_s
            dollars += what.reserved_dollars_per_hour * TICK_S / HOUR_S
            tokens += what.reserved_tokens_per_s * TICK_S
            for price, speed, n in offers:
                if price / HOUR_S < ratio * speed:
                    part = min(missing, n * speed)
                    missing -= part
                    dollars += part / speed * price * TICK_S / HOUR_S
                    tokens += part * TICK_S
        if not dollars < ratio * tokens * (1 - 1e-9):
            return ReplayResult(dollars, tokens)
        ratio = dollars / tokens
