"""The trainer's loops and a whole job on fakes: no sockets, no torch."""

from __future__ import annotations

import asyncio
import gc
import json
import threading
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import REGISTRY

from rlboost.services.trainer.domain.loss.function import LossFn
from rlboost.services.trainer.domain.plan import SequenceRow
from rlboost.services.trainer.ports.samples import RewardBatch, Scores
from rlboost.shared.errors import ConfigError, Fatal
from rlboost.shared.ids import SampleId
from rlboost.shared.messages import (
    Event,
    GroupRequested,
    JobReport,
    SampleDropped,
    SeedingEnded,
    SeedingReopened,
    TrainerStatus,
)
from rlboost.shared.streams import names
from rlboost.shared.streams.bus import START, HashSet, Renew
from rlboost.shared.wire import I32, pack
from tests.support.builders import engine_profile
from tests.support.eventually import eventually
from tests.support.scripted_manager import Answer, scripted
from tests.support.stopwatch import Stopwatch
from tests.support.trainer_fakes import FakeEngine, FakeRewards
from tests.support.trainer_rig import JOB, Rig, by_length, spec


async def test_a_job_runs_to_its_end(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    assert await rig.run() == JobReport(job_id=JOB, state="completed", step=5, trainer="t")
    assert {report.trainer for report in await rig.reports() if isinstance(report, JobReport)} == {"t"}
    assert [report.step for report in await rig.steps()] == [0, 1, 2, 3, 4]
    assert sorted(rig.weights.versions) == [0, 1, 2, 3, 4, 5]
    assert rig.folder.model == rig.weights.versions[5]
    assert sorted(rig.folder.rows) == [0, 1, 2, 3, 4]
    for report in await rig.steps():
        assert (report.wait_s, report.train_s) == (report.metrics["time/wait_s"], report.metrics["time/train_s"])
    assert all(report.train_s > 0 for report in await rig.steps())
    assert await rig.bus.claim(names.JOB_COMMANDS, names.TRAINER_GROUP, "x", min_idle_s=0) == []
    assert rig.engine.closed


@pytest.mark.parametrize(("max_staleness", "without"), [(0, {2}), (1, {2, 3})])
async def test_tokens_that_were_made_for_an_earlier_trainer_are_in_no_rate(
    tmp_path: Path, max_staleness: int, without: set[int]
) -> None:
    rig = Rig(tmp_path, spec(elastic={"max_staleness": max_staleness}))
    await rig.killed_in(2)
    assert (await rig.resume()).state == "completed"
    for report in await rig.steps():
        assert ("perf/tokens_per_s" in report.metrics) is (report.step not in without)
        assert report.metrics["perf/throughput"] > 0, "it was trained on in that time, whenever it was made"


async def test_groups_are_requested_only_after_their_version_is_committed(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    seen: list[tuple[int, int]] = []

    def script(request: GroupRequested, sample: int) -> Answer:
        seen.append((request.version, max(rig.weights.versions)))
        return scripted(request, sample)

    rig.manager.script = script
    await rig.run()
    assert seen
    assert all(version == head for version, head in seen)
    assert {request.vocab_size for request in rig.manager.requests} == {100}


async def test_evaluation_runs_at_its_interval_and_at_the_end(tmp_path: Path) -> None:
    rig = Rig(tmp_path, spec(data={"train": "t", "eval": "e", "prompts_per_step": 4}, eval={"every": 2, "samples": 4}))
    trained = REGISTRY.get_sample_value("rlboost_trainer_steps_total") or 0.0
    await rig.run()
    rows = {report.step: report.metrics for report in await rig.steps()}
    assert [step for step in rows if "eval/reward_mean" in rows[step]] == [0, 2, 4, 5]
    assert REGISTRY.get_sample_value("rlboost_trainer_steps_total") == trained + 5
    assert "reward/mean" not in rows[5]


@pytest.mark.parametrize(("most", "shown"), [(0, 0), (3, 3), (64, 4)])
async def test_some_samples_of_each_step_are_logged(tmp_path: Path, most: int, shown: int) -> None:
    log = {"wandb": {"project": "p"}, "samples": most}
    rig = Rig(tmp_path, spec(data={"train": "t", "prompts_per_step": 4}, steps=2, log=log))
    await rig.run()
    assert {step: len(samples) for step, samples in rig.folder.samples.items()} == {0: shown, 1: shown}
    stream = await rig.bus.read({names.job_samples(JOB): START}, count=10_000)
    scored = [entry.message.fields for entry in stream if isinstance(entry.message, Event)]
    first = {
        (one["step"], one["prompt"], one["completion"], one["reward"]) for one in scored if one["sample"].endswith("/0")
    }
    for samples in rig.folder.samples.values():
        assert set(samples) <= first, "of different prompts"
        assert len(set(samples)) == len(samples)


async def test_steps_that_are_asked_for_are_profiled_once(tmp_path: Path) -> None:
    rig = Rig(tmp_path, spec(steps=4))
    await rig.bus.transact([HashSet(names.job_profile(JOB), {"steps": "2"})])
    assert (await rig.run()).state == "completed"
    assert rig.engine.profiles == [Path("profile/step-0")] * 2
    events = await rig.events()
    assert [fields for kind, fields in events if kind == "profile_written"] == [{"step": 1, "path": "profile/step-0"}]
    assert ("warning", {"text": "rank 0: no trace"}) in events
    assert await rig.bus.hash_all(names.job_profile(JOB)) == {}


async def test_profile_of_more_steps_than_are_left_ends_with_the_last(tmp_path: Path) -> None:
    rig = Rig(tmp_path, spec(steps=2, data={"train": "t", "eval": "e"}, eval={"every": 9, "samples": 3}))
    await rig.bus.transact([HashSet(names.job_profile(JOB), {"steps": "9"})])
    assert (await rig.run()).state == "completed"
    assert [fields["step"] for kind, fields in await rig.events() if kind == "profile_written"] == [1]


SETS = {
    "strict": {"data": "s", "samples": 6, "sampling": {"temperature": 0, "max_tokens": 7}},
    "lenient": {"data": "l", "samples": 2, "pass_reward": -1},
}


def is_last_evaluation(sample: int) -> bool:
    """Return True for a sample of the evaluation after the only step."""
    return SampleId.unpack(sample)[1:3] == (True, 1)


async def test_trainer_killed_during_an_evaluation_of_several_sets_generates_no_sample_twice(tmp_path: Path) -> None:
    data = {"train": "t", "eval": "e", "prompts_per_step": 4}
    rig = Rig(tmp_path, spec(steps=1, data=data, eval={"every": 9, "samples": 4, "sets": SETS}))
    rig.manager.withholds = lambda sample: is_last_evaluation(sample) and sample % 2 == 0
    async with rig.trainer(killed=True):
        await rig.command("create")
        await rig.waits_for("samples of the evaluation")
        await eventually(lambda: sum(map(is_last_evaluation, rig.manager.answered)) == 12)
    rig.lease_runs_out()
    await rig.manager.release()
    assert (await rig.resume()).state == "completed"
    assert set(rig.manager.answered.values()) == {1}

    last = [request for request in rig.manager.requests if is_last_evaluation(request.group)]
    drawn = {request.group: (request.sampling.temperature, request.sampling.max_tokens, request.n) for request in last}
    own = rig.rl_job.sampling.temperature, rig.rl_job.sampling.max_tokens
    assert sorted(drawn.values()) == sorted([(*own, 2), (*own, 1), (*own, 1), *[(0.0, 7, 2)] * 3, *[(*own, 1)] * 2])
    assert [SampleId.unpack(group).group for group in sorted(drawn)] == list(range(8)), "no number is left out"
    row = rig.folder.rows[1]
    assert {name for name in row if "pass@" in name} == {
        *("eval/pass@1", "eval/strict/pass@1", "eval/strict/pass@2", "eval/lenient/pass@1")
    }
    assert row["eval/lenient/pass@1"] == 1.0
    events = await rig.bus.read({names.job_samples(JOB): START}, count=10_000)
    scored = [entry.message.fields for entry in events if isinstance(entry.message, Event)]
    assert Counter(sample.get("set") for sample in scored if sample["is_eval"] and sample["step"] == 1) == {
        None: 4,
        "strict": 6,
        "lenient": 2,
    }


class HeldRewards(FakeRewards):
    """Answers when it may."""

    def __init__(self, function: Callable[[RewardBatch], Scores], may: asyncio.Event) -> None:
        super().__init__(function)
        self._may = may

    async def score(self, batch: RewardBatch) -> Scores:
        await self._may.wait()
        return await super().score(batch)


async def test_evaluation_shows_how_many_samples_have_arrived_and_are_scored(tmp_path: Path) -> None:
    what = spec(steps=1, data={"train": "t", "eval": "e", "prompts_per_step": 4}, eval={"every": 1, "samples": 4})
    rig, build, may_score = Rig(tmp_path, what), Rig.build, asyncio.Event()
    rig.build = lambda *of: replace(build(rig, *of), rewards=HeldRewards(rig.reward, may_score))  # type: ignore[method-assign]
    may_score.set()

    def waits_for(subject: str, because: str) -> Callable[[], bool]:
        return lambda: (subject, because) in [(wait.subject, wait.because) for wait in rig.waits.current()]

    rig.manager.withholds = lambda sample: SampleId.unpack(sample).is_eval
    async with rig.trainer():
        await rig.command("create")
        both = "8 of 12 samples have arrived (0 of 4 for the evaluation)"
        await eventually(waits_for("samples of step 1", both))
        await rig.manager.release(lambda sample: SampleId.unpack(sample)[1:3] == (True, 1))
        await eventually(waits_for("samples of the evaluation", "0 of 4 samples have arrived"))
        may_score.clear()
        await rig.manager.release()
        await eventually(waits_for("the rewards", "the evaluation after step 1 is scored: 0 of 3 groups"))
        may_score.set()
        assert (await rig.ended()).state == "completed"


async def test_run_writes_its_profile_with_the_throughput_of_workers(tmp_path: Path) -> None:
    rig = Rig(tmp_path, spec(steps=3))
    rig.manager.engines = [engine_profile()]
    await rig.run()
    profile = rig.folder.profile
    assert profile is not None
    assert profile.steps == 3
    (engine,) = profile.engines
    assert engine.update_s == pytest.approx(engine_profile().update_s)
    assert engine.model_copy(update={"update_s": engine_profile().update_s}) == engine_profile()


class Recording(FakeEngine):
    """Notes whether the device was the trainer's when it computed."""

    def __init__(self, allowed: Callable[[], bool]) -> None:
        super().__init__()
        self._allowed = allowed
        self.calls: list[bool] = []

    def accumulate(self, batches: Any, loss: LossFn) -> dict[str, float]:
        self.calls.append(self._allowed())
        return super().accumulate(batches, loss)


async def test_device_is_used_only_between_seeding_end_and_reopening(tmp_path: Path) -> None:
    rig = Rig(tmp_path, spec(steps=1, algorithm={"group_size": 2}))
    rig.manager.seeding_ends = False
    rig.manager.held = {0}
    ours = False
    engine = Recording(lambda: ours)
    rig.make_engine = lambda: engine
    stream = names.rollouts_finished(JOB)
    async with rig.trainer():
        await rig.command("create")
        await rig.waits_for("samples of step 1")
        await rig.bus.append(stream, SeedingEnded(step=0, window_s=1.0, reason="window"))
        await rig.bus.append(stream, SeedingReopened(step=0))
        rig.manager.held = set()
        await rig.waits_for("the device")
        assert engine.calls == []
        ours = True
        await rig.bus.append(stream, SeedingEnded(step=0, window_s=1.0, reason="finished"))
        await rig.ended()
    assert engine.calls
    assert all(engine.calls)


@pytest.mark.parametrize("max_staleness", [0, 1, 3])
async def test_successor_uses_the_same_samples_and_reaches_the_same_bits(tmp_path: Path, max_staleness: int) -> None:
    job = spec(elastic={"max_staleness": max_staleness})
    undisturbed = Rig(tmp_path / "a", job)
    await undisturbed.run()
    for killed_in in range(5):
        rig = Rig(tmp_path / f"b{killed_in}", job)
        await rig.killed_in(killed_in)
        assert (await rig.resume()).state == "completed"
        assert rig.weights.versions == undisturbed.weights.versions
        assert set(rig.manager.answered.values()) == {1}
        assert {r.group for r in rig.manager.requests} == {r.group for r in undisturbed.manager.requests}
        assert rig.folder.model == undisturbed.folder.model
        assert all(report.metrics["samples/duplicates"] == 0 for report in await rig.steps())


async def test_committed_weights_replace_retrained_ones(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    rig.manager.held = {1}
    async with rig.trainer(killed=True):
        await rig.command("create")
        await eventually(lambda: max(rig.weights.versions, default=-1) == 1)
    committed = [shard._replace(data=b"\x00\x00\x80?" * 2) for shard in rig.weights.versions[1]]
    rig.weights.versions[1] = committed
    rig.manager.held = set()
    rig.lease_runs_out()
    await rig.resume()
    assert rig.weights.versions[1] == committed
    assert ("weights_restored", {"version": 1}) in await rig.events()


async def test_a_second_trainer_does_not_join_a_job_that_is_led(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    await rig.bus.transact([Renew(names.trainer_lease(JOB), json.dumps({"trainer": "another"}), 0.7)])
    async with rig.trainer():
        await rig.command("create")
        await rig.waits_for("the lease of the job")
        assert rig.manager.requests == []
        assert (await rig.ended()).state == "completed"


class Slow(FakeEngine):
    """Computes until `finish` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.began, self.finish = threading.Event(), threading.Event()

    def accumulate(self, batches: Any, loss: LossFn) -> dict[str, float]:
        self.began.set()
        assert self.finish.wait(60)
        return super().accumulate(batches, loss)


async def _cancel(rig: Rig) -> None:
    stopwatch = Stopwatch()
    await rig.command("cancel")
    assert (await rig.ended()).state == "cancelled"
    assert stopwatch.read() < 1.0


async def test_part_that_does_not_close_leaves_no_other_part_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(self: FakeRewards) -> None:
        raise Fatal("a process does not end")

    monkeypatch.setattr(FakeRewards, "close", fail)
    rig = Rig(tmp_path)
    async with rig.trainer():
        await rig.command("create")
        ended = await rig.ended()
        assert (ended.state, ended.error) == ("failed", "a process does not end")
        assert await eventually(lambda: rig.engine.closed)
    assert rig.folder.end == "failed"
    rig = Rig(tmp_path / "cancelled")
    rig.manager.held = {1}
    async with rig.trainer():
        await rig.command("create")
        await rig.waits_for("samples of step 2")
        await rig.command("cancel")
        assert (await rig.ended()).state == "failed"
    assert rig.folder.end == "failed"


async def test_loggers_are_told_how_the_run_of_each_process_ends(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    rig.manager.held = {1}
    async with rig.trainer():
        await rig.command("create")
        await rig.waits_for("samples of step 2")
    ends = [rig.folder.end]  # the next trainer continues
    rig.manager.held = set()
    assert (await rig.resume()).state == "completed"
    assert [*ends, rig.folder.end] == ["stopped", "completed"]
    broken = Rig(tmp_path / "broken")
    broken.reward = lambda _batch: Scores(None, "timeout", "no answer in 5 s")
    assert (await broken.run()).state == "failed"
    assert broken.folder.end == "failed"


async def test_cancel_during_a_wait_for_samples_takes_effect_within_1_s(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    rig.manager.held = {1}
    async with rig.trainer():
        await rig.command("create")
        await rig.waits_for("samples of step 2")
        await _cancel(rig)
    assert rig.folder.end == "cancelled"
    assert await rig.bus.claim(names.JOB_COMMANDS, names.TRAINER_GROUP, "x", min_idle_s=0) == []


async def test_cancel_during_computation_takes_effect_within_1_s(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    engine = Slow()
    rig.make_engine = lambda: engine
    async with rig.trainer():
        await rig.command("create")
        await eventually(engine.began.is_set)
        try:
            await _cancel(rig)
        finally:
            engine.finish.set()
        assert await eventually(lambda: engine.closed)


async def test_call_of_an_ended_job_without_end_ends_the_process(tmp_path: Path) -> None:
    """Nothing else frees the device for the next job, which is not claimed meanwhile."""
    rig = Rig(tmp_path, timing=replace(Rig(tmp_path).timing, last_call_limit_s=0.2))
    engine = Slow()
    rig.make_engine = lambda: engine

    async def until_the_process_ends() -> None:
        async with rig.trainer():
            await rig.command("create")
            await eventually(engine.began.is_set)
            await _cancel(rig)
            await rig.command("create", job_id="job-2")
            await rig.waits_for("the device")
            await eventually(lambda: not rig.waits.current())

    try:
        with pytest.raises(Fatal, match=r"a call of job job-1 still runs 0\.2 s after the end of the job"):
            await until_the_process_ends()
    finally:
        engine.finish.set()
    assert {report.job_id for report in await rig.reports()} == {"job-1"}


async def test_cancel_of_a_paused_job_takes_effect_within_1_s(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    await rig.command("create")
    await rig.command("pause")
    async with rig.trainer():
        await rig.waits_for("a resume")
        await _cancel(rig)


async def test_a_cancel_before_the_job_has_begun_ends_it(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    await rig.command("create")
    await rig.command("cancel")
    assert (await rig.resume()).state == "cancelled"


async def test_a_pause_holds_at_the_next_step_and_outlives_the_trainer(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    rig.manager.held = {2}
    async with rig.trainer(killed=True) as trainer:
        await rig.command("create")
        await eventually(lambda: trainer._current is not None and trainer._current.step == 2)
        await rig.command("pause")
        await eventually(lambda: trainer._jobs.is_paused(JOB))
        rig.manager.held = set()
        await eventually(lambda: 3 in rig.weights.versions)
        await eventually(lambda: _last_state_is(rig, "paused"))
    rig.lease_runs_out()
    async with rig.trainer():
        await eventually(lambda: _paused_again(rig))
        assert max(rig.weights.versions) == 3
        await rig.command("resume")
        assert (await rig.ended()).state == "completed"


async def _last_state_is(rig: Rig, state: str) -> bool:
    states = await rig.states()
    return bool(states) and states[-1] == state


async def _paused_again(rig: Rig) -> bool:
    return (await rig.states()).count("paused") == 2


async def test_trainer_lease_names_the_current_phase_and_wait(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    rig.manager.held = {0}
    async with rig.trainer():
        await rig.command("create")

        async def told(step: int) -> TrainerStatus | None:
            [text] = await rig.bus.lease_values([names.trainer_lease(JOB)])
            status = TrainerStatus.model_validate_json(text) if text else None
            return status if status and status.step == step and status.waiting else None

        before = await eventually(lambda: told(0))
        assert before is not None
        rig.manager.held = {1}
        status = await eventually(lambda: told(1))
        assert status is not None
        assert status.phase == "training"
        assert before.phase_since < status.phase_since <= status.at
        assert status.waiting is not None
        assert status.waiting.subject == "samples of step 2"
        assert status.waiting.kind == "samples"
        assert status.waiting.because == "0 of 8 samples have arrived"
        rig.manager.held = set()
        await rig.ended()
    assert await rig.bus.lease_values([names.trainer_lease(JOB)]) == [None]


async def test_trainer_lease_names_a_reward_function_that_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig, may_score, score = Rig(tmp_path), asyncio.Event(), FakeRewards.score

    async def hang(rewards: FakeRewards, batch: RewardBatch) -> Scores:
        await may_score.wait()
        return await score(rewards, batch)

    monkeypatch.setattr(FakeRewards, "score", hang)
    async with rig.trainer():
        await rig.command("create")

        async def waits_for_rewards() -> bool:
            [text] = await rig.bus.lease_values([names.trainer_lease(JOB)])
            waiting = json.loads(text)["waiting"] if text else None
            return waiting is not None and waiting["subject"] == "the rewards"

        await eventually(waits_for_rewards)
        may_score.set()
        await rig.ended()


async def test_job_waits_out_a_redis_outage(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    rig.manager.held = {1}
    async with rig.trainer():
        await rig.command("create")
        await eventually(lambda: 1 in rig.weights.versions)
        rig.bus.down = True
        await rig.waits_for("Redis")
        rig.manager.held = set()
        rig.bus.down = False
        assert (await rig.ended()).state == "completed"
    assert set(rig.manager.answered.values()) == {1}


async def test_group_without_rewards_is_dropped_counted_and_reported(tmp_path: Path) -> None:
    rig = Rig(tmp_path, spec(steps=1, data={"train": "t", "prompts_per_step": 10}))
    rig.reward = lambda batch: (
        Scores(None, "raised", "ValueError: no") if batch.columns["row"][0] == 4 else by_length(batch)
    )
    assert (await rig.run()).state == "completed"
    [report] = await rig.steps()
    assert report.metrics["groups/dropped/raised"] == 1.0
    [(_, fields)] = [event for event in await rig.events() if event[0] == "group_dropped"]
    assert fields["reason"] == "raised"
    assert fields["detail"] == "ValueError: no"
    warnings = [fields["text"] for kind, fields in await rig.events() if kind == "warning"]
    assert warnings == ["a group of step 1 was dropped (raised) and is not trained: ValueError: no"]


async def test_omitted_prompts_and_advice_about_the_data_are_reported(tmp_path: Path) -> None:
    rig = Rig(tmp_path, spec(steps=1, data={"train": "t", "prompts_per_step": 2, "max_prompt_tokens": 9}))
    rig.n_too_long = 4
    rig.advice = ["data.train: every prompt ends with an answer"]
    assert (await rig.run()).state == "completed"
    [(_, fields)] = [event for event in await rig.events() if event[0] == "prompts_filtered"]
    assert (fields["train_filtered"], fields["train_remaining"], fields["eval_filtered"]) == (4, 10, 0)
    assert "more than 9 tokens (data.max_prompt_tokens)" in fields["reason"]
    assert [fields["text"] for kind, fields in await rig.events() if kind == "warning"] == rig.advice


async def test_reward_of_each_function_is_reported(tmp_path: Path) -> None:
    rig = Rig(tmp_path, spec(steps=1, data={"train": "t", "prompts_per_step": 2}))

    def two(batch: RewardBatch) -> Scores:
        return Scores(by_length(batch).rewards, parts={"right": (1.0,) * len(batch.completions)})

    rig.reward = two
    assert (await rig.run()).state == "completed"
    [report] = await rig.steps()
    assert report.metrics["reward/right/mean"] == 1.0


async def test_a_group_whose_sample_cannot_be_generated_is_dropped_whole(tmp_path: Path) -> None:
    rig = Rig(tmp_path, spec(steps=1))
    first = SampleId(1, False, 0, 0, 1).pack()

    def script(request: GroupRequested, sample: int) -> Answer:
        if sample == first:
            return SampleDropped(sample=sample, reason="the prompt is too long", group_done=True)
        return scripted(request, sample)

    rig.manager.script = script
    assert (await rig.run()).state == "completed"
    [report] = await rig.steps()
    assert report.metrics["groups/dropped/generation"] == 1.0


@pytest.mark.parametrize(
    ("reward", "suspect"),
    [
        ({"function": "m:f"}, "check reward.function m:f; "),
        ({"url": "http://h:1/s"}, "check reward.url http://h:1/s; "),
        ({"functions": [{"function": "m:f"}, {"url": "http://h:1/s"}]}, "check reward.functions m:f, http://h:1/s; "),
    ],
)
async def test_a_reward_that_never_answers_fails_the_job_and_not_the_trainer(
    tmp_path: Path, reward: dict[str, Any], suspect: str
) -> None:
    rig = Rig(tmp_path, spec(reward=reward))
    rig.reward = lambda _batch: Scores(None, "timeout", "no answer in 5 s")
    async with rig.trainer():
        await rig.command("create")
        report = await rig.ended()
        assert report.state == "failed"
        assert "no group of step 1 could be scored" in report.error
        assert "the first: no answer in 5 s" in report.error
        assert suspect in report.error


async def test_a_job_that_cannot_be_built_fails_with_the_reason_and_the_next_one_runs(tmp_path: Path) -> None:
    rig = Rig(tmp_path)

    def refuse() -> FakeEngine:
        raise ConfigError("model: 'm' is no directory here")

    rig.make_engine = refuse
    async with rig.trainer():
        await rig.command("create", job_id="refused")
        assert (await rig.ended()).error == "model: 'm' is no directory here"
        rig.make_engine = FakeEngine
        await rig.command("create")
        await eventually(lambda: _last_state_is(rig, "completed"))


async def test_an_error_of_no_known_kind_fails_the_job_and_not_the_trainer(tmp_path: Path) -> None:
    class Broken(FakeEngine):
        def step(self, learning_rate: float) -> float:
            raise ZeroDivisionError(learning_rate)

    rig = Rig(tmp_path)
    rig.make_engine = Broken
    assert "unexpected ZeroDivisionError" in (await rig.run()).error


async def test_a_silence_that_lasts_too_long_fails_the_job_by_name(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    rig.samples_limit_s = 0.3
    rig.manager.held = {0}
    report = await rig.run()
    assert "samples of step 1" in report.error
    assert "0 of 8" in report.error
    (exceeded,) = [fields for kind, fields in await rig.events() if kind == "wait_limit_exceeded"]
    assert (exceeded["subject"], exceeded["limit_s"]) == ("samples of step 1", 0.3)


async def test_finished_samples_are_trimmed_up_to_the_older_checkpoint(tmp_path: Path) -> None:
    rig = Rig(tmp_path, spec(steps=7))
    await rig.run()
    # A step may end while its checkpoint is still being written: then the next one tells.
    told = [report.checkpointed_step for report in await rig.steps()]
    assert all(step in allowed for step, allowed in zip(told, [{0}] * 4 + [{0, 2}, {0, 2}, {2, 4}], strict=True)), told
    left = await rig.bus.read({names.rollouts_finished(JOB): START}, count=10_000)
    steps = {SampleId.unpack(e.message.sample).step for e in left if hasattr(e.message, "sample")}
    assert {6} <= steps <= {5, 6}, "those of step 6 and of the end are the two"


async def test_resume_never_refuses_a_job_that_was_interrupted(tmp_path: Path) -> None:
    rig = Rig(tmp_path, spec(trainer={"resume": "never"}))
    rig.manager.held = {1}
    async with rig.trainer(killed=True):
        await rig.command("create")
        await eventually(lambda: 1 in rig.weights.versions)
    rig.lease_runs_out()
    assert "trainer.resume" in (await rig.resume()).error


async def test_scored_samples_are_shown_with_their_lineage(tmp_path: Path) -> None:
    rig = Rig(tmp_path, spec(steps=1))
    await rig.run()
    entries = await rig.bus.read({names.job_samples(JOB): START}, count=1000)
    assert len(entries) == 8
    event = entries[0].message
    assert isinstance(event, Event)
    assert event.kind == "sample_scored"
    assert event.fields["spans"] == [["w-1", 0, event.fields["n_tokens"]]]
    assert isinstance(event.fields["reward"], float)


async def test_trainer_without_a_job_holds_no_engine(tmp_path: Path) -> None:
    rig = Rig(tmp_path, spec(steps=1))
    async with rig.trainer():
        await rig.command("create")
        await rig.ended()
        engine = weakref.ref(rig.engine)
        rig.engine = FakeEngine()
        await eventually(lambda: gc.collect() >= 0 and engine() is None)


def test_rows_know_their_length() -> None:
    assert SequenceRow(pack([1, 2], I32), pack([3], I32)).n_tokens == 3
