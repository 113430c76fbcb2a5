"""The simulation: its engine, its baselines, its bound, and that no sample is lost in it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.step_bound import Presence, shortest_step, shortest_steps
from rlboost.shared.messages import GroupRequested, Sampling, StepReport
from rlboost.simulation import POLICIES, EngineSpec, Lengths, Machine, Policy, SimulationResult, run
from rlboost.simulation.environment import Environment
from rlboost.simulation.policies import ABLATIONS
from rlboost.simulation.policies.baselines import PaperManager, PolyRLManager, balance, select
from rlboost.simulation.policies.rlboost import DomainManager
from rlboost.simulation.result import StepResult
from rlboost.simulation.run import Simulation
from rlboost.simulation.scenario import Group
from rlboost.simulation.traces import FleetEvent, FleetTrace
from rlboost.simulation.worker import Engine, Held
from tests.support.simulated import FULL_CACHES, JOB, MACHINE, STEADY, UNSTEADY, simulated

SPEC = EngineSpec(step_s=0.01, per_sample_s=0.001, per_kv_token_s=1e-5, prefill_tokens_per_s=1e9, slots=4)


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
def test_engine_gives_the_same_result_however_often_it_is_advanced(lengths: list[int], intervals: list[float]) -> None:
    once, often = Engine(SPEC), Engine(SPEC)
    for engine in (once, often):
        for i, length in enumerate(lengths):
            engine.submit(held(i, length))
    now = 0.0
    for interval in intervals:
        now += interval
        often.advance(now)
    once.advance(now)
    assert [done.sample for done in once.done] == [done.sample for done in often.done]
    assert once.decoded == pytest.approx(often.decoded)


@given(st.lists(st.integers(1, 300), min_size=1, max_size=20), st.integers(400, 1000))
def test_full_kv_cache_retracts_and_loses_no_token(lengths: list[int], kv_tokens: int) -> None:
    engine = Engine(replace(SPEC, kv_tokens=kv_tokens))
    for i, length in enumerate(lengths):
        engine.submit(held(i, length))
    for _ in range(10_000):
        if not engine.running:
            break
        engine.advance(engine.next_event_at())
        in_use = sum(some.prompt + engine.tokens_of(some) for some in engine.running.values())
        assert in_use <= kv_tokens or len(engine.running) == 1
    assert sorted(done.sample for done in engine.done) == list(range(len(lengths)))
    assert engine.decoded == pytest.approx(sum(lengths), rel=0.01, abs=engine.retractions + 1)


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
    assert second.tokens_of(taken) == taken.base
    assert second.next_event_at() < 1.0 + (10 + taken.base) / 100.0 + 100 * 0.013


@given(st.lists(st.integers(1, 300), min_size=1, max_size=20), st.floats(0.0, 7.0))
def test_drafts_delay_no_sample_and_change_no_token(lengths: list[int], siblings: float) -> None:
    plain, drafting = Engine(SPEC), Engine(SPEC)
    ends: list[dict[int, float]] = []
    for engine in (plain, drafting):
        for i, length in enumerate(lengths):
            engine.submit(held(i, length))
        if engine is drafting:
            engine.know_siblings(siblings)
        ended: dict[int, float] = {}
        while engine.running:
            engine.advance(engine.next_event_at())
            ended |= {done.sample: engine.now for done in engine.done}
            engine.done.clear()
        ends.append(ended)
    assert drafting.decoded == pytest.approx(plain.decoded)
    assert drafting.passes <= plain.passes == pytest.approx(plain.steps)
    assert all(ends[1][sample] <= ends[0][sample] * (1 + 1e-9) for sample in ends[0])


# --- the job ----------------------------------------------------------------------------------------------------------


def test_lengths_follow_their_quantiles() -> None:
    quantiles = ((0.0, 8), (0.1, 22), (0.5, 62), (0.75, 122), (0.9, 202), (0.95, 256), (1.0, 256))
    job = replace(JOB, lengths=Lengths(cap=256, quantiles=quantiles), prompts=512)
    lengths = sorted(length for group in job.groups(0, seed=0) for length in group.lengths)
    drawn = [lengths[int(p * len(lengths))] for p in (0.1, 0.5, 0.75, 0.9)]
    assert drawn == pytest.approx([22, 62, 122, 202], rel=0.1)
    assert lengths[-1] == 256


def test_lengths_grow_with_training_up_to_their_cap() -> None:
    job = replace(JOB, lengths=replace(JOB.lengths, growth_per_step=0.01), prompts=256)
    early, late = (sum(group.tokens for group in job.groups(step, seed=0)) for step in (0, 50))
    assert 1.3 < late / early < 1.01**50
    assert max(max(group.lengths) for group in job.groups(500, seed=0)) == 5120


# --- runs -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
@pytest.mark.parametrize("machine", [MACHINE, FULL_CACHES], ids=["large caches", "full caches"])
def test_simulation_delivers_every_sample_and_respects_the_bound(machine: Machine, policy: Policy) -> None:
    result = simulated(policy, machine=machine)
    assert result.steps
    for step in result.steps:
        groups = JOB.groups(step.step, seed=1)
        assert step.generated_tokens == sum(sum(group.lengths) for group in groups)
    if policy.fleet == "spot" and not policy.staleness and not policy.speculation:
        shortest = shortest_steps(JOB, machine, UNSTEADY, result)
        assert all(step.duration_s >= bound for step, bound in zip(result.steps, shortest, strict=True))
    if machine is FULL_CACHES:
        assert result.counters.retractions


@pytest.mark.parametrize("policy", ABLATIONS.values(), ids=ABLATIONS)
def test_simulation_of_an_ablation_delivers_every_sample(policy: Policy) -> None:
    assert len(simulated(policy).steps) > 1


def test_simulation_without_migration_regenerates_tokens() -> None:
    with_migration = simulated(POLICIES["rlboost"]).counters
    without = simulated(ABLATIONS["no-migration"]).counters
    assert with_migration.decoded_tokens == pytest.approx(with_migration.generated_tokens, rel=0.001)
    assert without.decoded_tokens > 1.01 * without.generated_tokens


def test_instances_get_no_notice_where_it_is_zero_seconds_long() -> None:
    unannounced = simulated(POLICIES["rlboost"], machine=replace(MACHINE, notice_s=0.0))
    assert unannounced.steps == simulated(ABLATIONS["no-notices"]).steps
    assert unannounced.steps != simulated(POLICIES["rlboost"]).steps


def test_simulation_with_the_same_seed_gives_the_same_result() -> None:
    def once(seed: int) -> SimulationResult:
        return simulated(POLICIES["rlboost"], seed=seed)

    first = once(3)
    assert once(3) == first
    assert once(4) != first


def test_manager_learns_the_decode_steps_of_the_simulated_engine() -> None:
    env = Environment(JOB, MACHINE, POLICIES["rlboost"], seed=1, resolution_s=0.5)
    run = Simulation(env, FleetTrace.constant(3, 30.0), warm_up_steps=1)
    run.run()
    assert isinstance(run.manager, DomainManager)
    learned = run.manager.world.fleet.profiles["simulated"]
    for batch in (1, 4, 16):
        tokens = 1000 * batch
        assert learned.step_s(batch, tokens) == pytest.approx(MACHINE.engine.decode_s(batch, tokens), rel=0.05)


def test_manager_learns_both_regimes_of_a_simulated_engine_that_drafts() -> None:
    env = Environment(JOB, MACHINE, POLICIES["rlboost-speculation"], seed=1, resolution_s=0.5)
    run = Simulation(env, FleetTrace.constant(3, 90.0), warm_up_steps=1)
    run.run()
    assert isinstance(run.manager, DomainManager)
    learned = run.manager.world.fleet.profiles["simulated"]
    assert 1.9 < learned.tokens_per_pass < 3.4
    assert learned.step_s(32, 32_000) == pytest.approx(MACHINE.engine.decode_s(32, 32_000), rel=0.1)
    assert learned.step_s(1, 1000) < 0.6 * MACHINE.engine.decode_s(1, 1000)


SPEEDUPS: dict[str, dict[str, float]] = {
    "weights": {"step_s": 0.5},
    "arithmetic": {"per_sample_s": 0.5},
    "caches": {"per_kv_token_s": 0.5},
    "prefill": {"prefill_tokens_per_s": 2.0},
    "all": {"step_s": 0.8, "per_sample_s": 0.8, "per_kv_token_s": 0.8, "prefill_tokens_per_s": 1.25},
}
NOISE = 0.03
"""See the limits in docs/evaluation.md."""


@cache
def throughput(policy: str, part: str = "") -> float:
    engine = MACHINE.engine
    faster = {name: getattr(engine, name) * by for name, by in SPEEDUPS.get(part, {}).items()}
    return simulated(POLICIES[policy], machine=replace(MACHINE, engine=replace(engine, **faster))).tokens_per_s


@pytest.mark.parametrize("policy", ["rlboost", "rlboost-speculation"])
@pytest.mark.parametrize("part", SPEEDUPS)
def test_speedup_of_a_part_of_the_engines_slows_no_simulated_job(policy: str, part: str) -> None:
    assert throughput(policy, part) > (1 - NOISE) * throughput(policy)


def test_drafts_make_a_simulated_job_faster() -> None:
    assert throughput("rlboost-speculation") > 1.02 * throughput("rlboost")


def test_slow_machine_trains_and_generates_slowly_in_the_same_step() -> None:
    machines = MACHINE, replace(MACHINE, slowdowns=(1.0, 1.0, 4.0))
    usual, slow = (simulated(POLICIES["rlboost"], machine=m, trace=STEADY, seed=0).steps[0] for m in machines)
    assert (usual.step, slow.step) == (2, 2)
    assert trained_s(slow) == pytest.approx(4 * trained_s(usual))
    assert slow.last_sample_s > 2 * usual.last_sample_s


def trained_s(step: StepResult) -> float:
    return sum(end - start for start, end in step.training)


def test_simulation_bills_instances_from_their_request_to_their_end() -> None:
    result = simulated(POLICIES["rlboost"])
    billed = {instance.instance.partition(".")[0]: instance for instance in result.instances}
    assert (billed["instance-1"].start_s, billed["instance-1"].end_s) == pytest.approx((0.0, 40.0))
    assert (billed["instance-4"].start_s, billed["instance-4"].end_s) == pytest.approx((100.0, 170.0))
    assert result.dollars == pytest.approx(
        (80.0 * result.duration_s + 5.0 * sum(instance.billed_s for instance in result.instances)) / 3600
    )
    assert simulated(POLICIES["verl"]).instance_dollars == 0.0


@pytest.mark.parametrize("policy", ["paper", "rlboost"])
def test_instance_reclaimed_before_it_joins_is_billed(policy: str) -> None:
    short_life = (
        FleetEvent(50.0, "add", "node9"),
        FleetEvent(70.0, "remove", "node9"),
        FleetEvent(80.0, "add", "node9"),
    )
    trace = FleetTrace((*STEADY.events, *short_life), STEADY.duration_s)
    result = simulated(POLICIES[policy], trace=trace)
    first, second = (instance for instance in result.instances if instance.instance.startswith("node9."))
    assert (first.start_s, first.billed_s) == pytest.approx((50.0, 20.0))
    assert second.end_s == pytest.approx(result.duration_s)


def test_instances_of_a_result_follow_the_trace() -> None:
    result = simulated(POLICIES["paper"])
    assert sorted(one.start_s for one in result.instances) == pytest.approx([0.0, 0.0, 0.0, 100.0, 200.0, 230.0])
    ends = sorted(one.end_s for one in result.instances if one.end_s < result.duration_s)
    assert ends == pytest.approx([40.0, 70.0, 150.0, 170.0])


def test_staleness_lets_samples_of_the_next_step_start_early() -> None:
    fresh, stale = (simulated(POLICIES[name], trace=STEADY) for name in ("rlboost", "rlboost-stale"))
    assert stale.tokens_per_s > 1.03 * fresh.tokens_per_s


def test_hanging_step_is_an_error_that_counts_missing_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PaperManager, "schedule", lambda _: None)
    monkeypatch.setattr(run, "MAX_STEP_S", 100.0)
    with pytest.raises(RuntimeError, match="step 0 of policy paper does not end: 128 samples are missing"):
        simulated(POLICIES["paper"])


# --- the bound --------------------------------------------------------------------------------------------------------


def test_longest_sample_bounds_a_step_of_any_fleet() -> None:
    fleet = [Presence(0.0, 1e9)] * 100
    alone_s = 5_000 * MACHINE.engine.decode_s(1, 100 + 2_500)
    bound_s = shortest_step(JOB, MACHINE, [Group(0, 100, (5_000, 10))], fleet)
    assert alone_s < bound_s < 1.15 * alone_s


def test_bound_does_not_grow_with_the_fleet() -> None:
    fleets = [[], [Presence(10.0, 50.0)], [Presence(10.0, 1e9)], [Presence(10.0, 1e9)] * 2]
    found = [shortest_step(JOB, FULL_CACHES, JOB.groups(0, seed=0), fleet) for fleet in fleets]
    assert found == sorted(found, reverse=True)


def test_bound_of_a_co_located_step_contains_its_training() -> None:
    groups = JOB.groups(0, seed=0)
    train_s = sum(group.tokens for group in groups) * JOB.train_s_per_token
    assert shortest_step(JOB, MACHINE, groups, []) > train_s + JOB.update_s + MACHINE.switch_s


# --- the baselines' rules ---------------------------------------------------------------------------------------------


def test_paper_selects_the_fewest_pending_below_theta() -> None:
    assert select({"a": 3, "b": 1, "c": 2}, theta=4) == "b"
    assert select({"a": 4, "b": 5}, theta=4) is None
    assert select({}, theta=4) is None


def test_paper_moves_one_pending_sample_to_a_worker_without_any() -> None:
    assert balance({"a": 0, "b": 7, "c": 2}, {"a": 9, "b": 9, "c": 9}, plateau=4) == ("b", "a", 1)


def test_paper_moves_samples_beyond_the_plateau_to_an_idle_worker() -> None:
    assert balance({"a": 0, "b": 0}, {"a": 0, "b": 10}, plateau=4) == ("b", "a", 6)
    assert balance({"a": 0, "b": 0}, {"a": 0, "b": 4}, plateau=4) is None
    assert balance({"a": 0, "b": 0}, {"a": 1, "b": 10}, plateau=4) is None


def report(wait_s: float) -> StepReport:
    return StepReport(job_id="job", step=0, metrics={}, wait_s=wait_s, train_s=1.0)


def test_paper_window_follows_the_waits_and_returns_with_the_fleet_size() -> None:
    paper = PaperManager(JOB, MACHINE, POLICIES["paper"])
    paper.window_s = 100.0
    paper.fleet.update(3)
    paper.learn(report(wait_s=30.0), remote_wait_s=0.0)
    assert paper.window_s == pytest.approx(110.0)
    paper.fleet.begin(1.0)
    paper.fleet.update(2)  # the fleet changes: this step is not remembered
    paper.learn(report(wait_s=60.0), remote_wait_s=0.0)
    assert paper.window_s == pytest.approx(130.0)
    paper.fleet.begin(3.0)
    paper.fleet.update(3)
    paper.learn(report(wait_s=0.0), remote_wait_s=0.0)
    assert paper.window_s == pytest.approx(110.0)


def test_polyrl_window_is_in_whole_seconds_and_at_least_five() -> None:
    polyrl = PolyRLManager(JOB, MACHINE, POLICIES["polyrl"])
    polyrl.window_s = 10.0
    polyrl.fleet.update(3)
    polyrl.learn(report(wait_s=0.0), remote_wait_s=300.0)
    assert polyrl.window_s == 5.0


def test_polyrl_cuts_a_migrated_group_to_its_shortest_sample() -> None:
    polyrl = PolyRLManager(JOB, MACHINE, POLICIES["polyrl"])
    request = GroupRequested(
        job_id="job", group=256, n=JOB.group_size, prompt=bytes(4), sampling=Sampling(), version=0, seed=0
    )
    polyrl.turn([request], 0.0, lambda _: True)
    samples = [polyrl.samples[256 + i] for i in range(JOB.group_size)]
    for i, sample in enumerate(samples):
        sample.tokens, sample.finish = 7 + 100 * i, int(i == 3)
    polyrl.requeue(samples[:1])
    assert [(sample.tokens, sample.finish) for sample in samples] == [(7, 0)] * JOB.group_size
