"""The scheduling simulator: its engine, its baselines, its bound, and that nothing is lost in it."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.scheduling.cases import CASES, KV, LOGNORMAL, TAIL, Case
from benchmarks.scheduling.engine import Engine, EngineSpec, Held
from benchmarks.scheduling.measure import POLICIES, bound, prepare, run
from benchmarks.scheduling.oracle import Presence, bounds, step_bound
from benchmarks.scheduling.paper import Paper, balance, select
from benchmarks.scheduling.polyrl import PolyRL, cut
from benchmarks.scheduling.table import by_case, summary, table, tail_part
from benchmarks.scheduling.workload import Going, Group, Joining, workload
from rlboost.shared.messages import StepReport

SPEC = EngineSpec(step_s=0.01, per_sample_s=0.001, per_kv_token_s=1e-5, prefill_tokens_per_s=1e9, slots=4)
SMALL = {case.name: case.smaller(8, 3) for case in (LOGNORMAL, TAIL, KV)}


def held(sample: int, length: int, prompt: int = 10, base: int = 0) -> Held:
    return Held(sample, 1, sample, prompt, length, base, base)


# --- the engine -------------------------------------------------------------------------------------------------------


def step_by_step(spec: EngineSpec, samples: Iterable[tuple[int, int]]) -> dict[int, float]:
    """Return when each sample ends, decode step by decode step; samples are (prompt, length)."""
    waiting = [[i, prompt, length] for i, (prompt, length) in enumerate(samples)]
    running: list[list[int]] = []
    ends: dict[int, float] = {}
    now = 0.0
    while waiting or running:
        while waiting and len(running) < spec.slots:
            running.append(waiting.pop(0))
        now += spec.decode_s(len(running), sum(kv for _, kv, _ in running))
        for sample in running:
            sample[1] += 1
            sample[2] -= 1
        ends |= {i: now for i, _, left in running if not left}
        running = [sample for sample in running if sample[2]]
    return ends


@given(st.lists(st.tuples(st.integers(1, 50), st.integers(1, 400)), min_size=1, max_size=12))
def test_closed_form_engine_matches_step_by_step(samples: list[tuple[int, int]]) -> None:
    engine = Engine(SPEC)
    for i, (prompt, length) in enumerate(samples):
        engine.submit(held(i, length, prompt))
    ends: dict[int, float] = {}
    while engine.running:
        engine.advance(engine.next_event_at())
        ends |= {done.sample: engine.now for done in engine.done}
        engine.done.clear()
    expected = step_by_step(SPEC, samples)
    # The closed form lets the KV cache grow within a step, not after it: half a token a step and sample.
    assert ends == pytest.approx(expected, rel=0.02)


@given(st.lists(st.integers(1, 300), min_size=1, max_size=20), st.lists(st.floats(0.001, 5.0), min_size=1, max_size=30))
def test_it_does_not_matter_how_often_one_looks(lengths: list[int], looks: list[float]) -> None:
    once, often = Engine(SPEC), Engine(SPEC)
    for engine in (once, often):
        for i, length in enumerate(lengths):
            engine.submit(held(i, length))
    now = 0.0
    for look in looks:
        now += look
        often.advance(now)
    once.advance(now)
    assert [done.sample for done in once.done] == [done.sample for done in often.done]
    assert once.decoded == pytest.approx(often.decoded)
    assert once.busy_s == pytest.approx(often.busy_s)


@given(st.lists(st.integers(1, 300), min_size=1, max_size=20), st.integers(400, 1000))
def test_a_full_kv_cache_retracts_and_loses_no_token(lengths: list[int], kv_tokens: int) -> None:
    engine = Engine(replace(SPEC, kv_tokens=kv_tokens))
    for i, length in enumerate(lengths):
        engine.submit(held(i, length))
    for _ in range(10_000):
        if not engine.running:
            break
        engine.advance(engine.next_event_at())
        in_use = sum(some.prompt + engine.made(some) for some in engine.running.values())
        assert in_use <= kv_tokens or len(engine.running) == 1
    assert sorted(done.sample for done in engine.done) == list(range(len(lengths)))
    assert engine.decoded == pytest.approx(sum(lengths), rel=0.01, abs=engine.retractions + 1)


def test_a_slower_engine_takes_longer_by_its_speed() -> None:
    fast, slow = Engine(SPEC), Engine(SPEC, speed=0.5)
    for engine in (fast, slow):
        engine.submit(held(0, 100))
    assert slow.next_event_at() == pytest.approx(2 * fast.next_event_at())


def test_migrated_sample_keeps_its_tokens_and_resumes_after_a_prefill() -> None:
    spec = replace(SPEC, prefill_tokens_per_s=100.0)
    first, second = Engine(SPEC), Engine(spec, now=1.0)
    first.submit(held(0, 100))
    first.advance(0.5)
    taken = first.remove(0)
    assert taken is not None
    assert 0 < taken.base < 50
    assert not first.running
    second.submit(taken)
    second.advance(1.0 + (10 + taken.base) / 100.0)
    assert second.made(taken) == taken.base
    assert second.next_event_at() < 1.0 + (10 + taken.base) / 100.0 + 100 * 0.013


# --- the workload -----------------------------------------------------------------------------------------------------


def test_simulated_world_is_determined_by_its_seed() -> None:
    assert prepare(SMALL["tail14k"], 2, 5) == prepare(SMALL["tail14k"], 2, 5)
    assert prepare(SMALL["tail14k"], 2, 5) != prepare(SMALL["tail14k"], 2, 6)


def test_preemptions_change_nothing_else() -> None:
    calm, wild = prepare(SMALL["kv32b"], 0, 1), prepare(SMALL["kv32b"], 6, 1)
    assert calm.steps == wild.steps
    assert calm.fleet == wild.fleet


@pytest.mark.parametrize("seed", range(5))
def test_only_present_workers_are_preempted(seed: int) -> None:
    work = workload(LOGNORMAL, 6, seed, 100.0)
    there = {joining.worker for joining in work.fleet}
    gone = 0
    for events in work.spot:
        for event in events:
            match event.what:
                case Going(worker):
                    there.remove(worker)
                    gone += 1
                case Joining(worker):
                    assert worker not in there
                    there.add(worker)
    assert gone == 6
    assert not any(work.spot[: LOGNORMAL.warm_up])


def test_lengths_have_the_demos_quantiles() -> None:
    work = workload(replace(CASES["demo"], steps=20), 0, 0, 1.0)
    lengths = sorted(work.length_of().values())
    quantiles = [lengths[int(p * len(lengths))] for p in (0.1, 0.5, 0.75, 0.9)]
    assert quantiles == pytest.approx([22, 62, 122, 202], rel=0.1)
    assert lengths[-1] == 256


# --- runs -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", SMALL)
def test_simulation_delivers_every_sample_within_the_step_bound(name: str, policy: str) -> None:
    work = prepare(SMALL[name], 3, 0)
    _, sim = run(work, policy, 3, 0)
    assert sim.trainer.delivered == work.length_of()
    for step, shortest in zip(sim.trainer.steps, bounds(work), strict=True):
        assert step.ended - step.began >= shortest


@pytest.mark.parametrize("policy", POLICIES)
def test_a_seed_gives_the_same_run_again(policy: str) -> None:
    def once() -> dict[str, object]:
        result, _ = run(prepare(SMALL["lognormal"], 2, 3), policy, 2, 3)
        return {key: value for key, value in result.public().items() if key not in {"decide_us", "host_s"}}

    assert once() == once()


@pytest.mark.parametrize("policy", POLICIES)
def test_without_preemptible_workers_a_run_ends_too(policy: str) -> None:
    alone = replace(SMALL["lognormal"], preemptible=())
    result, _ = run(prepare(alone, 0, 0), policy, 0, 0)
    assert result.window_s > 0


def test_hanging_simulation_error_counts_unfinished_samples() -> None:
    class Idle(Paper):
        def schedule(self) -> None:
            """Hand out nothing."""

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(POLICIES, "idle", Idle)
        with pytest.raises(RuntimeError, match="step 0 does not end: 128 samples lack"):
            run(prepare(SMALL["lognormal"], 0, 0), "idle", 0, 0)


# --- the bound --------------------------------------------------------------------------------------------------------


def group(*lengths: int) -> Group:
    return Group(0, 100, lengths)


def test_longest_sample_bounds_a_step_of_any_fleet() -> None:
    fleet = [Presence(1.0, 0.0, None)] * 100
    spec = TAIL.engine
    alone_s = 10_000 * spec.decode_s(1, 100 + 5_000)
    assert step_bound(TAIL, (group(10_000, 10),), fleet) > alone_s
    assert step_bound(TAIL, (group(10_000, 10),), fleet) == pytest.approx(alone_s, rel=0.1)


def test_a_larger_or_longer_present_fleet_never_makes_the_bound_larger() -> None:
    groups = prepare(SMALL["kv32b"], 0, 0).steps[0]
    fleets = [[], [Presence(1.0, 10.0, 50.0)], [Presence(1.0, 10.0, None)], [Presence(1.0, 10.0, None)] * 2]
    found = [step_bound(SMALL["kv32b"], groups, fleet) for fleet in fleets]
    assert found == sorted(found, reverse=True)


def test_the_device_is_shared_by_training_and_reserved_engines() -> None:
    groups = prepare(SMALL["lognormal"], 0, 0).steps[0]
    case: Case = SMALL["lognormal"]
    train_s = sum(each.tokens for each in groups) / case.train_tokens_per_s
    alone_s = step_bound(case, groups, [])
    assert alone_s > train_s + case.publish_s + case.switch_s


# --- the paper's rule -------------------------------------------------------------------------------------------------


def test_the_paper_selects_the_fewest_pending_below_theta() -> None:
    assert select({"a": 3, "b": 1, "c": 2}, theta=4) == "b"
    assert select({"a": 4, "b": 5}, theta=4) is None
    assert select({}, theta=4) is None


def test_the_paper_moves_one_pending_sample_to_a_worker_without_any() -> None:
    assert balance({"a": 0, "b": 7, "c": 2}, {"a": 9, "b": 9, "c": 9}, plateau=4) == ("b", "a", 1)


def test_balance_moves_samples_beyond_the_plateau_to_an_idle_worker() -> None:
    assert balance({"a": 0, "b": 0}, {"a": 0, "b": 10}, plateau=4) == ("b", "a", 6)
    assert balance({"a": 0, "b": 0}, {"a": 0, "b": 4}, plateau=4) is None
    assert balance({"a": 0, "b": 0}, {"a": 1, "b": 10}, plateau=4) is None


def report(wait_s: float) -> StepReport:
    return StepReport(job_id="job", step=0, metrics={}, wait_s=wait_s, train_s=1.0)


def test_the_papers_window_follows_the_waits_and_returns_with_the_fleets_size() -> None:
    paper = Paper(LOGNORMAL)
    paper.window_s = 100.0
    paper.fleet.see(3, 0.0)
    paper.learn(report(wait_s=30.0), remote_wait_s=0.0)
    assert paper.window_s == pytest.approx(110.0)
    paper.fleet.begin(1.0)
    paper.fleet.see(2, 2.0)  # the fleet changes: nothing is remembered of this step
    paper.learn(report(wait_s=60.0), remote_wait_s=0.0)
    assert paper.window_s == pytest.approx(130.0)
    paper.fleet.begin(3.0)
    paper.fleet.see(3, 4.0)
    paper.learn(report(wait_s=0.0), remote_wait_s=0.0)
    assert paper.window_s == pytest.approx(110.0)


# --- the released code's rule -----------------------------------------------------------------------------------------


def test_the_released_code_cuts_a_moved_group_to_its_shortest_member() -> None:
    assert cut([120, 7, 300]) == 7


def test_the_released_codes_window_is_in_whole_seconds_and_at_least_five() -> None:
    polyrl = PolyRL(LOGNORMAL)
    polyrl.window_s = 10.0
    polyrl.fleet.see(3, 0.0)
    polyrl.learn(report(wait_s=0.0), remote_wait_s=300.0)
    assert polyrl.window_s == 5.0


# --- the report -------------------------------------------------------------------------------------------------------


def test_ratios_are_of_throughput_and_the_tail_is_a_part_of_the_difference() -> None:
    work = prepare(SMALL["lognormal"], 0, 0)
    oracle = bound(work, 0, 0)
    ours = replace(oracle, policy="ours", step_s=2 * oracle.step_s, tail_lost_s=oracle.step_s / 4)
    paper = replace(oracle, policy="paper", step_s=3 * oracle.step_s)
    found = summary([oracle, ours, paper])
    assert found["oracle/ours"] == 2.0
    assert found["ours/paper"] == 1.5
    assert tail_part(ours, oracle) == pytest.approx(0.25)
    assert table([oracle, ours, paper]).row_count == 3
    assert by_case([ours, replace(ours, seed=1, step_s=0.0)])["lognormal", 0]["ours"].step_s == oracle.step_s
    json.dumps(found)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**31), st.integers(0, 8))
def test_any_workload_can_be_drawn(seed: int, preemptions: int) -> None:
    work = prepare(SMALL["kv32b"], preemptions, seed)
    assert len(work.length_of()) == SMALL["kv32b"].samples * len(work.steps)
    assert all(bounds(work))
