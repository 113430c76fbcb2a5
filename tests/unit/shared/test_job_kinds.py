"""What a job file of each kind needs, and what it may not say."""

from __future__ import annotations

import json
import math
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from rlboost.jobs.file import evaluation_of
from rlboost.services.rollout_manager.domain.jobs import from_json as job_from_json
from rlboost.services.rollout_manager.domain.jobs import to_json as job_to_json
from rlboost.shared.errors import ConfigError
from rlboost.shared.job.data import Rows
from rlboost.shared.job.spec import EvalJob, InvalidJob, RlJob, parse, parse_stored, to_json
from rlboost.shared.job.training import TrainerSpec

GOLDEN = Path(__file__).parents[2] / "golden/jobs"
"""Jobs as the first versions stored them: every kind had the keys of all."""
REWARD = {"function": "a:b"}
JOBS: dict[str, dict[str, Any]] = {
    "rl": {"model": "m", "data": {"train": "t"}, "reward": REWARD, "steps": 1},
    "sft": {"kind": "sft", "model": "m", "data": {"train": "t"}, "steps": 1},
    "dpo": {"kind": "dpo", "model": "m", "data": {"train": "t"}, "steps": 1},
    "reward": {"kind": "reward", "model": "m", "data": {"train": "t"}, "steps": 1},
    "eval": {"kind": "eval", "model": "m", "data": {"eval": "e"}, "reward": REWARD, "eval": {"samples": 4}},
}


@pytest.mark.parametrize("kind", JOBS)
def test_minimal_job_of_each_kind_parses_and_round_trips(kind: str) -> None:
    job = parse(JOBS[kind])
    assert job.kind == kind
    assert parse(json.loads(to_json(job))) == parse_stored(json.loads(to_json(job))) == job


NO_HELD_OUT = "data.eval: missing, and eval is set: name the file of held-out rows, give eval.sets, or remove eval"


@pytest.mark.parametrize(
    ("kind", "changes", "text"),
    [
        ("rl", {"reward": None}, "reward: a job of kind rl needs it, or an environment or agent"),
        ("rl", {"steps": 0}, "steps: should be 1 or more, not 0"),
        ("rl", {"data": {}}, "data.train: missing: give it"),
        ("sft", {"steps": 0}, "steps: should be 1 or more, not 0"),
        ("sft", {"data": {}}, "data.train: missing: give it"),
        ("dpo", {"data": {}}, "data.train: missing: give it"),
        ("dpo", {"eval": {}}, NO_HELD_OUT),
        (
            "dpo",
            {"algorithm": {"preference": {"beta": 0}}},
            "algorithm.preference.beta: should be above 0, not 0",
        ),
        (
            "dpo",
            {"elastic": {"weights": "lora"}, "lora": {"dropout": 0.1}},
            "lora.dropout: pairs are compared without dropout, as with TRL's disable_dropout: set it to 0",
        ),
        (
            "reward",
            {"elastic": {"weights": "lora"}, "lora": {"dropout": 0.1}},
            "lora.dropout: pairs are compared without dropout, as with TRL's disable_dropout: set it to 0",
        ),
        (
            "reward",
            {"algorithm": {"center_rewards_coefficient": -1}},
            "algorithm.center_rewards_coefficient: should be 0 or more, not -1",
        ),
        (
            "reward",
            {"trainer": {"backend": "megatron"}},
            "trainer.backend: megatron has no head for scores: set it to torch",
        ),
        (
            "reward",
            {"trainer": {"router_aux_loss_coef": 0.1}},
            "trainer.router_aux_loss_coef: experts of a reward model are not balanced: remove it",
        ),
        ("eval", {"data": {}}, NO_HELD_OUT),
        ("sft", {"eval": {}}, NO_HELD_OUT),
        (
            "rl",
            {"log": {"tensorboard": True, "samples": 4}},
            "log.samples: only wandb, mlflow and swanlab show samples: enable one, or remove it",
        ),
        (
            "sft",
            {"log": {"wandb": {"project": "p"}, "samples": 4}},
            "log.samples: a job of kind sft generates nothing: remove it",
        ),
        ("rl", {"log": {"mlflow": {}}}, "log.mlflow.experiment: missing: give it"),
        (
            "rl",
            {"log": {"swanlab": {"entity": "e"}}},
            "log.swanlab.project: missing: give it; log.swanlab.entity: unknown key: remove it or fix its spelling",
        ),
        ("rl", {"algorithm": {"cost_coef": -1}}, "algorithm.cost_coef: should be 0 or more, not -1"),
        (
            "rl",
            {"algorithm": {"name": "distill", "teacher": {"model": "t"}, "cost_coef": 1}},
            (
                "algorithm: cost_coef: advantage none trains on no reward, so on no cost: remove cost_coef, or choose "
                "another advantage such as group_std"
            ),
        ),
        (
            "rl",
            {"eval": {"sets": {"a/b": {"data": "t"}}}},
            (
                "eval.sets: 'a/b' is a part of metrics' names: use at most 64 ASCII letters, digits, '_' and '-', with "
                "a letter or digit first"
            ),
        ),
        (
            "eval",
            {"eval": {"sets": {"aime-24": {"data": "t", "sampling": {"temperature": -1}}}}},
            "eval.sets.aime-24.sampling.temperature: should be 0 or more, not -1",
        ),
        (
            "rl",
            {"eval": {"sets": {"aime": {"data": "t", "sampling": {"max_token": 9}}}}},
            "eval.sets.aime.sampling.max_token: unknown key: did you mean max_tokens?",
        ),
        (
            "sft",
            {"eval": {"sets": {"aime": {"data": "t", "samples": 4}}}},
            "eval.sets.aime.samples: unknown key: remove it or fix its spelling",
        ),
        (
            "rl",
            {"eval": {"sets": {"aime": {"data": "agent:rows"}}}},
            "eval.sets.aime.data: agent:rows are the rows of the job's agent, and it has none",
        ),
        (
            "sft",
            {"data": {"train": "t", "eval": "e"}},
            "data.eval: not used without a section eval: add eval: {every: 10}, or remove it",
        ),
        (
            "sft",
            {"steps": None},
            "steps: should be a whole number, not null: give one, or leave the key out if it has a default",
        ),
        (
            "rl",
            {"sampling": {"temperature": 1e-9}},
            "sampling.temperature: should be 0 (greedy), or 0.01 or more, not 1e-09",
        ),
        (
            "rl",
            {"data": {"train": "t", "chat_template_kwargs": {"messages": []}}},
            "data.chat_template_kwargs: has 'messages', which is set for every prompt: remove it",
        ),
        (
            "sft",
            {"data": {"train": "t", "chat_template_kwargs": ["enable_thinking"]}},
            "data.chat_template_kwargs: is ['enable_thinking']: give a mapping such as {'enable_thinking': false}",
        ),
        (
            "eval",
            {"data": {"eval": "e", "chat_template_kwargs": {"enable_thinking": "false"}}},
            "data.chat_template_kwargs: has enable_thinking: 'false', which is text: remove the quotes",
        ),
        *(
            (
                "rl",
                {"data": {"train": "t", "chat_template_kwargs": given}},
                (
                    "data.chat_template_kwargs: should have names and values of JSON only: text, numbers, true, false, "
                    "lists and mappings"
                ),
            )
            for given in ({"day": date(2026, 1, 2)}, {"level": math.inf}, {"level": math.nan}, {1: 2}, {"of": (1, 2)})
        ),
        ("rl", {"sampling": {"top_k": -1}}, "sampling.top_k: should be 0 or more, not -1"),
        ("eval", {"sampling": {"min_p": 1.5}}, "sampling.min_p: should be 1 or less, not 1.5"),
        (
            "rl",
            {"sampling": {"min_tokens": 9, "max_tokens": 8}},
            "sampling.min_tokens: 9 is more than max_tokens, 8: lower it",
        ),
        ("rl", {"sampling": {"stop": [""]}}, "sampling.stop.0: should be text with 1 or more characters"),
        ("rl", {"sampling": {"stop": {"a": 1}}}, "sampling.stop: should be a list"),
        ("eval", {"sampling": {"stop": [7]}}, "sampling.stop.0: should be text"),
        (
            "rl",
            {"sampling": {"stop": "#"}, "trainer": {"router_replay": "R3"}},
            (
                "sampling.stop: not supported with trainer.router_replay, as engines return the experts only of "
                "completions that they end themselves: remove one of the two"
            ),
        ),
        (
            "rl",
            {"trainer": {"deterministic": True}, "elastic": {"max_staleness": 1}},
            (
                "trainer.deterministic: with elastic.max_staleness: 1 the version that generates a token depends on "
                "the time: set that to 0, or remove deterministic"
            ),
        ),
        (
            "eval",
            {"trainer": {"deterministic": True}, "agent": {"function": "a:b", "max_turns": 2}},
            (
                "trainer.deterministic: not supported with an agent, whose calls come in an order of their own: remove "
                "it, or use an environment"
            ),
        ),
        (
            "sft",
            {"trainer": {"deterministic": True, "data_parallel": 2}},
            (
                "trainer: deterministic needs trainer.backend: torch in one process, as the order of sums over several "
                "is not fixed: set data_parallel and context_parallel to 1, or remove deterministic"
            ),
        ),
        ("rl", {"sampling": {"temperature": 1e9}}, "sampling.temperature: should be 10 or less, not 1000000000.0"),
        ("eval", {"reward": None}, "reward: a job of kind eval needs it, or an environment or agent"),
        (
            "rl",
            {"reward": {"functions": [{"function": "a:b", "weight": 0}]}},
            "reward: every function has weight 0 and is only logged: give one of them another weight",
        ),
        ("eval", {"eval": None}, "eval: should be a section with the keys every, sets, samples, pass_reward"),
        ("eval", {"kind": "test"}, "kind: 'test' is unknown: use 'rl', 'sft', 'dpo', 'reward', 'eval' or 'external'"),
        ("eval", {"kind": ["sft"]}, "kind: should be 'rl', 'sft', 'dpo', 'reward', 'eval' or 'external'"),
    ],
)
def test_missing_setting_of_a_kind_is_named(kind: str, changes: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse({**JOBS[kind], **changes})
    assert str(caught.value) == text


def test_a_group_of_like_completions_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^sampling\.temperature: 0 makes all completions of a group alike"):
        parse({**JOBS["rl"], "sampling": {"temperature": 0}})


RL, SFT, EVAL = "learns from what it generates, up to sampling.max_tokens", "generates nothing", "trains nothing"


@pytest.mark.parametrize(
    ("kind", "changes", "because", "removed"),
    [
        ("rl", {"data": {"train": "t", "completion_key": "completion"}}, RL, "data.completion_key"),
        ("rl", {"data": {"train": "t", "max_completion_tokens": 9}}, RL, "data.max_completion_tokens"),
        ("sft", {"reward": REWARD}, SFT, "reward"),
        ("sft", {"sampling": {"temperature": 0.7}, "eval": None}, SFT, "sampling"),
        ("sft", {"algorithm": {}, "environment": {"function": 3}}, SFT, "algorithm, environment"),
        (
            "sft",
            {
                "eval": {"samples": 8},
                "elastic": {"seeding": 1, "weights": "delta"},
                "data": {"train": "t", "eval": "e", "curriculum": {}},
            },
            SFT,
            "data.curriculum, elastic.seeding, eval.samples",
        ),
        (
            "dpo",
            {
                "algorithm": {"name": "dpo", "preference": {"beta": 0.2}},
                "reward": REWARD,
                "data": {"train": "t", "completion_key": "a"},
            },
            SFT,
            "reward, data.completion_key, algorithm.name",
        ),
        (
            "reward",
            {"algorithm": {"preference": {"beta": 0.2}}, "data": {"train": "t", "completion_key": "a"}},
            SFT,
            "data.completion_key, algorithm.preference",
        ),
        ("eval", {"steps": 0, "optimizer": {"lr": 0.1}, "lora": {}}, EVAL, "steps, optimizer, lora"),
        (
            "eval",
            {"data": {"train": "t", "eval": "e", "prompts_per_step": 4}},
            EVAL,
            "data.train, data.prompts_per_step",
        ),
        ("eval", {"algorithm": {"name": "rloo"}, "elastic": {"weights": "lora"}}, EVAL, "algorithm, elastic.weights"),
    ],
)
def test_all_that_does_not_apply_is_named_at_once(
    kind: str, changes: dict[str, Any], because: str, removed: str
) -> None:
    with pytest.raises(InvalidJob) as caught:
        parse({**JOBS[kind], **changes})
    text = f"a job of kind {kind} {because}: remove {removed}"
    assert str(caught.value) == text
    assert caught.value.fields == [(name, text) for name in removed.split(", ")]


def test_inapplicable_and_invalid_settings_are_reported_together() -> None:
    with pytest.raises(InvalidJob) as caught:
        parse({**JOBS["sft"], "sampling": {}, "steps": "many", "optimiser": {}})
    assert caught.value.problems == [
        "a job of kind sft generates nothing: remove sampling",
        "steps: should be a whole number, not 'many'",
        "optimiser: unknown key: did you mean optimizer?",
    ]
    assert [field for field, _ in caught.value.fields] == ["sampling", "steps", "optimiser"]


@pytest.mark.parametrize("kind", ["sft", "eval"])
def test_inapplicable_settings_may_be_null_and_are_not_resolved(kind: str) -> None:
    common = {"kind", "eval", *JOBS[kind]}
    others = {name: None for job in JOBS.values() for name in job if name not in common}
    job = parse({**others, **JOBS[kind]})
    assert not others.keys() & json.loads(to_json(job)).keys()


@pytest.mark.parametrize("kind", ["rl", "sft", "eval"])
def test_stored_job_with_inapplicable_settings_is_still_read(kind: str) -> None:
    stored = (GOLDEN / f"{kind}.json").read_text()
    with pytest.raises(InvalidJob, match=f"a job of kind {kind} .*: remove "):
        parse(json.loads(stored))
    job = parse_stored(json.loads(stored))
    assert job.kind == kind
    assert parse(json.loads(to_json(job))) == job
    record = job_from_json(f'{{"id": "j", "no": 1, "created_at": 0, "spec": {stored}}}')
    assert record.spec == job
    assert job_from_json(job_to_json(record)) == record


def test_stored_job_with_a_removed_key_is_read_and_a_new_one_is_refused() -> None:
    stored = json.loads((GOLDEN / "dapo.json").read_text())
    stored["elastic"]["link"] = "slow"
    assert "link" not in json.loads(to_json(parse_stored(stored)))["elastic"]
    with pytest.raises(InvalidJob, match=r"elastic\.link: unknown key"):
        parse({**JOBS["rl"], "elastic": {"link": "slow"}})


def test_stored_dapo_job_without_resample_keeps_replacing_no_group() -> None:
    """`dapo` replaced no group until `algorithm.resample` came."""
    stored = json.loads((GOLDEN / "dapo.json").read_text())
    job = parse_stored(stored)
    record = job_from_json(json.dumps({"id": "j", "no": 1, "created_at": 0, "spec": stored}))
    assert isinstance(job, RlJob)
    assert record.spec == job == parse_stored(json.loads(to_json(job)))
    assert (job.algorithm.name, job.algorithm.resample) == ("dapo", 0)
    stored["algorithm"] |= {"equal_groups": "keep"}
    kept = parse_stored(stored)
    assert isinstance(kept, RlJob)
    assert kept.algorithm.resample is None
    anew = parse_stored(json.loads(to_json(parse({**JOBS["rl"], "algorithm": {"name": "dapo"}}))))
    assert isinstance(anew, RlJob)
    assert anew.algorithm.resample == 8


def test_invalid_setting_of_a_stored_job_is_reported() -> None:
    with pytest.raises(InvalidJob) as caught:
        parse_stored({**JOBS["sft"], "sampling": {}, "steps": 0})
    assert str(caught.value) == "steps: should be 1 or more, not 0"


def test_an_evaluation_may_be_greedy_and_is_scored_at_a_temperature_that_can_be() -> None:
    sampling = parse({**JOBS["eval"], "sampling": {"temperature": 0}}).sampling
    assert (sampling.temperature, sampling.scored_temperature) == (0, 1)
    sampling = parse({**JOBS["eval"], "sampling": {"temperature": 0.7}}).sampling
    assert sampling.scored_temperature == 0.7


def test_an_adapter_may_be_fine_tuned() -> None:
    assert parse({**JOBS["sft"], "elastic": {"weights": "lora"}}).adapter is not None


def test_evaluation_of_a_job_drops_training_settings() -> None:
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
        assert isinstance(made, EvalJob)
        assert made.eval is not None
        assert (made.eval.samples, made.eval.pass_reward) == (30, 0.5)
    assert parse(evaluation_of(json.loads(to_json(made)))) == made.model_copy(update={"model": "other"})


def test_held_out_sets_take_what_they_do_not_give_from_the_job() -> None:
    sets = {
        "math500": {"data": "m", "subset": "s", "prompt_key": "problem", "sampling": {"temperature": 0}},
        "aime": {"data": "a", "split": "y", "samples": 3, "pass_reward": 0.0, "sampling": {"max_tokens": 99}},
    }
    job = {
        **JOBS["rl"],
        "data": {"train": "t", "eval": "e", "eval_split": "x", "subset": "own"},
        "eval": {"samples": 20, "pass_reward": 0.5, "sets": sets},
        "sampling": {"max_tokens": 9, "top_p": 0.9},
    }
    for given in (job, json.loads(to_json(parse(job)))):
        unnamed, math500, aime = parse(given).held_out
        assert unnamed[:-1] == ("", Rows("data.eval", "e", "x", "own", "prompt", names_split=True), 20, 0.5)
        assert math500[:-1] == ("math500", Rows("eval.sets.math500.data", "m", "x", "s", "problem"), 20, 0.5)
        assert aime[:-1] == ("aime", Rows("eval.sets.aime.data", "a", "y", None, "prompt", names_split=True), 3, 0.0)
        drawn = [
            (one.sampling.temperature, one.sampling.top_p, one.sampling.max_tokens) for one in parse(given).held_out
        ]
        assert drawn == [(1.0, 0.9, 9), (0.0, 0.9, 9), (1.0, 0.9, 99)]
        made = evaluation_of(given, samples=7)
        assert [one.samples for one in parse(made).held_out] == [7, 7, 7]
        # An override of the job's sampling reaches the sets too, except for what they give themselves.
        greedy = parse({**made, "sampling": {**made["sampling"], "top_p": 0.8}}).held_out
        assert [one.sampling.top_p for one in greedy] == [0.8] * 3


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
def test_evaluation_of_a_job_keeps_sharding_and_offload(trainer: dict[str, Any], kept: dict[str, Any]) -> None:
    job = {**JOBS["rl"], "data": {"train": "t", "eval": "e"}, "trainer": trainer}
    for given in (job, json.loads(to_json(parse(job)))):
        assert parse(evaluation_of(given)).trainer == TrainerSpec(**kept)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"model": None}, "model: missing: give it"),
        ({"data": "x.jsonl"}, "data: should be a section with the keys subset, prompt_key,"),
        ({"trainer": 3}, "trainer: should be a section with the keys backend, dtype,"),
        ({"eval": "often"}, "eval: should be a section with the keys every, sets, samples, pass_reward"),
    ],
)
def test_evaluation_of_an_invalid_job_is_invalid(changes: dict[str, Any], text: str) -> None:
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
def test_resume_of_an_unsupported_job_is_refused(kind: str, changes: dict[str, Any], text: str) -> None:
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
