"""What a job file of each kind needs, and what it may not say."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rlboost.evaljob import evaluation_of
from shared.errors import ConfigError
from shared.jobspec import parse, to_json
from shared.training import TrainerSpec

REWARD = {"function": "a:b"}
JOBS: dict[str, dict[str, Any]] = {
    "rl": {"model": "m", "data": {"train": "t"}, "reward": REWARD, "steps": 1},
    "sft": {"kind": "sft", "model": "m", "data": {"train": "t"}, "steps": 1},
    "eval": {"kind": "eval", "model": "m", "data": {"eval": "e"}, "reward": REWARD, "eval": {"samples": 4}},
}


@pytest.mark.parametrize("kind", JOBS)
def test_what_a_job_of_a_kind_needs_is_enough_and_survives_its_resolved_form(kind: str) -> None:
    job = parse(JOBS[kind])
    assert job.kind == kind
    assert parse(json.loads(to_json(job))) == job


@pytest.mark.parametrize(
    ("kind", "changes", "text"),
    [
        ("rl", {"reward": None}, "reward: a job of kind rl needs it, or an environment"),
        ("rl", {"steps": 0}, "steps: a job of kind rl needs at least one"),
        ("rl", {"data": {}}, r"data\.train: a job of kind rl needs it"),
        (
            "rl",
            {"data": {"train": "t", "max_completion_tokens": 9}},
            r"data\.max_completion_tokens: .* set sampling\.max_tokens",
        ),
        ("rl", {"sampling": {"temperature": 0}}, r"^sampling\.temperature: 0 makes all completions of a group"),
        ("sft", {"steps": 0}, "steps: a job of kind sft needs at least one"),
        ("sft", {"data": {}}, r"data\.train: a job of kind sft needs it"),
        ("sft", {"reward": REWARD}, "reward: a job of kind sft generates nothing: remove it"),
        ("sft", {"algorithm": {"name": "rloo"}}, "algorithm: a job of kind sft generates nothing"),
        ("sft", {"sampling": {"temperature": 0.7}}, "sampling: a job of kind sft generates nothing"),
        ("sft", {"elastic": {"seeding": 1.0}}, r"elastic: .* remove all but elastic\.weights"),
        ("sft", {"data": {"train": "t", "eval": "e"}, "eval": {}}, "eval: a job of kind sft generates nothing"),
        ("eval", {"data": {}}, r"data\.eval: a job of kind eval needs it"),
        ("eval", {"data": {"train": "t", "eval": "e"}}, r"data\.train: .* remove it"),
        ("eval", {"reward": None}, "reward: a job of kind eval needs it"),
        ("eval", {"eval": None}, r"eval: a job of kind eval needs it, if only \{samples: 256\}"),
        ("eval", {"steps": 2}, "steps: a job of kind eval trains nothing: remove it"),
        ("eval", {"optimizer": {"lr": 0.1}}, "optimizer: a job of kind eval trains nothing"),
        ("eval", {"elastic": {"weights": "lora"}}, r"elastic\.weights: a job of kind eval trains no adapter"),
        ("eval", {"kind": "test"}, "kind: Input should be 'rl', 'sft' or 'eval'; nothing else is supported"),
    ],
)
def test_what_does_not_suit_the_kind_is_refused_by_name(kind: str, changes: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        parse({**JOBS[kind], **changes})


def test_an_evaluation_may_be_greedy_and_is_scored_at_a_temperature_that_can_be() -> None:
    sampling = parse({**JOBS["eval"], "sampling": {"temperature": 0}}).sampling
    assert (sampling.temperature, sampling.scored_temperature) == (0, 1)
    sampling = parse({**JOBS["eval"], "sampling": {"temperature": 0.7}}).sampling
    assert sampling.scored_temperature == 0.7


def test_an_adapter_may_be_fine_tuned() -> None:
    assert parse({**JOBS["sft"], "elastic": {"weights": "lora"}}).adapter is not None


def test_the_evaluation_of_a_job_has_its_data_reward_and_sampling_and_nothing_of_training() -> None:
    job = {
        **JOBS["rl"],
        "name": "sums",
        "data": {"train": "t", "eval": "e", "prompt_key": "q", "prompts_per_step": 4},
        "algorithm": {"name": "rloo"},
        "sampling": {"max_tokens": 9},
        "optimizer": {"lr": 0.1},
        "trainer": {"dtype": "bfloat16", "checkpoint_every": 3},
        "elastic": {"weights": "lora", "share": 2.0},
        "lora": {"rank": 4},
        "eval": {"every": 3, "samples": 20, "pass_reward": 0.5},
    }
    resolved = json.loads(to_json(parse(job)))
    for given in (job, resolved):
        made = parse(evaluation_of(given, model="other", samples=30))
        assert (made.kind, made.name, made.model, made.steps) == ("eval", "sums-eval", "other", 0)
        assert (made.data.train, made.data.eval, made.data.prompt_key) == (None, "e", "q")
        assert (made.sampling.max_tokens, made.trainer.dtype, made.elastic.share) == (9, "bfloat16", 2.0)
        assert made.eval is not None
        assert (made.eval.samples, made.eval.pass_reward) == (30, 0.5)
    assert parse(evaluation_of(json.loads(to_json(made)))) == made.model_copy(update={"model": "other"})


@pytest.mark.parametrize(
    ("trainer", "kept"),
    [
        ({"data_parallel": 8}, {"data_parallel": 8}),
        ({"offload": "all"}, {"offload": "all"}),
        (
            {"backend": "megatron", "tensor_parallel": 2, "data_parallel": 8, "distributed_optimizer": True},
            {"backend": "megatron", "tensor_parallel": 2},
        ),
    ],
)
def test_a_model_that_needs_room_has_it_in_its_evaluation_too(trainer: dict[str, Any], kept: dict[str, Any]) -> None:
    job = {**JOBS["rl"], "data": {"train": "t", "eval": "e"}, "trainer": trainer}
    for given in (job, json.loads(to_json(parse(job)))):
        assert parse(evaluation_of(given)).trainer == TrainerSpec(**kept)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"model": None}, "model: Field required"),
        ({"data": "x.jsonl"}, "data: Input should be a valid dictionary or instance of DataSpec"),
        ({"trainer": 3}, "trainer: Input should be a valid dictionary or instance of TrainerSpec"),
        ({"eval": "often"}, "eval: Input should be a valid dictionary or instance of EvalSpec"),
    ],
)
def test_what_is_wrong_with_a_job_is_wrong_with_its_evaluation(changes: dict[str, Any], text: str) -> None:
    job = {**JOBS["rl"], "data": {"eval": "e"}, **changes}
    with pytest.raises(ConfigError, match=text):
        parse(evaluation_of(job, samples=3))


@pytest.mark.parametrize(
    ("kind", "changes", "text"),
    [
        ("eval", {}, r"trainer\.resume: a job of kind eval begins with a model.*model: \.rlboost/runs/JOB/model"),
        (
            "rl",
            {"data": {"train": "t", "curriculum": {"skip_solved_above": 0.9}}},
            r"trainer\.resume: .*data\.curriculum needs: .*model: \.rlboost/runs/JOB/model",
        ),
    ],
)
def test_what_cannot_begin_with_another_jobs_checkpoint_is_refused(
    kind: str, changes: dict[str, Any], text: str
) -> None:
    job = {**JOBS[kind], **changes}
    for resume in ("auto", "never"):
        parse({**job, "trainer": {"resume": resume}})
    with pytest.raises(ConfigError, match=text):
        parse({**job, "trainer": {"resume": "runs/a"}})


def test_a_job_without_held_out_data_or_reward_cannot_be_evaluated() -> None:
    with pytest.raises(ConfigError, match=r"data\.eval is not set"):
        evaluation_of(JOBS["rl"])
    with pytest.raises(ConfigError, match="there is no reward: give a job file that has one"):
        evaluation_of({**JOBS["sft"], "data": {"train": "t", "eval": "e"}})


def test_a_job_without_a_number_of_samples_is_evaluated_with_the_default() -> None:
    assert evaluation_of({**JOBS["rl"], "data": {"eval": "e"}})["eval"] == {"samples": 256}
