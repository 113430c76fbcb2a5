"""A job whose teacher workers serve: each sample is scored once, as soon as it is whole, also across trainers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlboost.services.trainer.domain.plan import OtherModelIds, SequenceRow, check, plan_step
from rlboost.services.trainer.ports.engine import PolicySettings
from rlboost.services.trainer.ports.storage import JobResources, OtherModel
from rlboost.shared.errors import ConfigError
from rlboost.shared.ids import SampleId
from rlboost.shared.job.spec import JobSpec, RlJob
from rlboost.shared.messages import GroupRequested, SampleDropped, SampleFinished
from rlboost.shared.streams import names
from rlboost.shared.streams.bus import START, HashSet
from rlboost.shared.weights.manifest import Shard
from rlboost.shared.wire import F32, U8, floats, ints, length, pack, unpack
from tests.support.conversation_rig import GAME, ConversationRig, done
from tests.support.eventually import eventually
from tests.support.scripted_manager import Answer, ScriptedManager
from tests.support.trainer_fakes import MemoryWeights
from tests.support.trainer_rig import JOB, Rig, WatchedEngine, spec

SERVING = f"{JOB}.big"
TEACHER_NO = 7
STEPS, SAMPLES_PER_STEP = 5, 8
SERVED: dict[str, Any] = {"models": {"big": {"model": "larger"}}}
DISTILL: dict[str, Any] = {"name": "distill", "group_size": 2, "teacher": {"model": "big", "coef": 0.5}}


def taught_spec(**changes: Any) -> RlJob:
    return spec(**{"steps": STEPS, "algorithm": DISTILL, **SERVED, **changes})


def score(prompt: Sequence[int], completion: Sequence[int]) -> list[float]:
    """Return the log-probabilities that this teacher gives to a completion."""
    return [-1.0 - (sum(prompt) + sum(completion[: n + 1])) % 7 / 8 for n in range(len(completion))]


class NoReference(WatchedEngine):
    """An engine without a reference model, as the settings of these jobs ask for."""

    def reference_logprobs(self, batches: Sequence[Sequence[SequenceRow]]) -> list[bytes]:
        raise AssertionError("the trainer holds no teacher")


class Taught(Rig):
    """A trainer with a teacher, which a second scripted manager answers for."""

    def __init__(self, folder: Path, job: RlJob) -> None:
        super().__init__(folder, job)
        self.rows: list[Any] = []
        self.make_engine = lambda: NoReference(self.rows)
        self.teacher_weights = MemoryWeights()
        self.teacher = ScriptedManager(self.bus, SERVING, seeding_ends=False, script=self.answer)
        self.refused, self.wrong, self.short = False, False, False

    def answer(self, request: GroupRequested, sample: int) -> Answer:
        if self.refused:
            return SampleDropped(sample=sample, reason="the maximum length is 9", group_done=True)
        given = request.sampling.forced
        assert length(given) == request.sampling.max_tokens
        return SampleFinished(
            sample=sample,
            tokens=given[:-4] + b"\1\0\0\0" if self.wrong else given,
            logprobs=pack(score(ints(request.prompt), ints(given))[self.short :], F32),
            finish="length",
            spans=[("w-2", 0, length(given))],
            attempts=1,
            group_done=True,
        )

    def build(self, spec: JobSpec, job_id: str, created: datetime) -> JobResources:
        return with_teacher(super().build(spec, job_id, created), self.teacher_weights)

    @asynccontextmanager
    async def teaching(self) -> AsyncIterator[None]:
        async with served(self, self.teacher):
            yield


def with_teacher(resources: JobResources, weights: MemoryWeights) -> JobResources:
    shard = Shard("w", "uint8", (2,), (0,), (2,), memoryview(b"ab"))
    return replace(resources, models={"big": OtherModel(SERVING, weights, lambda: iter([shard]))})


@asynccontextmanager
async def served(rig: Rig, teacher: ScriptedManager) -> AsyncIterator[None]:
    await rig.bus.transact([HashSet(names.JOBS, {SERVING: json.dumps({"no": TEACHER_NO})})])
    task = asyncio.create_task(teacher.run())
    try:
        yield
    finally:
        task.cancel()


def check_taught(rows: Sequence[Any], coef: float) -> None:
    for row in rows:
        whole = np.array(score(ints(row.prompt), ints(row.completion)))
        column = whole[unpack(row.loss_mask, U8).astype(bool)] if row.loss_mask else whole
        np.testing.assert_allclose(floats(row.reference), column, rtol=1e-6)
        np.testing.assert_allclose(floats(row.advantages), coef * (column - np.array(floats(row.sampled))), rtol=1e-5)


async def test_each_sample_is_scored_once_by_the_published_teacher(tmp_path: Path) -> None:
    rig = Taught(tmp_path, taught_spec())
    async with rig.teaching():
        assert (await rig.run()).state == "completed"
    assert await rig.teacher_weights.head() == 0
    assert len(rig.teacher.answered) == len(rig.rows) == STEPS * SAMPLES_PER_STEP
    assert set(rig.teacher.answered.values()) == {1}
    asked = [SampleId.unpack(request.group) for request in rig.teacher.requests]
    assert {(one.job, one.step) for one in asked} == {(TEACHER_NO, step) for step in range(STEPS)}
    assert {request.sampling.temperature for request in rig.teacher.requests} == {1.0}
    check_taught(rig.rows, coef=0.5)


async def test_sample_is_scored_before_its_group_is_complete(tmp_path: Path) -> None:
    rig = Taught(tmp_path, taught_spec(steps=1))
    rig.manager.withholds = lambda sample: SampleId.unpack(sample).member == 1
    async with rig.teaching(), rig.trainer():
        await rig.command("create")
        await eventually(lambda: len(rig.teacher.answered) == SAMPLES_PER_STEP // 2)
        await rig.manager.release()
        assert (await rig.ended()).state == "completed"
    assert len(rig.teacher.answered) == len(rig.rows) == SAMPLES_PER_STEP


async def test_trainer_that_resumes_reads_the_scores_of_the_killed_one(tmp_path: Path) -> None:
    rig = Taught(tmp_path, taught_spec())
    async with rig.teaching():
        await rig.killed_in(3)
        assert rig.teacher.answered
        assert (await rig.resume()).state == "completed"
    assert len(rig.teacher.answered) == STEPS * SAMPLES_PER_STEP
    assert set(rig.teacher.answered.values()) == {1}, "nothing is scored twice"
    check_taught(rig.rows, coef=0.5)
    left = await rig.bus.read({names.rollouts_finished(SERVING): START}, count=10_000)
    steps = {SampleId.unpack(e.message.sample).step for e in left if isinstance(e.message, SampleFinished)}
    assert 0 not in steps, "what checkpoints cover is trimmed"


async def test_teacher_is_added_to_rewards_and_scores_no_evaluation(tmp_path: Path) -> None:
    changes = {"algorithm": {"group_size": 2, "teacher": {"model": "big"}}, "eval": {"every": 2, "samples": 3}}
    rig = Taught(tmp_path, taught_spec(**changes, data={"train": "t", "eval": "e", "prompts_per_step": 4}))
    async with rig.teaching():
        assert (await rig.run()).state == "completed"
    assert len(rig.teacher.answered) == STEPS * SAMPLES_PER_STEP
    assert not any(SampleId.unpack(sample).is_eval for sample in rig.teacher.answered)


async def test_rows_of_conversations_get_scores_of_the_models_own_tokens(tmp_path: Path) -> None:
    rig = ConversationRig(tmp_path, algorithm=DISTILL, **SERVED)
    rig.make_engine = lambda: NoReference(rig.rows)
    rig.manager.script = done
    teacher, build, weights = Taught(tmp_path, taught_spec()), rig.build, MemoryWeights()
    rig.build = lambda *given: with_teacher(build(*given), weights)  # type: ignore[method-assign]
    manager = ScriptedManager(rig.bus, SERVING, seeding_ends=False, script=teacher.answer)
    async with served(rig, manager):
        assert (await rig.run()).state == "completed"
    assert any(0 in unpack(row.loss_mask, U8) for row in rig.rows)
    assert len(manager.answered) == len(rig.rows)
    check_taught(rig.rows, coef=0.5)


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        ("refused", f"{SERVING} cannot score a completion: the maximum length is 9"),
        ("wrong", f"a worker of {SERVING} has scored another completion"),
        ("short", f"a worker of {SERVING} has not scored each token of a completion"),
    ],
)
async def test_group_without_scores_is_dropped_by_name(tmp_path: Path, fault: str, why: str) -> None:
    rig = Taught(tmp_path, taught_spec())
    setattr(rig, fault, True)
    async with rig.teaching():
        ended = await rig.run()
    assert ended.state == "failed"
    assert "could be scored ({'teacher': 4}): check the teacher, models.big, and the workers" in ended.error
    assert why in ended.error


async def test_teacher_that_no_worker_serves_is_a_named_wait_with_a_limit(tmp_path: Path) -> None:
    rig = Taught(tmp_path, taught_spec())
    rig.samples_limit_s = 0.5
    rig.teacher.held = {0}
    async with rig.teaching(), rig.trainer():
        await rig.command("create")
        await rig.waits_for(f"log-probabilities of {SERVING}")
        ended = await rig.ended()
    assert ended.state == "failed"
    assert f"for log-probabilities of {SERVING} (completions wait to be scored), 8 asked and not" in ended.error
    assert f"'rlboost status {SERVING}'" in ended.error


async def test_lost_group_leaves_no_wait_for_its_teacher(tmp_path: Path) -> None:
    """Its other sample has been asked about, and is not answered before the job ends."""
    rig = Taught(tmp_path, taught_spec(steps=1))
    lost = SampleId(1, False, 0, 0, 1).pack()
    script = rig.manager.script

    def answer(request: GroupRequested, sample: int) -> Answer:
        found = script(request, sample)
        return SampleDropped(sample=sample, reason="no engine runs it", group_done=True) if sample == lost else found

    rig.manager.script = answer
    rig.teacher.withholds = lambda sample: SampleId.unpack(sample).group == 0
    async with rig.teaching():
        assert (await rig.run()).state == "completed"
    assert len(rig.rows) == SAMPLES_PER_STEP - 2


def test_trainer_holds_no_model_of_a_served_teacher() -> None:
    job = taught_spec()
    assert (job.served_teacher, job.held_teacher, job.teacher_model) == ("big", "", "larger")
    assert not PolicySettings.of(job, "token_mean", None).reference
    held = spec(algorithm={**DISTILL, "teacher": {"model": "larger"}})
    assert (held.served_teacher, held.held_teacher, held.teacher_model) == ("", "larger", "larger")
    assert PolicySettings.of(held, "token_mean", None).reference


def test_teacher_that_is_not_among_models_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"algorithm\.teacher\.model: 'bg' is not among models, and it has big: name"):
        taught_spec(algorithm={**DISTILL, "teacher": {"model": "bg"}})
    assert taught_spec(algorithm={**DISTILL, "teacher": {"model": "./bg"}}).held_teacher == "./bg"


def test_judge_and_teacher_of_one_model_have_ids_of_their_own() -> None:
    judge = {"judge": {"model": "big", "prompt": "{completion}", "retries": 1}}
    job = taught_spec(reward=judge)
    ids, planned = OtherModelIds.of(job, []), plan_step(job, 1, 3, n_train=10, n_eval=[])
    asked = [ids.group(TEACHER_NO, group, 0, member, at) for group in planned for member in (0, 1) for at in (0, 1)]
    asked += [ids.group(TEACHER_NO, group, ids.n_judges - 1, member, 0) for group in planned for member in (0, 1)]
    assert len(set(asked)) == len(asked) == 4 * 2 * 3


def test_more_rows_than_a_step_has_ids_are_refused() -> None:
    agent = {"function": "m:agent", "max_turns": 16_384}
    job = taught_spec(agent=agent, reward=None)
    with pytest.raises(ConfigError, match=r"algorithm\.teacher\.model: the models that score may be asked \d+ times"):
        check(job, [])
    check(taught_spec(**GAME), [])


def test_evaluation_needs_no_ids_of_the_teacher() -> None:
    rows = {"train": "t", "eval": "e", "prompts_per_step": 4}
    algorithm = {"group_size": 64, "teacher": {"model": "big"}}
    job = taught_spec(algorithm=algorithm, data=rows, eval={"every": 1, "samples": 5_000})
    check(job, [5_000])
    assert OtherModelIds.of(job, [5_000]).n_numbers == 4 * 64
