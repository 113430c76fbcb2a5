"""The mix of offers with the cheapest tokens: limits, cost, when it changes, and what is known of each offer."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlboost.services.rollout_manager.domain.measurements import MIN_OBSERVATIONS
from rlboost.services.rollout_manager.domain.offers import (
    KEEP_BELOW,
    RETRY_S,
    UNFILLED_S,
    Limits,
    Offer,
    OfferBook,
    Pool,
    choose_mix,
    dollars_of,
    explain,
    until_replaced,
    work_of,
)
from rlboost.services.rollout_manager.domain.workers import Fleet
from tests.support.builders import worker_joined

L4 = Offer("l4-b", 4, 0.4, speed=1.0, label="L4 in zone b")
A10G = Offer("a10g", 8, 0.9, speed=1.5, label="A10G")
FREE = Limits()


def offers(max_size: int = 4) -> st.SearchStrategy[list[Offer]]:
    prices, speeds = st.sampled_from([0.0, 0.3, 0.5, 1.0, 1.7]), st.sampled_from([0.5, 1.0, 1.5, 3.0])
    one = st.tuples(st.integers(0, 5), prices, speeds).map(lambda of: Offer("k", of[0], of[1], speed=of[2]))
    lists = st.lists(one, min_size=1, max_size=max_size)
    return lists.map(lambda found: [offer._replace(kind=f"k{i}") for i, offer in enumerate(found)])


@given(
    offers=offers(),
    work=st.floats(0, 30),
    dollars=st.floats(0, 12) | st.just(math.inf),
    share=st.floats(0.2, 1.0),
    before=st.lists(st.integers(0, 5), min_size=4, max_size=4),
)
def test_no_mix_passes_a_limit(
    offers: Sequence[Offer], work: float, dollars: float, share: float, before: Sequence[int]
) -> None:
    mix = choose_mix(offers, work, Limits(dollars, share), {f"k{i}": n for i, n in enumerate(before)})
    total = sum(mix.workers.values())
    assert all(0 <= mix.workers[offer.kind] <= offer.n_workers for offer in offers)
    assert dollars_of(offers, mix.workers) <= dollars + 1e-5
    assert all(n <= math.ceil(share * total - 1e-6) for n in mix.workers.values())
    if mix.limited_by is None:
        assert abs(work_of(offers, mix.workers) - work) <= 0.75 * max(offer.speed for offer in offers)


@given(offers=offers(3), work=st.floats(0, 12))
def test_no_other_mix_does_as_much_work_for_less(offers: Sequence[Offer], work: float) -> None:
    found = choose_mix(offers, work).workers
    done, paid = work_of(offers, found), dollars_of(offers, found)
    for counts in itertools.product(*(range(offer.n_workers + 1) for offer in offers)):
        other = {offer.kind: n for offer, n in zip(offers, counts, strict=True)}
        assert work_of(offers, other) < done - 1e-9 or dollars_of(offers, other) >= paid - 1e-9


@given(prices=st.lists(st.floats(0.91, 1.09), min_size=1, max_size=20))
def test_prices_that_fluctuate_by_less_than_a_tenth_change_nothing(prices: Sequence[float]) -> None:
    mix: Mapping[str, int] = {}
    seen = []
    for price in prices:
        fluctuating = [Offer("a", 9, 1.0), Offer("b", 9, price)]
        mix = choose_mix(fluctuating, 4, FREE, mix).workers
        seen.append(mix)
    assert all(one == seen[0] for one in seen)


def test_mix_moves_once_a_price_has_risen_enough() -> None:
    mix = choose_mix([Offer("a", 9, 1.0), Offer("b", 9, 1.05)], 4).workers
    assert mix == {"a": 4, "b": 0}
    for price, kept in ((1.05 * KEEP_BELOW - 0.01, 4), (1.05 * KEEP_BELOW + 0.01, 0)):
        assert choose_mix([Offer("a", 9, price), Offer("b", 9, 1.05)], 4, FREE, mix).workers["a"] == kept


def test_start_up_and_preemptions_make_tokens_dearer() -> None:
    cheap = [Offer("a", 9, 1.0, availability=0.5), Offer("b", 9, 1.5)]
    assert choose_mix(cheap, 2).workers == {"a": 0, "b": 2}


def test_present_worker_is_not_removed_for_a_speed_that_was_measured_a_little_lower() -> None:
    for speed in (1.0, 0.97, 1.03, 0.95):
        assert choose_mix([Offer("a", 9, 1.0, speed=speed)], 3, FREE, {"a": 3}).workers == {"a": 3}


def test_closed_offer_keeps_its_workers_and_gets_more_only_if_all_others_are_used() -> None:
    closed = [Offer("a", 9, 1.0, closed="has no capacity", n_present=1), Offer("b", 2, 5.0)]
    assert choose_mix(closed, 3).workers == {"a": 1, "b": 2}
    assert choose_mix(closed, 4).workers == {"a": 2, "b": 2}


# --- replacing workers --------------------------------------------------------------------------------------------


@given(
    mix=st.lists(st.integers(0, 4), min_size=3, max_size=3),
    ready=st.lists(st.integers(0, 4), min_size=3, max_size=3),
    dollars=st.floats(0, 40) | st.just(math.inf),
)
def test_workers_stay_until_their_successors_are_ready(
    mix: Sequence[int], ready: Sequence[int], dollars: float
) -> None:
    three = [Offer("k0", 4, 1.0), Offer("k1", 4, 2.0), Offer("k2", 4, 3.0)]
    wanted, there = ({f"k{i}": n for i, n in enumerate(one)} for one in (mix, ready))
    held = until_replaced(three, wanted, there, Limits(dollars))
    assert all(wanted[kind] <= held[kind] <= max(wanted[kind], there[kind]) for kind in held)
    assert dollars_of(three, held) <= max(dollars, dollars_of(three, wanted)) + 1e-5
    generating = sum(min(held[kind], there[kind]) for kind in held)
    assert generating <= max(sum(mix), sum(min(mix[i], ready[i]) for i in range(3)))
    if math.isinf(dollars):
        assert generating == min(sum(ready), max(sum(mix), sum(min(mix[i], ready[i]) for i in range(3))))


# --- explanations -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("offers", "before", "after", "limits", "text"),
    [
        ([L4, A10G], {"a10g": 2}, {"l4-b": 2}, FREE, "2 x L4 in zone b: 33 % cheaper per token than A10G"),
        ([L4, A10G], {"l4-b": 2}, {"l4-b": 1}, FREE, "1 x L4 in zone b: these do the work"),
        ([L4], {}, {"l4-b": 3}, FREE, "3 x L4 in zone b: more work to do"),
        (
            [L4, A10G],
            {"l4-b": 4},
            {"l4-b": 4, "a10g": 1},
            FREE,
            "1 x A10G: there are no more than 4 x L4 in zone b",
        ),
        (
            [L4, A10G],
            {"l4-b": 1},
            {"l4-b": 1, "a10g": 1},
            Limits(max_share=0.5),
            "1 x A10G: no more than 50 % of the workers may be L4 in zone b",
        ),
        (
            [L4._replace(closed="has no capacity"), A10G],
            {"l4-b": 1},
            {"l4-b": 1, "a10g": 1},
            FREE,
            "1 x A10G: L4 in zone b has no capacity",
        ),
        ([L4, A10G], {"l4-b": 2}, {"l4-b": 2}, FREE, ""),
    ],
)
def test_change_is_explained_in_one_line(
    offers: Sequence[Offer], before: dict[str, int], after: dict[str, int], limits: Limits, text: str
) -> None:
    assert explain(offers, before, after, limits) == text


# --- what is known of each offer ----------------------------------------------------------------------------------

POOLS = [
    Pool(kind="l4-a", price_per_hour=0.4, gpu="L4", place="zone a"),
    Pool(kind="l4-b", price_per_hour=0.4, gpu="L4", place="zone b", preemptions_per_hour=0.5, boot_s=1800.0),
    Pool(kind="a10g", price_per_hour=0.9, gpu="A10G", tokens_per_s=200.0),
]
PRICES = {pool.kind: pool.price_per_hour or 0.0 for pool in POOLS}


def fleet_of(*kinds: str) -> Fleet:
    fleet = Fleet(1e9, PRICES)
    for i, kind in enumerate(kinds):
        worker = fleet.join(worker_joined(f"w{i}", kind=kind), 0.0)
        assert worker is not None
        worker.trust.allowance = math.inf
        for _ in range(MIN_OBSERVATIONS):
            worker.profile.observe(4, 0, 100.0)
    return fleet


def test_throughput_is_measured_for_all_offers_of_a_gpu_and_planned_for_others() -> None:
    book, fleet = OfferBook(POOLS), fleet_of("l4-a")
    book.observe(fleet, {}, 0.0)
    a, b, a10g = book.offers(fleet, PRICES, 0.0)
    assert (a.speed, b.speed, a10g.speed) == pytest.approx((0.5, 0.5, 1.0), rel=0.01)
    assert book.dollars_per_million_tokens(POOLS[0], a) == pytest.approx(0.4 / 0.36, rel=0.01)


def test_planned_preemptions_are_replaced_by_measured_ones_and_forgotten_after_hours() -> None:
    book, fleet = OfferBook(POOLS), fleet_of("l4-a")
    planned = book.offers(fleet, PRICES, 0.0)[1].availability
    assert planned == pytest.approx(1 / (1 + 0.5 * 0.5))
    for at in range(0, 7200, 60):
        book.observe(fleet, {}, float(at))
    before = book.preemptions_per_s(POOLS[0])
    fleet.lifetimes["l4-a"].preemptions += 3
    book.observe(fleet, {}, 7200.0)
    risen = book.preemptions_per_s(POOLS[0])
    assert before == 0.0 < risen
    book.observe(fleet, {}, 7200.0 + 8 * 3600.0)
    assert book.preemptions_per_s(POOLS[0]) < risen / 100


def test_offer_without_capacity_is_closed_for_longer_each_time_until_workers_join() -> None:
    book, fleet = OfferBook(POOLS[:1]), fleet_of()

    def is_closed(at: float) -> bool:
        return bool(book.offers(fleet, PRICES, at)[0].closed)

    for at in (0.0, UNFILLED_S + 1):
        book.observe(fleet, {"l4-a": 2}, at)
    assert is_closed(UNFILLED_S + 2)
    assert not is_closed(2 * UNFILLED_S + 1)
    for at in (2 * UNFILLED_S + 1, 3 * UNFILLED_S + 2):
        book.observe(fleet, {"l4-a": 2}, at)
    assert is_closed(4.5 * UNFILLED_S)
    fleet.join(worker_joined("new", kind="l4-a"), 0.0)
    book.observe(fleet, {"l4-a": 2}, 4.5 * UNFILLED_S)
    assert not is_closed(4.5 * UNFILLED_S)


def test_place_without_capacity_is_probed_with_one_worker_until_one_joins() -> None:
    book, fleet = OfferBook(POOLS[:1]), fleet_of("l4-a")
    for at in (0.0, UNFILLED_S + 1):
        book.observe(fleet, {"l4-a": 5}, at)
    reopened = book.offers(fleet, PRICES, 2 * UNFILLED_S + 2)[0]
    assert (reopened.closed, reopened.n_workers) == ("", 2)
    fleet.join(worker_joined("new", kind="l4-a"), 0.0)
    book.observe(fleet, {"l4-a": 2}, 2 * UNFILLED_S + 3)
    assert book.offers(fleet, PRICES, 2 * UNFILLED_S + 3)[0].n_workers == POOLS[0].max_workers


def test_place_in_which_workers_keep_joining_or_more_are_requested_has_capacity() -> None:
    book, fleet = OfferBook(POOLS[:1]), fleet_of()
    for number in range(6):
        book.observe(fleet, {"l4-a": 9 if number < 4 else 12}, number * 0.9 * UNFILLED_S)
        if number < 3:
            fleet.join(worker_joined(f"w{number}", kind="l4-a"), 0.0)
        assert not book.records["l4-a"].failures
    book.observe(fleet, {"l4-a": 12}, 6 * UNFILLED_S)
    assert book.records["l4-a"].failures == 1


def test_one_worker_that_reports_a_wrong_throughput_does_not_change_its_offer() -> None:
    book, fleet = OfferBook(POOLS[:1]), fleet_of("l4-a", "l4-a", "l4-a", "l4-a")
    for worker, speed in zip(fleet.workers.values(), (1.0, 1.0, 1.1, 50.0), strict=True):
        worker.speed = speed
    book.observe(fleet, {}, 0.0)
    assert book.tokens_per_s["L4"] == pytest.approx(105.0, rel=0.02)
    for worker in fleet.workers.values():
        worker.trust.allowance, worker.speed = 4.0, 50.0
    book.observe(fleet, {}, 1.0)
    assert book.tokens_per_s["L4"] == pytest.approx(105.0, rel=0.02)


def test_time_of_a_closed_offer_doubles_from_the_first_failure() -> None:
    book = OfferBook(POOLS[:1])
    record = book.records["l4-a"]
    times = []
    for _ in range(3):
        record.fail("starts no workers", 0, 0.0)
        times.append(record.retry_at)
    assert times == [RETRY_S, 2 * RETRY_S, 4 * RETRY_S]
