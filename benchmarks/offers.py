"""What a mix of offers costs over traces of prices and capacity, against hindsight, one kind, and the cheapest now.

    python -m benchmarks.offers [--seeds 5] [--hours 10] [--startup-s 120] [--trace FILE ...]

Four offers: L4 in two zones, A10G and L40S. Their prices are generated, as is their capacity, unless recorded traces
are given, which the offers take in turn, each from another hour on. The fleet should generate 4,000 tokens per second
next to a reserved machine. One JSON line per seed, with dollars per million tokens relative to `hindsight`, a bound
that no policy passes, also one that knows the traces (no start-up, no preemption, fractions of workers):

- `mix`: the rollout manager's decisions;
- `cheapest_now`: at each minute the lowest price per token, whatever is lost by a change;
- `one_kind`: the mean over the offers, each used alone; `best_kind`: the best of them, known in hindsight only.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from rlboost.services.rollout_manager.domain.autoscale import Autoscaler, FleetView
from rlboost.services.rollout_manager.domain.offers import Offer, OfferBook, Pool, choose_mix
from rlboost.services.rollout_manager.domain.workers import Fleet
from rlboost.shared.job.fleet import HOUR_S
from rlboost.shared.messages import WorkerJoined
from rlboost.shared.messages.codec import PROTOCOL
from rlboost.simulation.traces import G4DN, FleetTrace, generate_trace, read_trace

# --- A fleet that is bought from several offers, in virtual time ------------------------------------------------------
# A worker costs from its request on, generates once it has started, and is preempted when the trace reclaims its
# instance. The mix is decided by the rollout manager's own code, once per minute of virtual time.


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
    draw = random.Random(seed)
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


# --- The benchmark ----------------------------------------------------------------------------------------------------


KINDS = {
    # kind: (GPU, place, mean dollars per hour, tokens per second of one worker)
    "l4-a": ("L4", "zone a", 0.28, 500.0),
    "l4-b": ("L4", "zone b", 0.28, 500.0),
    "a10g": ("A10G", "", 0.45, 750.0),
    "l40s": ("L40S", "", 0.85, 1500.0),
}
WHAT = Replay(tokens_per_s=4000.0, reserved_tokens_per_s=2000.0, reserved_dollars_per_hour=4.0)


def market(seed: int, hours: float, startup_s: float, traces: list[FleetTrace]) -> list[MarketOffer]:
    offers = []
    for i, (kind, (gpu, place, dollars, tokens_per_s)) in enumerate(KINDS.items()):
        number = seed * len(KINDS) + i
        if traces:
            whole = traces[number % len(traces)]
            start_s = (0.37 * number * whole.duration_s) % max(1.0, whole.duration_s - hours * 3600)
            trace = whole.between(start_s, start_s + hours * 3600)
        else:
            trace = generate_trace(G4DN, number).between(0.0, hours * 3600)
        pool = Pool(kind=kind, gpu=gpu, place=place, tokens_per_s=tokens_per_s)
        offers.append(MarketOffer(pool, price_path(dollars, hours * 3600, number), trace, startup_s))
    return offers


def figures(seed: int, hours: float, startup_s: float, traces: list[FleetTrace]) -> dict[str, float | int | str]:
    offers = market(seed, hours, startup_s, traces)
    bound = hindsight_bound(offers, WHAT).dollars_per_million_tokens
    mix, cheapest = (replay(offers, WHAT, policy) for policy in ("mix", "cheapest-now"))
    alone = [replay([offer], WHAT, "mix").dollars_per_million_tokens / bound for offer in offers]
    return {
        "seed": seed,
        "hindsight": round(bound, 4),
        "mix": round(mix.dollars_per_million_tokens / bound, 3),
        "cheapest_now": round(cheapest.dollars_per_million_tokens / bound, 3),
        "one_kind": round(statistics.mean(alone), 3),
        "best_kind": round(min(alone), 3),
        "starts": mix.starts,
        "starts_cheapest_now": cheapest.starts,
        "preemptions": mix.preemptions,
        "last_reason": mix.reasons[-1],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--hours", type=float, default=10.0)
    parser.add_argument("--startup-s", type=float, default=120.0, help="from a request until the worker generates")
    parser.add_argument("--trace", type=Path, nargs="*", default=[], help="recorded capacity of instances")
    options = parser.parse_args()
    traces = [read_trace(path) for path in options.trace]
    for seed in range(options.seeds):
        print(json.dumps(figures(seed, options.hours, options.startup_s, traces)), flush=True)


if __name__ == "__main__":
    main()
