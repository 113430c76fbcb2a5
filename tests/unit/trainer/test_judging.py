"""A job whose completions a judge or a reward model on workers scores: one verdict for each, also across trainers."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from rlboost.services.trainer.domain.plan import OtherModelIds, check, plan_step
from rlboost.services.trainer.ports.storage import JobResources, OtherModel
from rlboost.shared.errors import ConfigError
from rlboost.shared.ids import SampleId
from rlboost.shared.job.reward import JudgeSpec
from rlboost.shared.job.spec import JobSpec, RlJob
from rlboost.shared.messages import Event, GroupRequested, SampleDropped, SampleFinished
from rlboost.shared.streams import names
from rlboost.shared.streams.bus import START, HashSet
from rlboost.shared.weights.manifest import Shard
from rlboost.shared.wire import F32, I32, floats, ints, pack
from tests.support.scripted_manager import Answer, ScriptedManager, scripted
from tests.support.trainer_fakes import MemoryWeights
from tests.support.trainer_rig import JOB, Rig, spec

SERVING = f"{JOB}.judge"
JUDGE_NO = 7
STEPS, SAMPLES_PER_STEP = 5, 8
Text = Callable[[str], str]


class FakeChat:
    """A tokenizer of code points."""

    stop_token_ids: tuple[int, ...] = (2,)
    vocab_size = 1 << 16

    def question(self, text: str, max_tokens: int) -> bytes:
        if len(text) + max_tokens > 1000:
            raise ConfigError("its question is too long")
        return pack([ord(letter) for letter in text], I32)

    def decode(self, tokens: bytes) -> str:
        return "".join(map(chr, ints(tokens)))


class FakeScores:
    """A reward model of code points."""

    digest = "d1"
    forced = pack([0], I32)
    vocab_size = 1 << 16

    def conversation(self, prompt: Any, completion: Any, columns: Any) -> bytes:
        del columns
        if len(completion) > 30:
            raise ConfigError("a conversation is too long")
        return pack([ord(letter) for letter in f"{prompt}{completion}"], I32)

    def score(self, logprobs: bytes) -> float | None:
        (found,) = floats(logprobs)
        return -found if found > -100 else None


def scored_spec() -> RlJob:
    return spec(steps=STEPS, models={"judge": {"model": "small"}}, reward={"model": "judge"})


def scored(request: GroupRequested, sample: int) -> Answer:
    """Answer with a log-probability that depends on the length of the conversation."""
    assert request.sampling.forced == FakeScores.forced
    assert (request.sampling.max_tokens, request.sampling.temperature, request.vocab_size) == (1, 1.0, 1 << 16)
    logprobs = pack([-len(ints(request.prompt)) / 4], F32)
    changes = {"tokens": request.sampling.forced, "logprobs": logprobs, "spans": [("w-1", 0, 1)]}
    return scripted(request, sample).model_copy(update=changes)


def judged_spec(**judged: Any) -> RlJob:
    judge = {"model": "judge", "prompt": "{prompt}: {completion}", **judged}
    return spec(steps=STEPS, models={"judge": {"model": "small"}}, reward={"judge": judge})


class JudgedRig(Rig):
    """A trainer with a judge, which a second scripted manager answers for."""

    def __init__(self, folder: Path, job: RlJob, answer: Text) -> None:
        super().__init__(folder, job)
        self.judge_weights = MemoryWeights()
        self.judge = ScriptedManager(self.bus, SERVING, seeding_ends=False, script=self._script)
        self._answer = answer

    def _script(self, request: GroupRequested, sample: int) -> Answer:
        text = self._answer("".join(map(chr, ints(request.prompt))))
        if not text:
            return SampleDropped(sample=sample, reason="no worker runs it", group_done=True)
        tokens = pack([ord(letter) for letter in text], I32)
        return scripted(request, sample).model_copy(update={"tokens": tokens, "spans": [("w-1", 0, len(text))]})

    def build(self, spec: JobSpec, job_id: str, created: datetime) -> JobResources:
        shard = Shard("w", "uint8", (2,), (0,), (2,), memoryview(b"ab"))
        judge = OtherModel(SERVING, self.judge_weights, lambda: iter([shard]), FakeChat(), FakeScores())
        return replace(super().build(spec, job_id, created), models={"judge": judge})

    @asynccontextmanager
    async def judging(self) -> AsyncIterator[None]:
        await self.bus.transact([HashSet(names.JOBS, {SERVING: json.dumps({"no": JUDGE_NO})})])
        task = asyncio.create_task(self.judge.run())
        try:
            yield
        finally:
            task.cancel()

    async def scored(self) -> list[dict[str, Any]]:
        entries = await self.bus.read({names.job_samples(JOB): START}, count=10_000)
        return [entry.message.fields for entry in entries if isinstance(entry.message, Event)]


def length_of(question: str) -> str:
    return f"I give {len(question) % 3}."


async def test_each_completion_gets_one_verdict_of_the_published_judge(tmp_path: Path) -> None:
    rig = JudgedRig(tmp_path, judged_spec(), length_of)
    async with rig.judging():
        assert (await rig.run()).state == "completed"
    assert await rig.judge_weights.head() == 0
    assert len(rig.judge.answered) == STEPS * SAMPLES_PER_STEP
    assert set(rig.judge.answered.values()) == {1}
    asked = [SampleId.unpack(request.group) for request in rig.judge.requests]
    assert {one.job for one in asked} == {JUDGE_NO}
    assert {one.step for one in asked} == set(range(STEPS))
    for sample in await rig.scored():
        verdict = sample["verdicts"]["judge"]
        assert sample["reward"] == verdict["reward"] == float(verdict["answer"][-2])
        assert (verdict["job_id"], verdict["spans"], verdict["tries"]) == (SERVING, [["w-1", 0, 9]], 1)


async def test_trainer_that_resumes_reads_the_verdicts_of_the_killed_one(tmp_path: Path) -> None:
    rig = JudgedRig(tmp_path, judged_spec(), length_of)
    async with rig.judging():
        await rig.killed_in(3)
        before = dict(rig.judge.answered)
        assert (await rig.resume()).state == "completed"
    assert before
    assert len(rig.judge.answered) == STEPS * SAMPLES_PER_STEP
    assert set(rig.judge.answered.values()) == {1}, "nothing is judged twice"
    left = await rig.bus.read({names.rollouts_finished(SERVING): START}, count=10_000)
    steps = {SampleId.unpack(e.message.sample).step for e in left if isinstance(e.message, SampleFinished)}
    assert 0 not in steps, "what checkpoints cover is trimmed"


async def test_answer_without_verdict_is_asked_again_with_another_id(tmp_path: Path) -> None:
    seen = set[str]()

    def second_time(question: str) -> str:
        answer = "2" if question in seen else "no idea"
        seen.add(question)
        return answer

    rig = JudgedRig(tmp_path, judged_spec(retries=1), second_time)
    async with rig.judging():
        assert (await rig.run()).state == "completed"
    tries = {sample["verdicts"]["judge"]["tries"] for sample in await rig.scored()}
    assert tries <= {1, 2}
    assert 2 in tries
    assert set(rig.judge.answered.values()) == {1}, "each try has an id of its own"


@pytest.mark.parametrize(
    ("answer", "why"),
    [("no idea", "its answer has no verdict that judge.parse finds"), ("", "was dropped: no worker runs it")],
)
async def test_completion_without_verdict_has_a_missing_reward(tmp_path: Path, answer: str, why: str) -> None:
    rig = JudgedRig(tmp_path, judged_spec(), lambda _: answer)
    async with rig.judging():
        ended = await rig.run()
    assert ended.state == "failed"
    assert "could be scored ({'missing': 4}): check reward.judge judge; the first: " in ended.error
    n_tries = 3 if answer else 1
    assert len(rig.judge.answered) == n_tries * SAMPLES_PER_STEP
    assert why in ended.error


async def test_search_for_a_verdict_holds_up_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    threads, search = set[threading.Thread](), JudgeSpec.reward_in

    def recorded(spec: JudgeSpec, answer: str) -> float | None:
        threads.add(threading.current_thread())
        return search(spec, answer)

    monkeypatch.setattr(JudgeSpec, "reward_in", recorded)
    rig = JudgedRig(tmp_path, judged_spec(), length_of)
    async with rig.judging():
        assert (await rig.run()).state == "completed"
    assert threads
    assert threading.main_thread() not in threads


async def test_judge_that_never_answers_is_a_named_wait_with_a_limit(tmp_path: Path) -> None:
    rig = JudgedRig(tmp_path, judged_spec(), length_of)
    rig.samples_limit_s = 0.5
    rig.judge.held = {0}
    async with rig.judging(), rig.trainer():
        await rig.command("create")
        await rig.waits_for(f"verdicts of {SERVING}")
        ended = await rig.ended()
    assert ended.state == "failed"
    assert f"for verdicts of {SERVING} (completions wait to be judged), {SAMPLES_PER_STEP} asked" in ended.error
    assert "'rlboost worker list'" in ended.error


async def test_job_whose_serving_job_is_unknown_fails(tmp_path: Path) -> None:
    rig = JudgedRig(tmp_path, judged_spec(), length_of)
    ended = await rig.run()
    assert f"there is no job {SERVING}, which serves models.judge: create the job again" in ended.error


def test_each_question_of_a_step_has_its_own_id() -> None:
    job = judged_spec(retries=1)
    planned = plan_step(job, 1, 3, n_train=10, n_eval=[])
    ids = OtherModelIds.of(job, [])
    asked = {ids.group(JUDGE_NO, group, 0, member, at) for group in planned for member in range(2) for at in range(2)}
    assert len(asked) == ids.n_numbers == 4 * 2 * 2
    assert {SampleId.unpack(one).step for one in asked} == {3}


def test_more_questions_than_a_step_has_ids_are_refused() -> None:
    job = spec(
        models={"judge": {"model": "small"}},
        reward={"judge": {"model": "judge", "prompt": "{completion}", "retries": 15}},
        data={"train": "t.jsonl", "prompts_per_step": 1024},
        algorithm={"group_size": 8, "updates_per_step": 2},
    )
    with pytest.raises(ConfigError, match=r"reward\.judge\.retries: the models that score may be asked 131072 times"):
        check(job, [])


async def test_each_completion_gets_one_score_of_the_published_reward_model(tmp_path: Path) -> None:
    rig = JudgedRig(tmp_path, scored_spec(), length_of)
    rig.judge.script = scored
    async with rig.judging():
        await rig.killed_in(3)
        assert rig.judge.answered
        assert (await rig.resume()).state == "completed"
    assert await rig.judge_weights.head() == 0
    assert len(rig.judge.answered) == STEPS * SAMPLES_PER_STEP
    assert set(rig.judge.answered.values()) == {1}, "nothing is scored twice"
    texts = {"".join(map(chr, ints(request.prompt))) for request in rig.judge.requests}
    for sample in await rig.scored():
        verdict = sample["verdicts"]["judge"]
        assert sample["reward"] == verdict["reward"]
        assert any(verdict["reward"] == len(text) / 4 and text.endswith(sample["completion"]) for text in texts)
        assert (verdict["job_id"], verdict["spans"], verdict["answer"]) == (SERVING, [["w-1", 0, 1]], "")


async def test_completion_without_a_score_has_a_missing_reward(tmp_path: Path) -> None:
    rig = JudgedRig(tmp_path, scored_spec(), length_of)
    rig.judge.script = lambda request, sample: scored(request, sample).model_copy(
        update={"logprobs": pack([-200.0], F32)}
    )
    async with rig.judging():
        ended = await rig.run()
    assert ended.state == "failed"
    assert "check reward.model judge; the first: its score is missing, or too large to tell" in ended.error


async def test_reward_model_that_never_answers_is_a_named_wait_with_a_limit(tmp_path: Path) -> None:
    rig = JudgedRig(tmp_path, scored_spec(), length_of)
    rig.judge.script, rig.samples_limit_s, rig.judge.held = scored, 0.5, {0}
    async with rig.judging():
        ended = await rig.run()
    assert f"for scores of {SERVING} (completions wait to be scored), {SAMPLES_PER_STEP} asked" in ended.error


def test_more_scores_than_a_step_has_ids_are_refused() -> None:
    job = spec(
        models={"judge": {"model": "small"}},
        reward={"model": "judge"},
        data={"train": "t.jsonl", "prompts_per_step": 8192},
        algorithm={"group_size": 16, "updates_per_step": 2},
    )
    with pytest.raises(ConfigError, match=r"reward\.model: the models that score may be asked 131072 times a step"):
        check(job, [])
