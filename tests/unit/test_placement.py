"""Which worker gets the next sample, in which order samples start, and which ones go on elsewhere."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.rollout_manager.domain.balance import Load, Running, moves
from services.rollout_manager.domain.fleet import Worker
from services.rollout_manager.domain.ledger import Sample
from services.rollout_manager.domain.lengths import Lengths
from services.rollout_manager.domain.placement import Candidates, best_of, has_room, roomier, size
from services.rollout_manager.domain.profile import ENOUGH, Profile
from services.rollout_manager.domain.shares import Demand, Member, due_of, fair, reassign
from services.rollout_manager.domain.waiting import TURN_OF_OLDEST, Waiting
from shared.columns import I32, pack
from shared.ids import SampleId
from shared.kv_rows import round_up
from shared.messages import GroupRequested, Sampling, WorkerJoined


def profile(fixed_s: float, each_s: float) -> Profile:
    made = Profile()
    for running in (1, 4, 16, 64) * int(ENOUGH):
        made.observe(running, 0, running / (fixed_s + each_s * running))
    return made


def worker(name: str, slots: int, held: int = 0, known: Profile | None = None, kv_tokens: int = 0) -> Worker:
    joined = WorkerJoined(
        worker=name,
        role="preemptible",
        kind="k",
        slots=slots,
        host="h",
        pid=1,
        price_per_hour=0.0,
        at=0.0,
        kv_tokens=kv_tokens,
    )
    made = Worker(joined, 0.0, samples=set(range(1000, 1000 + held)), profile=known or Profile())
    size(made, 0.0)
    return made


def place(n: int, workers: list[Worker]) -> Counter[str]:
    """Hand out `n` samples as the manager does."""
    pool, chosen = Candidates(), Counter[str]()
    for one in workers:
        pool.offer(one, Profile())
    for sample in range(n):
        best = pool.best()
        if best is None:
            break
        chosen[best] += 1
        taker = next(one for one in workers if one.id == best)
        taker.samples.add(sample)
        pool.offer(taker, Profile())
    return chosen


# --- profiles ---


def test_a_profile_is_found_from_throughputs_at_several_batch_sizes() -> None:
    found = profile(0.02, 0.001)
    assert found.known
    assert found.fixed_s == pytest.approx(0.02)
    assert found.each_s == pytest.approx(0.001)
    assert found.tokens_per_s(20, 0) == pytest.approx(20 / 0.04)


def test_a_batch_is_cut_where_more_samples_add_hardly_anything() -> None:
    flat, steep = profile(0.001, 0.001), profile(1.0, 0.0001)
    assert flat.plateau(64, 0.9, 0.0) < 16
    assert steep.plateau(64, 0.9, 0.0) == 58
    assert flat.tokens_per_s(flat.plateau(64, 0.9, 0.0) + 1, 0) >= 0.9 * flat.tokens_per_s(64, 0)


def test_an_unknown_profile_cuts_nothing() -> None:
    assert Profile().plateau(64, 0.9, 100.0) == 64


def test_a_profile_tells_samples_from_the_tokens_that_they_hold() -> None:
    found = Profile()
    for running in (1, 4, 16, 64):
        for tokens in (100, 3000, 50_000, 900):
            found.observe(running, tokens, running / (0.02 + 0.001 * running + 1e-7 * tokens))
    assert found.step_s(10, 20_000) == pytest.approx(0.02 + 0.01 + 0.002, rel=0.01)


@given(st.lists(st.tuples(st.integers(1, 256), st.integers(0, 10**6), st.floats(0.1, 1e5)), min_size=1, max_size=60))
def test_no_observation_makes_a_part_of_a_step_take_less_than_no_time(seen: list[tuple[int, int, float]]) -> None:
    made = Profile()
    for running, tokens, tokens_per_s in seen:
        made.observe(running, tokens, tokens_per_s)
        assert min(made.fixed_s, made.each_s, made.token_s) >= 0
        assert made.step_s(1, 1) > 0


# --- placement ---


def test_samples_go_to_the_worker_with_the_fewest_pending() -> None:
    chosen = place(2, [worker("full", 4, held=4), worker("free", 4, held=2)])
    assert chosen == {"free": 2}


def test_the_less_loaded_of_two_with_free_slots_gets_more() -> None:
    assert place(6, [worker("a", 8, held=6), worker("b", 8)])["b"] >= 5


def test_a_few_samples_go_where_their_tokens_come_fastest() -> None:
    fast, slow = worker("fast", 64, known=profile(0.02, 0.0001)), worker("slow", 64, known=profile(0.02, 0.0001))
    slow.speed = 0.3
    assert place(20, [fast, slow]) == {"fast": 20}


def test_a_full_kv_cache_takes_nothing_more() -> None:
    one = worker("a", 8, kv_tokens=1000)
    one.kv_held = 900
    assert not has_room(one)
    one.kv_held = 500
    assert has_room(one)


def cramped(name: str, slots: int, rows: int, longest: int = 100, held: int = 0) -> Worker:
    """Return a worker whose KV cache is a rectangle with so many rows for samples as long as its longest."""
    made = worker(name, slots, held)
    made.kv_tokens, made.kv_row_tokens, made.longest = rows * round_up(longest), 4096, longest if held else 0
    return made


def test_a_sample_that_finds_no_row_in_one_kv_cache_goes_to_another() -> None:
    little, much = cramped("little", 64, rows=4, held=1), worker("much", 8)
    chosen = place(11, [little, much])
    assert chosen == {"little": 3, "much": 8}


def test_only_when_all_are_full_a_few_wait_where_they_will_run_soon() -> None:
    little, full = cramped("little", 64, rows=8, held=8), worker("full", 4, held=4)
    assert place(99, [little, full]) == {"little": 2, "full": full.spare}


def test_where_samples_take_what_they_have_a_cache_is_filled_by_what_they_have() -> None:
    one = worker("a", 8, kv_tokens=1000)
    one.kv_held, one.longest = 500, 900
    assert has_room(one, 900)
    assert one.at_once(900) == 8


def test_a_sample_ends_at_the_models_maximum_length_whatever_it_asks_for() -> None:
    one = cramped("a", 64, rows=4)
    one.kv_row_tokens = 50
    assert one.at_once(10_000) == 4 * round_up(100) // round_up(50)


def test_a_sample_that_is_longer_than_the_others_goes_where_there_is_a_row_for_it() -> None:
    little, much = cramped("little", 64, rows=4, held=3), cramped("much", 64, rows=64, held=9)
    pool, workers = Candidates(), {"little": little, "much": much}
    for one in workers.values():
        pool.offer(one, Profile())
    assert pool.best() == "little"
    assert roomier(little, 100, [pool], workers) is little
    assert roomier(little, 101, [pool], workers) is little, "rows come in multiples of some columns"
    assert roomier(little, 200, [pool], workers) is much
    assert roomier(little, 100_000, [pool], workers) is None, "it waits for who can have it"
    assert roomier(cramped("tiny", 64, rows=1), 200, [pool], workers) is much, "there it would be refused"
    much.kv_row_tokens = 100_000
    assert roomier(little, 100_000, [pool], workers) is little, "who fits nowhere is refused by an engine"
    paged = worker("paged", 8, 8)
    assert roomier(paged, 100_000, [pool], workers) is paged


@given(st.lists(st.tuples(st.integers(1, 64), st.integers(0, 80)), max_size=6), st.integers(0, 200))
def test_nobody_gets_more_than_fits_and_nothing_waits_beside_room(shape: list[tuple[int, int]], n: int) -> None:
    workers = [worker(f"w{i}", slots, held) for i, (slots, held) in enumerate(shape)]
    room = sum(max(0, w.batch + w.spare - w.load) for w in workers)
    before = {w.id: w.load for w in workers}
    chosen = place(n, workers)
    assert chosen.total() == min(n, room)
    for w in workers:
        assert chosen[w.id] <= max(0, w.batch + w.spare - before[w.id])


def test_the_best_of_several_pools_is_the_best_of_all() -> None:
    first, second = Candidates(), Candidates()
    first.offer(worker("busy", 8, held=7), Profile())
    second.offer(worker("idle", 8), Profile())
    assert best_of([first, second]) == "idle"
    assert best_of([]) is None


# --- order ---


def group(number: int, n: int = 4, max_tokens: int = 100) -> list[Sample]:
    packed = SampleId(1, False, 0, number, 0).pack()
    sampling = Sampling(max_tokens=max_tokens)
    prompt = pack([number + 1], I32)
    request = GroupRequested(job_id="j", group=packed, n=n, prompt=prompt, sampling=sampling, version=0, seed=0)
    return [Sample(packed + i, request, "", 0) for i in range(n)]


def order_of(waiting: Waiting, n: int) -> list[tuple[int, int]]:
    taken = [waiting.pop(lambda _: True) for _ in range(n)]
    return [(s.group, s.member) for s in (SampleId.unpack(i) for i in taken if i is not None)]


def test_one_probe_of_each_unknown_group_starts_first() -> None:
    waiting = Waiting()
    for number in range(3):
        for sample in group(number):
            waiting.add(sample, None, 0.0)
    assert order_of(waiting, 3) == [(0, 0), (1, 0), (2, 0)]


def test_then_the_longest_expected_with_a_turn_for_the_oldest_group() -> None:
    waiting = Waiting()
    for number, estimate in enumerate((10.0, 90.0, 50.0)):
        for sample in group(number):
            waiting.add(sample, estimate, 0.0)
    groups = [number for number, _ in order_of(waiting, 12)]
    assert groups[: TURN_OF_OLDEST - 1] == [1] * (TURN_OF_OLDEST - 1)
    assert groups[TURN_OF_OLDEST - 1] == 0
    assert sorted(groups) == [0] * 4 + [1] * 4 + [2] * 4


def test_an_estimate_that_comes_later_changes_the_order() -> None:
    waiting = Waiting()
    for number in (0, 1):
        for sample in group(number):
            waiting.add(sample, None, 0.0)
    order_of(waiting, 2)
    waiting.estimated(group(0)[0].id, 5.0)
    assert [number for number, _ in order_of(waiting, 3)] == [1, 1, 1]


def test_what_was_begun_elsewhere_goes_on_before_anything_new() -> None:
    waiting = Waiting()
    for sample in group(0):
        waiting.add(sample, None, 0.0)
    begun = group(1)[2]
    begun.tokens += pack([1, 2], I32)
    waiting.add(begun, None, 50.0)
    assert order_of(waiting, 1) == [(1, 2)]


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3), st.booleans()), max_size=60), st.data())
def test_whatever_the_order_each_sample_that_waits_is_taken_once(
    adds: list[tuple[int, int, bool]], data: st.DataObject
) -> None:
    waiting, groups = Waiting(), [group(number) for number in range(6)]
    expected = set()
    for number, member, estimate_comes in adds:
        sample = groups[number][member]
        if sample.id not in expected:
            waiting.add(sample, data.draw(st.none() | st.floats(1, 100)), 1.0)
            expected.add(sample.id)
        if estimate_comes:
            waiting.estimated(sample.request.group, data.draw(st.floats(1, 100)))
    taken = [waiting.pop(lambda _: True) for _ in range(len(expected))]
    assert set(taken) == expected
    assert waiting.pop(lambda _: True) is None
    assert waiting.empty


def test_a_group_is_expected_to_be_as_long_as_its_longest_finished_sibling() -> None:
    lengths = Lengths()
    first, second, third, _ = group(0)
    assert lengths.estimate(third) is None
    first.tokens += pack([0] * 7, I32)
    second.tokens += pack([0] * 3, I32)
    assert lengths.finished(first)
    assert not lengths.finished(second)
    assert lengths.estimate(third) == 7


def test_a_prompt_s_length_is_a_mean_over_epochs() -> None:
    lengths = Lengths()
    for longest in (8, 16):
        sample = group(0)[0]
        sample.tokens += pack([0] * longest, I32)
        lengths.finished(sample)
        lengths.group_closed(sample)
    assert lengths.estimate(group(0)[1]) == pytest.approx(12.0)
    assert lengths.estimate(group(1)[0]) is None


def test_a_sample_that_has_outgrown_its_estimate_is_still_expected_to_go_on() -> None:
    lengths = Lengths(mean=10.0)
    sample = group(0, max_tokens=100)[0]
    sample.tokens += pack([0] * 40, I32)
    assert lengths.rest(sample) == 20.0
    sample.tokens += pack([0] * 55, I32)
    assert lengths.rest(sample) == 5.0


# --- evening out ---


def load(name: str, running: list[Running], speed: float = 1.0, batch: int = 64) -> Load:
    tokens = sum(sample.tokens for sample in running)
    return Load(name, batch, len(running), tokens, profile(0.02, 0.002), speed, lambda: running)


def running(n: int, rest: float, tokens: int = 100, *, begun: bool = True, there_s: float = 1e6) -> list[Running]:
    return [Running(i, rest, tokens, begun, there_s) for i in range(n)]


def test_an_idle_worker_gets_its_part_of_long_samples() -> None:
    asked = moves([load("busy", running(20, rest=5000.0)), load("idle", [])])
    assert 8 <= len(asked["busy"]) <= 10


def test_short_rests_stay_where_they_are() -> None:
    assert moves([load("busy", running(20, rest=3.0)), load("idle", [])]) == {}


def test_a_move_must_win_more_than_reading_the_sample_in_again() -> None:
    cheap = moves([load("busy", running(4, rest=200.0, tokens=10)), load("idle", [])])
    dear = moves([load("busy", running(4, rest=200.0, tokens=100_000)), load("idle", [])])
    assert cheap
    assert not dear


def test_samples_that_have_not_begun_go_before_running_ones() -> None:
    begun, waiting = running(10, rest=900.0), [Running(77, 900.0, 5, begun=False, there_s=0.1)]
    asked = moves([load("busy", begun + waiting, batch=10), load("idle", [], batch=10)])
    assert asked["busy"][0] == 77


def test_a_sample_that_has_just_moved_stays() -> None:
    assert moves([load("busy", running(20, rest=5000.0, there_s=1.0)), load("idle", [])]) == {}


def test_long_samples_leave_a_slow_worker_for_a_fast_one() -> None:
    asked = moves([load("slow", running(4, rest=3000.0), speed=0.3), load("fast", running(4, rest=3000.0))])
    assert len(asked["slow"]) >= 3


@given(
    st.lists(
        st.tuples(st.integers(0, 30), st.floats(0.1, 2.0), st.floats(1.0, 1e4), st.integers(0, 5000)),
        min_size=1,
        max_size=6,
    )
)
def test_evening_out_twice_moves_nothing_the_second_time(shape: list[tuple[int, float, float, int]]) -> None:
    held = {f"w{i}": running(n, rest, kv) for i, (n, _, rest, kv) in enumerate(shape)}
    speeds = {f"w{i}": speed for i, (_, speed, _, _) in enumerate(shape)}
    asked = moves([load(name, samples, speeds[name]) for name, samples in held.items()])
    # A worker that gives does not get, so nothing goes round in a circle.
    slowest_left = {name: len(held[name]) - len(ids) for name, ids in asked.items()}
    assert all(left >= 0 for left in slowest_left.values())
    assert len(asked) < max(2, len(shape))


# --- several jobs ---


def demand(job: str, samples: int, waiting: int, share: float = 1.0, waited_s: float = 9.0) -> Demand:
    return Demand(job, share, samples, waiting, waited_s)


def changes_of(demands: list[Demand], members: list[Member]) -> dict[str, str]:
    return reassign(demands, members, due_of(demands, members))


def test_workers_are_due_in_proportion_to_the_shares() -> None:
    demands = [demand("a", 9999, 9999, share=2.0), demand("b", 9999, 9999)]
    assert fair(demands, 9, batch=8) == {"a": 6, "b": 3}


def test_no_job_is_due_more_than_it_can_fill() -> None:
    assert fair([demand("a", 9999, 0), demand("b", 10, 0)], 10, batch=8) == {"a": 8, "b": 2}


def test_workers_of_a_job_with_nothing_to_do_go_to_one_whose_samples_wait() -> None:
    members = [Member(f"w{i}", "a", 0, 8) for i in range(4)]
    assert set(changes_of([demand("a", 0, 0), demand("b", 99, 99)], members).values()) == {"b"}


def test_nobody_changes_for_a_job_whose_samples_all_run() -> None:
    members = [Member("w0", "a", 0, 8), Member("w1", "b", 8, 8)]
    assert changes_of([demand("a", 0, 0), demand("b", 8, 0)], members) == {}


def test_a_busy_worker_changes_only_after_a_while_and_only_from_a_job_above_its_share() -> None:
    members = [Member(f"w{i}", "a", 8, 8) for i in range(4)]
    hurried = [demand("a", 99, 60), demand("b", 99, 99, waited_s=0.1)]
    patient = [demand("a", 99, 60), demand("b", 99, 99, waited_s=2.0)]
    assert changes_of(hurried, members) == {}
    assert list(changes_of(patient, members).values()) == ["b", "b"]


@given(st.lists(st.tuples(st.integers(0, 200), st.floats(0.1, 5.0)), min_size=1, max_size=5), st.integers(1, 40))
def test_sharing_out_again_changes_nothing(jobs: list[tuple[int, float]], n: int) -> None:
    demands = [demand(f"j{i}", samples, samples, share) for i, (samples, share) in enumerate(jobs)]
    members = [Member(f"w{i}", "", 0, 8) for i in range(n)]
    changes = changes_of(demands, members)
    after = [Member(m.id, changes.get(m.id, m.job_id), 0, 8) for m in members]
    assert all(member.job_id for member in after if member.id in changes)
    again = changes_of(demands, after)
    assert not {w for w in again if w in changes}
