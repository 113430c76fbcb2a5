"""A run's profile holds what it measured in its recent steps."""

from __future__ import annotations

import math

import pytest

from rlboost.services.rollout_manager.domain.measurements import MIN_OBSERVATIONS
from rlboost.services.rollout_manager.domain.step_windows import engine_profiles
from rlboost.services.rollout_manager.domain.world import World
from rlboost.services.trainer.domain.groups import ScoredGroup
from rlboost.services.trainer.domain.metrics import RECENT_STEPS, Durations, ProfileRecorder, RolloutTally, StepTally
from rlboost.shared.job.run_profile import RunProfile
from rlboost.shared.messages import EngineProfile, SampleFinished
from rlboost.shared.wire import I32, pack
from tests.support.builders import engine_profile, heartbeat, worker_joined

ENGINE = engine_profile("sim")


def tally(*, train_s: float = 2.0, engines: tuple[EngineProfile, ...] = (ENGINE,), lengths: int = 5) -> StepTally:
    """Return a step with two prompts of 3 and 4 tokens and completions of 1 to `lengths` tokens."""
    samples = tuple(sample_finished(tokens) for tokens in range(1, lengths + 1))
    groups = [ScoredGroup(1, samples, (0.0,) * lengths, prompt=pack([1] * tokens, I32)) for tokens in (3, 4)]
    times = Durations(seeding_s=1.0, wait_s=3.0, train_s=train_s, step_s=10.0)
    return StepTally(durations=times, rollouts=RolloutTally(scored=groups, engines=engines, scoring_s=[0.1, 0.3]))


def sample_finished(n_tokens: int) -> SampleFinished:
    tokens = pack([1] * n_tokens, I32)
    return SampleFinished(
        sample=1, tokens=tokens, logprobs=tokens, finish="stop", spans=[], attempts=1, group_done=False
    )


def test_profile_has_the_measurements_of_the_steps() -> None:
    profile = ProfileRecorder().observe(tally())
    assert profile is not None
    assert profile.engines == (ENGINE,)
    assert profile.train_s_per_token == 2.0 / (2 * 15 + 5 * (3 + 4))
    assert (profile.step_s, profile.update_s) == (10.0, 4.0)
    assert profile.reward_s == pytest.approx(0.2)
    assert profile.prompt_tokens == (3, 4)
    quantiles = dict(profile.completion_quantiles)
    assert (quantiles[0.0], quantiles[0.5], quantiles[1.0]) == (1.0, 3.0, 5.0)
    assert RunProfile.model_validate_json(profile.model_dump_json()) == profile


def test_profile_covers_the_recent_steps_only() -> None:
    recorder = ProfileRecorder()
    recorder.observe(tally(lengths=50))
    profiles = [recorder.observe(tally()) for _ in range(RECENT_STEPS)]
    last = profiles[-1]
    assert last is not None
    assert last.steps == RECENT_STEPS
    assert last.completion_quantiles[-1] == (1.0, 5.0)


def test_profile_has_the_slowdown_of_each_step_relative_to_the_mean() -> None:
    recorder = ProfileRecorder()
    recorder.observe(tally(train_s=1.0))
    profile = recorder.observe(tally(train_s=3.0))
    assert profile is not None
    assert profile.slowdowns == (0.5, 1.5)


def test_profile_keeps_the_throughput_of_a_kind_that_is_gone() -> None:
    other = engine_profile("other")
    recorder = ProfileRecorder()
    recorder.observe(tally())
    profile = recorder.observe(tally(engines=(other,)))
    assert profile is not None
    assert [engine.kind for engine in profile.engines] == ["other", "sim"]


def test_profile_has_the_mean_times_of_an_engine_over_the_steps() -> None:
    recorder = ProfileRecorder()
    recorder.observe(tally(engines=(engine_profile("sim", step_s=0.01, update_s=1.0, workers=3),)))
    profile = recorder.observe(tally(engines=(engine_profile("sim", step_s=0.03, update_s=2.0, workers=1),)))
    assert profile is not None
    (found,) = profile.engines
    assert found.step_s == pytest.approx(0.02)
    assert (found.update_s, found.workers) == (1.5, 1)


def test_profile_is_unknown_before_throughput_and_training_time() -> None:
    assert ProfileRecorder().observe(tally(engines=())) is None
    assert ProfileRecorder().observe(tally(train_s=0.0)) is None


def test_engine_profile_has_the_medians_of_the_workers_of_a_kind() -> None:
    world = World(lease_s=2.0)
    for name, price, update_s in (("a", 1.0, 0.5), ("b", 3.0, 1.5), ("wrong", 1e6, 1e6), ("idle", 9.0, 0.0)):
        worker = world.fleet.join(worker_joined(name, kind="sim", price_per_hour=price, slots=8), now=0.0)
        assert worker
        worker.assigned_version = ("j", 0)
        for _ in range(MIN_OBSERVATIONS + 1):
            beat = heartbeat(name, state="ready", batch=4.0, step_s=0.04, update_s=update_s, update_pause_s=0.1)
            world.fleet.on_heartbeat(worker, beat, 0.0)
    (found,) = engine_profiles(world.fleet, "j")
    assert (found.kind, found.role, found.workers, found.slots) == ("sim", "preemptible", 3, 8)
    assert (found.price_per_hour, found.update_s, found.update_pause_s) == (3.0, 1.5, 0.1)
    assert found.step_s + 4 * found.per_sample_s == pytest.approx(4 / 100.0)
    assert engine_profiles(world.fleet, "another job") == []


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_engine_profile_that_is_not_finite_is_left_out(value: float) -> None:
    world = World(lease_s=2.0)
    worker = world.fleet.join(worker_joined("a"), now=0.0)
    assert worker
    worker.assigned_version = ("j", 0)
    worker.update_s = 1.0
    worker.profile.observed, worker.profile.each_s = MIN_OBSERVATIONS, value
    assert engine_profiles(world.fleet, "j") == []
