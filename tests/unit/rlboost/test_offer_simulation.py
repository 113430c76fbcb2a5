"""Fleets that are bought from several offers over traces: what they cost against hindsight, and what they do."""

from __future__ import annotations

import pytest

from benchmarks.offers import MarketOffer, PricePath, Replay, hindsight_bound, price_path, replay
from rlboost.services.rollout_manager.domain.offers import Pool
from rlboost.simulation.traces import FleetEvent, FleetTrace

HOURS = 2
WHAT = Replay(tokens_per_s=200.0, reserved_tokens_per_s=100.0, reserved_dollars_per_hour=2.0)


def offer(
    kind: str, prices: PricePath | float, trace: FleetTrace | None = None, startup_s: float = 60.0
) -> MarketOffer:
    path = PricePath([0.0], [prices]) if isinstance(prices, float) else prices
    return MarketOffer(
        Pool(kind=kind, tokens_per_s=100.0), path, trace or FleetTrace.constant(4, HOURS * 3600), startup_s=startup_s
    )


def test_constant_offer_costs_what_hindsight_does_but_for_the_start_up() -> None:
    market = [offer("a", 1.0), offer("b", 2.0)]
    bound, mix = hindsight_bound(market, WHAT), replay(market, WHAT, "mix")
    assert bound.dollars == pytest.approx(HOURS * 4.0)
    assert bound.tokens == pytest.approx(HOURS * 3600 * 300.0)
    assert mix.dollars == pytest.approx(HOURS * 4.0)
    assert mix.tokens == pytest.approx(HOURS * 3600 * 300.0 - 60 * 200.0)
    assert (mix.starts, mix.preemptions) == (2, 0)


def test_fleet_moves_to_the_offer_that_has_become_cheaper_and_loses_no_throughput() -> None:
    market = [offer("a", PricePath([0.0, 3600.0], [1.0, 3.0])), offer("b", 1.5)]
    mix = replay(market, WHAT, "mix")
    assert mix.reasons == ("2 x a: 33 % cheaper per token than b", "2 x b: 50 % cheaper per token than a")
    assert mix.tokens == pytest.approx(HOURS * 3600 * 300.0 - 60 * 200.0)


def test_fleet_leaves_an_offer_whose_workers_are_reclaimed() -> None:
    events = []
    for i in range(0, HOURS * 3600, 240):
        events += [FleetEvent(float(i), "add", f"i{i}-{n}") for n in range(2)]
        events += [FleetEvent(i + 240.0, "remove", f"i{i}-{n}") for n in range(2)]
    trace = FleetTrace(tuple(sorted(events, key=lambda event: event.at_s)), HOURS * 3600.0)
    market = [offer("a", 1.0, trace, startup_s=120.0), offer("b", 1.2, startup_s=120.0)]
    mix, cheapest = (replay(market, WHAT, policy) for policy in ("mix", "cheapest-now"))
    assert mix.preemptions < cheapest.preemptions / 2
    assert mix.dollars_per_million_tokens < cheapest.dollars_per_million_tokens


@pytest.mark.parametrize("seed", range(3))
def test_no_policy_is_below_the_bound(seed: int) -> None:
    paths = [price_path(1.0, HOURS * 3600, 10 * seed + i, every_s=600.0) for i in range(3)]
    market = [offer(kind, path) for kind, path in zip("abc", paths, strict=True)]
    bound = hindsight_bound(market, WHAT).dollars_per_million_tokens
    for policy in ("mix", "cheapest-now"):
        assert replay(market, WHAT, policy).dollars_per_million_tokens >= bound
