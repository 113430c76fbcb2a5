"""Placement: the worker for the next sample, the queue order, rebalancing and fair shares."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlboost.services.rollout_manager.domain.decide import AllocatedWorker, Demand, fair_shares, reallocate, shares_of
from rlboost.services.rollout_manager.domain.effects import Now
from rlboost.services.rollout_manager.domain.jobs import LengthEstimates
from rlboost.services.rollout_manager.domain.measurements import MIN_OBSERVATIONS, Profile
from rlboost.services.rollout_manager.domain.placement import (
    Candidates,
    RunningSample,
    WorkerLoad,
    admits,
    has_capacity,
    select_migrations,
    set_batch_cap,
)
from rlboost.services.rollout_manager.domain.queue import Requirement, SampleQueue
from rlboost.services.rollout_manager.domain.tokens import Sample
from rlboost.services.rollout_manager.domain.workers import Fleet, Worker
from rlboost.shared.ids import SampleId
from rlboost.shared.messages import RESUMES_GRAMMAR, Sampling, WorkerHeartbeat
from rlboost.shared.wire import I32, pack
from tests.support.builders import group_requested, heartbeat, samples_of, worker_joined


def profile(fixed_s: float, each_s: float) -> Profile:
    made = Profile()
    for running in (1, 4, 16, 64) * int(MIN_OBSERVATIONS):
        made.observe(running, 0, running / (fixed_s + each_s * running))
    return made


def worker(name: str, slots: int, held: int = 0, known: Profile | None = None, kv_tokens: int = 0) -> Worker:
    joined = worker_joined(name, slots=slots, kv_tokens=kv_tokens)
    made = Worker(joined, 0.0, samples=samples_of(held), profile=known or Profile())
    set_batch_cap(made, 0.0)
    return made


def sample(n_tokens: int, **sampling: Any) -> Sample:
    """Return a sample that ends after at most this many tokens, prompt included."""
    request = group_requested(0, sampling=Sampling(max_tokens=n_tokens - 2, **sampling))
    return Sample(request.group, request, "1-0", 0)


def place(n: int, workers: list[Worker]) -> Counter[str]:
    """Hand out `n` samples as the manager does."""
    candidates, chosen = Candidates(workers, Profile()), Counter[str]()
    while chosen.total() < n and (best := candidates.best()) is not None:
        chosen[best.id] += 1
        best.samples = samples_of(len(best.samples) + 1)
    return chosen


# --- profiles ---


def test_profile_fits_throughputs_at_several_batch_sizes() -> None:
    found = profile(0.02, 0.001)
    assert found.known
    assert found.fixed_s == pytest.approx(0.02)
    assert found.each_s == pytest.approx(0.001)
    assert found.tokens_per_s(20, 0) == pytest.approx(20 / 0.04)


def test_batch_cap_is_where_more_samples_hardly_add_throughput() -> None:
    flat, steep = profile(0.001, 0.001), profile(1.0, 0.0001)
    assert flat.plateau(64, 0.9, 0.0) < 16
    assert steep.plateau(64, 0.9, 0.0) == 58
    assert flat.tokens_per_s(flat.plateau(64, 0.9, 0.0) + 1, 0) >= 0.9 * flat.tokens_per_s(64, 0)


def test_batch_cap_without_a_profile_is_all_slots() -> None:
    assert Profile().plateau(64, 0.9, 100.0) == 64


def test_profile_separates_cost_per_sample_and_per_kv_token() -> None:
    found = Profile()
    for running in (1, 4, 16, 64):
        for tokens in (100, 3000, 50_000, 900):
            found.observe(running, tokens, running / (0.02 + 0.001 * running + 1e-7 * tokens))
    assert found.step_s(10, 20_000) == pytest.approx(0.02 + 0.01 + 0.002, rel=0.01)


def test_profile_of_a_varying_speed_has_the_mean_throughput() -> None:
    found = Profile()
    for number in range(100):
        found.observe(8, 0, 100.0 if number % 2 else 500.0)
    assert found.tokens_per_s(8, 0) == pytest.approx(300.0, rel=0.02)


@given(st.lists(st.tuples(st.integers(1, 256), st.integers(0, 10**6), st.floats(0.1, 1e5)), min_size=1, max_size=60))
def test_profile_terms_are_never_negative(seen: list[tuple[int, int, float]]) -> None:
    made = Profile()
    for running, tokens, tokens_per_s in seen:
        made.observe(running, tokens, tokens_per_s)
        assert min(made.fixed_s, made.each_s, made.token_s) >= 0
        assert made.step_s(1, 1) > 0


def drafting_profile() -> Profile:
    """Return the profile of an engine that gets 2.5 tokens from a pass of up to 16 samples."""
    made = profile(0.02, 0.001)
    for running in (1, 2, 4, 8, 16) * MIN_OBSERVATIONS * 8:
        made.observe(running, 0, running / (0.02 + 0.0025 * running), 2.5)
    return made


def test_profile_with_drafts_follows_both_regimes() -> None:
    found, plain = drafting_profile(), profile(0.02, 0.001)
    for running in (1, 8, 16):
        assert found.step_s(running, 0) == pytest.approx((0.02 + 0.0025 * running) / 2.5, rel=0.01)
        assert found.batch_share(running, 0) == pytest.approx(1 - 0.02 / (0.02 + 0.0025 * running), rel=0.01)
    for running in (17, 32, 64):
        assert found.step_s(running, 0) == plain.step_s(running, 0), "drafts were not seen in so large a batch"
        assert found.batch_share(running, 0) == plain.batch_share(running, 0)


def test_drafts_of_small_batches_do_not_lower_the_batch_cap() -> None:
    plain, found = profile(0.02, 0.001), drafting_profile()
    assert found.plateau(64, 0.9, 0.0) == plain.plateau(64, 0.9, 0.0)
    for running in range(1, 65):
        assert found.step_s(running, 0) <= plain.step_s(running, 0)


def test_batch_cap_is_that_of_drafts_where_no_batch_without_is_faster() -> None:
    found = profile(0.005, 0.001)
    for running in (1, 4, 16) * MIN_OBSERVATIONS * 10:
        found.observe(running, 0, running / (0.005 + 0.0011 * running), 2.5)
    cap = found.plateau(64, 0.9, 0.0)
    assert cap < 16
    assert found.tokens_per_s(cap + 1, 0) >= 0.9 * found.tokens_per_s(16, 0) > found.tokens_per_s(64, 0)


def test_engine_that_always_drafts_has_one_regime() -> None:
    found = Profile()
    for running in (1, 4, 16) * MIN_OBSERVATIONS * 10:
        found.observe(running, 0, running / (0.02 + 0.001 * running), 2.0)
    assert found.known
    for running in (1, 8, 16):
        assert found.step_s(running, 0) == pytest.approx((0.02 + 0.001 * running) / 2.0, rel=0.01)


def test_few_wrong_reports_of_drafts_in_large_batches_change_little() -> None:
    found = drafting_profile()
    for _ in range(3):
        found.observe(60, 0, 60 / 0.08, 2.5)
    assert found.drafted < 20
    assert found.step_s(32, 0) == pytest.approx(0.052)
    for _ in range(20):
        found.observe(12, 0, 12 / 0.032)
    assert 11 < found.drafted < 12, "now only smaller batches have drafts"


@pytest.mark.parametrize("wrong", [1, 5])
def test_few_wrong_reports_of_drafts_at_first_do_not_keep_the_right_ones_from_counting(wrong: int) -> None:
    found = Profile()
    for _ in range(wrong):
        found.observe(16, 0, 16 / 0.036, 64.0)
    assert (found.drafted == 0) == (wrong == 1)
    for _ in range(200):
        found.observe(16, 0, 16 / 0.036)
    assert found.known
    assert found.step_s(16, 0) == pytest.approx(0.036, rel=0.01)


PARTS = st.tuples(st.floats(1e-4, 0.1), st.floats(0.0, 0.01), st.floats(0.0, 1e-5), st.floats(0.0, 0.01))
FASTER = st.tuples(*[st.floats(0.2, 1.0)] * 4)


@given(PARTS, FASTER, st.floats(1.0, 4.0), st.floats(1.0, 2.0), st.integers(0, 64), st.floats(0.0, 5e3))
def test_speedup_of_a_part_of_an_engine_slows_no_batch(
    parts: tuple[float, ...],
    factors: tuple[float, ...],
    tokens_per_pass: float,
    more_tokens: float,
    drafted: int,
    tokens_each: float,
) -> None:
    """Whatever part of an engine becomes faster, each batch is at least as fast, and so is the one at the cap."""

    def made(factors: tuple[float, ...], tokens_per_pass: float) -> Profile:
        fixed_s, each_s, token_s, verify_s = (value * by for value, by in zip(parts, factors, strict=True))
        return Profile(fixed_s, each_s, token_s, verify_s, tokens_per_pass, drafted, observed=MIN_OBSERVATIONS)

    before, after = made((1.0, 1.0, 1.0, 1.0), tokens_per_pass), made(factors, tokens_per_pass * more_tokens)
    for running in range(1, 65):
        assert after.step_s(running, running * tokens_each) <= before.step_s(running, running * tokens_each) * 1.000001
    best = max(before.tokens_per_s(running, running * tokens_each) for running in range(1, 65))
    cap = after.plateau(64, 0.9, tokens_each)
    at_cap = max(after.tokens_per_s(running, running * tokens_each) for running in (cap, min(cap + 1, 64)))
    assert at_cap >= 0.899 * best


def test_heartbeats_teach_what_drafts_take_and_give() -> None:
    known = Profile()
    seen = Worker(worker_joined("w", slots=64), 0.0, profile=known)
    for running in (1, 2, 4, 8, 16, 32, 64) * MIN_OBSERVATIONS * 8:
        pass_s, per_pass = (0.02 + 0.002 * running, 2.5) if running <= 8 else (0.02 + 0.001 * running, 1.0)
        seen.on_heartbeat(heartbeat(running=running, batch=running, step_s=pass_s, tokens_per_pass=per_pass), 10.0)
    assert known.step_s(4, 0) == pytest.approx(0.028 / 2.5, rel=0.05)
    assert known.step_s(32, 0) == pytest.approx(0.052, rel=0.02)
    assert seen.speed == pytest.approx(1.0, abs=0.1)


# --- placement ---


def test_samples_go_to_the_worker_with_fewest_pending() -> None:
    chosen = place(2, [worker("full", 4, held=4), worker("free", 4, held=2)])
    assert chosen == {"free": 2}


def test_less_loaded_worker_gets_more_samples() -> None:
    assert place(6, [worker("a", 8, held=6), worker("b", 8)])["b"] >= 5


def test_samples_go_to_the_fastest_worker() -> None:
    fast, slow = worker("fast", 64, known=profile(0.02, 0.0001)), worker("slow", 64, known=profile(0.02, 0.0001))
    slow.speed = 0.3
    assert place(20, [fast, slow]) == {"fast": 20}


def test_worker_with_full_kv_cache_has_no_capacity() -> None:
    one = worker("a", 8, kv_tokens=1000)
    one.kv.held = 900
    assert not has_capacity(one)
    one.kv.held = 500
    assert has_capacity(one)


def test_admits_any_length_unless_the_engine_reports_a_limit() -> None:
    one = worker("a", 8)
    assert admits(one, sample(100_000))
    one.max_request_tokens = 64
    assert admits(one, sample(64))
    assert not admits(one, sample(65))


def test_samples_with_routed_experts_need_an_engine_that_returns_them() -> None:
    one, replayed = worker("a", 8), sample(8, routed_experts=(2, 2, 8))
    assert admits(one, replayed)
    one.returns_routed_experts = False
    assert not admits(one, replayed)
    assert admits(one, sample(8))


def test_options_of_clients_need_an_engine_that_supports_them() -> None:
    one, asked = worker("a", 8), sample(8, top_k=5, grammar="{}")
    assert not admits(one, asked)
    one.sampling_options = frozenset({"top_k", "grammar", "min_p"})
    assert admits(one, asked)
    asked.tokens += bytes(4)
    assert not admits(one, asked), "its release does not continue grammars"
    one.sampling_options |= {RESUMES_GRAMMAR}
    assert admits(one, asked)


@given(st.lists(st.tuples(st.integers(1, 64), st.integers(0, 80)), max_size=6), st.integers(0, 200))
def test_placement_fills_all_capacity_and_no_more(shape: list[tuple[int, int]], n: int) -> None:
    workers = [worker(f"w{i}", slots, held) for i, (slots, held) in enumerate(shape)]
    room = sum(max(0, w.batch_cap + w.headroom - w.load) for w in workers)
    before = {w.id: w.load for w in workers}
    chosen = place(n, workers)
    assert chosen.total() == min(n, room)
    for w in workers:
        assert chosen[w.id] <= max(0, w.batch_cap + w.headroom - before[w.id])


CHANGES: dict[str, Callable[[Fleet, Worker], object]] = {
    "suspended": lambda _, worker: setattr(worker, "assigned_active", False),
    "heartbeat": lambda fleet, worker: fleet.on_heartbeat(worker, ready(version=1), 1.0),
    "assigned": lambda _, worker: setattr(worker, "assigned_version", ("j", 1)),
    "noticed": lambda fleet, worker: fleet.on_notice(worker),
    "drained": lambda fleet, worker: fleet.drain(worker, Now(1.0, 1.0), "a test"),
}


def ready(**fields: object) -> WorkerHeartbeat:
    return heartbeat("w", **{"state": "ready", "job_id": "j", "version": 0} | fields)


@pytest.mark.parametrize("change", CHANGES)
def test_worker_that_generates_no_more_meets_no_requirement(change: str) -> None:
    fleet, requirement = Fleet(1e9, {}), Requirement("j", 0, 0)
    fleet.join(worker_joined("w"), 0.0)
    only = fleet.workers["w"]
    assert not requirement.is_met_by(only)
    fleet.on_heartbeat(only, ready(), 0.0)
    assert requirement.is_met_by(only)
    CHANGES[change](fleet, only)
    assert not requirement.is_met_by(only)


# --- order ---


def group(number: int, n: int = 4, max_tokens: int = 100) -> list[Sample]:
    request = group_requested(number, n=n, prompt=[number + 1], max_tokens=max_tokens)
    return [Sample(request.group + i, request, "", 0) for i in range(n)]


def order_of(waiting: SampleQueue, n: int) -> list[tuple[int, int]]:
    taken = [waiting.pop_next(lambda _: True) for _ in range(n)]
    return [(s.group, s.member) for s in (SampleId.unpack(i) for i in taken if i is not None)]


def test_queue_starts_whole_groups_the_oldest_first() -> None:
    waiting = SampleQueue()
    for number in (2, 0, 1):
        for sample in reversed(group(number)):
            waiting.add(sample, 0.0)
    assert order_of(waiting, 12) == [(number, member) for number in range(3) for member in range(4)]


def test_samples_with_tokens_resume_before_new_ones() -> None:
    waiting = SampleQueue()
    for sample in group(0):
        waiting.add(sample, 0.0)
    begun = group(1)[2]
    begun.tokens += pack([1, 2], I32)
    waiting.add(begun, 50.0)
    assert order_of(waiting, 1) == [(1, 2)]


def test_later_turns_precede_new_groups_and_sessions_are_in_order() -> None:
    waiting, sessions = SampleQueue(), [group(number)[0].id for number in (0, 1)]
    turns = {"first": (9, 0, ""), "later": (8, 0, "w"), "of 1": (5, sessions[1], ""), "of 0": (6, sessions[0], "")}
    for number, session, worker_id in turns.values():
        request = group_requested(number, session=session, preferred_worker=worker_id)
        waiting.add(Sample(request.group, request, "", 0), 5.0)
    assert order_of(waiting, 4) == [(8, 0), (6, 0), (5, 0), (9, 0)]


def test_requests_of_clients_start_in_the_order_of_their_arrival() -> None:
    waiting = SampleQueue()
    for number, expires_at, worker_id in ((7, 1.0, ""), (3, 3.0, "w"), (5, 2.0, "")):
        request = group_requested(number, expires_at=expires_at, preferred_worker=worker_id)
        waiting.add(Sample(request.group, request, "", 0), 0.0)
    assert order_of(waiting, 3) == [(7, 0), (5, 0), (3, 0)]


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3)), max_size=60))
def test_queue_returns_every_sample_once(adds: list[tuple[int, int]]) -> None:
    waiting, groups = SampleQueue(), [group(number) for number in range(6)]
    expected = set()
    for number, member in adds:
        sample = groups[number][member]
        if sample.id not in expected:
            waiting.add(sample, 1.0)
            expected.add(sample.id)
    taken = [waiting.pop_next(lambda _: True) for _ in range(len(expected))]
    assert set(taken) == expected
    assert waiting.pop_next(lambda _: True) is None
    assert waiting.empty


def test_expected_length_is_the_longest_finished_sibling() -> None:
    lengths = LengthEstimates()
    first, second, third, _ = group(0)
    assert lengths.expected_length(third) is None
    first.tokens += pack([0] * 7, I32)
    second.tokens += pack([0] * 3, I32)
    lengths.on_finished(first)
    lengths.on_finished(second)
    assert lengths.expected_length(third) == 7


def test_expected_length_of_a_prompt_is_a_mean_over_epochs() -> None:
    lengths = LengthEstimates()
    for longest in (8, 16):
        sample = group(0)[0]
        sample.tokens += pack([0] * longest, I32)
        lengths.on_finished(sample)
        lengths.on_group_closed(sample)
    assert lengths.expected_length(group(0)[1]) == pytest.approx(12.0)
    assert lengths.expected_length(group(1)[0]) is None


def test_remaining_tokens_after_the_estimate_is_half_its_length() -> None:
    lengths = LengthEstimates(mean=10.0)
    sample = group(0, max_tokens=100)[0]
    sample.tokens += pack([0] * 40, I32)
    assert lengths.remaining_tokens(sample) == 20.0
    sample.tokens += pack([0] * 55, I32)
    assert lengths.remaining_tokens(sample) == 5.0


# --- rebalancing ---


def load(name: str, running: list[RunningSample], speed: float = 1.0, batch: int = 64) -> WorkerLoad:
    tokens = sum(sample.tokens for sample in running)
    return WorkerLoad(name, batch, len(running), tokens, profile(0.02, 0.002), speed, lambda: running)


def running(
    n: int, remaining: float, tokens: int = 100, *, started: bool = True, on_worker_s: float = 1e6
) -> list[RunningSample]:
    return [RunningSample(i, remaining, tokens, started, on_worker_s) for i in range(n)]


def test_idle_worker_receives_its_part_of_long_samples() -> None:
    asked = select_migrations([load("busy", running(20, remaining=5000.0)), load("idle", [])])
    assert 8 <= len(asked["busy"]) <= 10


def test_samples_with_few_remaining_tokens_do_not_migrate() -> None:
    assert select_migrations([load("busy", running(20, remaining=3.0)), load("idle", [])]) == {}


def test_migration_must_save_more_than_its_prefill_costs() -> None:
    cheap = select_migrations([load("busy", running(4, remaining=200.0, tokens=10)), load("idle", [])])
    dear = select_migrations([load("busy", running(4, remaining=200.0, tokens=100_000)), load("idle", [])])
    assert cheap
    assert not dear


def test_samples_without_tokens_migrate_first() -> None:
    begun, waiting = running(10, remaining=900.0), [RunningSample(77, 900.0, 5, started=False, on_worker_s=0.1)]
    asked = select_migrations([load("busy", begun + waiting, batch=10), load("idle", [], batch=10)])
    assert asked["busy"][0] == 77


def test_sample_that_just_migrated_stays() -> None:
    assert select_migrations([load("busy", running(20, remaining=5000.0, on_worker_s=1.0)), load("idle", [])]) == {}


def test_long_samples_migrate_from_a_slow_worker_to_a_fast_one() -> None:
    asked = select_migrations(
        [load("slow", running(4, remaining=3000.0), speed=0.3), load("fast", running(4, remaining=3000.0))]
    )
    assert len(asked["slow"]) >= 3


@given(
    st.lists(
        st.tuples(st.integers(0, 30), st.floats(0.1, 2.0), st.floats(1.0, 1e4), st.integers(0, 5000)),
        min_size=1,
        max_size=6,
    )
)
def test_rebalancing_never_migrates_in_a_circle(shape: list[tuple[int, float, float, int]]) -> None:
    held = {f"w{i}": running(n, rest, kv) for i, (n, _, rest, kv) in enumerate(shape)}
    speeds = {f"w{i}": speed for i, (_, speed, _, _) in enumerate(shape)}
    asked = select_migrations([load(name, samples, speeds[name]) for name, samples in held.items()])
    # A worker that gives does not get, so nothing goes round in a circle.
    slowest_left = {name: len(held[name]) - len(ids) for name, ids in asked.items()}
    assert all(left >= 0 for left in slowest_left.values())
    assert len(asked) < max(2, len(shape))


# --- several jobs ---


def demand(job: str, samples: int, waiting: int, share: float = 1.0, below_share_s: float = 9.0) -> Demand:
    return Demand(job, share, samples, waiting, below_share_s)


def changes_of(demands: list[Demand], workers: list[AllocatedWorker]) -> dict[str, str]:
    return reallocate(demands, workers, shares_of(demands, workers))


def test_fair_shares_are_proportional_to_the_weights() -> None:
    demands = [demand("a", 9999, 9999, share=2.0), demand("b", 9999, 9999)]
    assert fair_shares(demands, 9, batch_cap=8) == {"a": 6, "b": 3}


@pytest.mark.parametrize(
    ("weights", "workers", "shares"),
    [
        # The methods of Adams and Webster give (2, 2, 1) and (3, 1, 1).
        ((7.0, 4.0, 2.0), 5, (3, 2, 0)),
        # Adams: (3, 2, 1); Webster and the largest remainder: (4, 1, 1).
        ((5.0, 2.0, 1.0), 6, (5, 1, 0)),
    ],
)
def test_fair_shares_of_uneven_weights_are_rounded_by_jefferson(
    weights: tuple[float, ...], workers: int, shares: tuple[int, ...]
) -> None:
    demands = [demand(f"j{i}", 9999, 9999, share=weight) for i, weight in enumerate(weights)]
    assert tuple(fair_shares(demands, workers, batch_cap=8).values()) == shares


def test_fair_share_is_at_most_the_workers_a_job_can_fill() -> None:
    assert fair_shares([demand("a", 9999, 0), demand("b", 10, 0)], 10, batch_cap=8) == {"a": 8, "b": 2}


def test_idle_workers_change_to_a_job_with_queued_samples() -> None:
    workers = [AllocatedWorker(f"w{i}", "a", 0, 8) for i in range(4)]
    assert set(changes_of([demand("a", 0, 0), demand("b", 99, 99)], workers).values()) == {"b"}


def test_no_worker_changes_to_a_job_without_queued_samples() -> None:
    workers = [AllocatedWorker("w0", "a", 0, 8), AllocatedWorker("w1", "b", 8, 8)]
    assert changes_of([demand("a", 0, 0), demand("b", 8, 0)], workers) == {}


def test_busy_worker_changes_after_patience_from_a_job_above_share() -> None:
    workers = [AllocatedWorker(f"w{i}", "a", 8, 8) for i in range(4)]
    hurried = [demand("a", 99, 60), demand("b", 99, 99, below_share_s=0.1)]
    patient = [demand("a", 99, 60), demand("b", 99, 99, below_share_s=2.0)]
    assert changes_of(hurried, workers) == {}
    assert list(changes_of(patient, workers).values()) == ["b", "b"]


@given(st.lists(st.tuples(st.integers(0, 200), st.floats(0.1, 5.0)), min_size=1, max_size=5), st.integers(1, 40))
def test_second_reallocation_changes_nothing(jobs: list[tuple[int, float]], n: int) -> None:
    demands = [demand(f"j{i}", samples, samples, share) for i, (samples, share) in enumerate(jobs)]
    workers = [AllocatedWorker(f"w{i}", "", 0, 8) for i in range(n)]
    changes = changes_of(demands, workers)
    after = [AllocatedWorker(w.id, changes.get(w.id, w.job_id), 0, 8) for w in workers]
    assert all(worker.job_id for worker in after if worker.id in changes)
    again = changes_of(demands, after)
    assert not {w for w in again if w in changes}
