"""What is wrong with a job file is said in a line a field, in words that need no Python."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import BaseModel

from rlboost.shared.errors import ConfigError
from rlboost.shared.job.algorithm import CriticSpec, PreferenceSpec
from rlboost.shared.job.base import MlflowSpec, SwanlabSpec, WandbSpec
from rlboost.shared.job.other_trainers import NAMES, advice
from rlboost.shared.job.reward import EnvironmentSpec, RewardPart
from rlboost.shared.job.spec import RlJob, parse
from rlboost.shared.job.training import CurriculumSpec, LoraSpec
from tests.support.jobs import job_file

JOB = job_file(steps=2)


def complaint(**changes: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        parse({**JOB, **changes})
    return str(caught.value)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"model": ["m"]}, "model: should be text"),
        ({"model": None}, "model: should be text"),
        ({"model": ""}, "model: should be text with 1 or more characters"),
        ({"name": ""}, "name: should be text with 1 or more characters"),
        ({"name": 65 * "x"}, "name: should be text with 64 characters at most"),
        (
            {"name": "a b"},
            "name: should be ASCII letters, digits, '.', '_' and '-' only, with a letter or digit first, not 'a b'",
        ),
        ({"steps": "many"}, "steps: should be a whole number, not 'many'"),
        ({"steps": 1.5}, "steps: should be a whole number, not 1.5"),
        ({"steps": 1 << 22}, "steps: should be below 4194304, not 4194304"),
        ({"data": "t.jsonl"}, "data: should be a section with the keys subset, prompt_key, chat_template_kwargs, "),
        ({"data": {}}, "data.train: missing: give it"),
        ({"data": {"train": "t", "max_prompt_tokens": 0}}, "data.max_prompt_tokens: should be 1 or more, not 0"),
        ({"reward": "m:f"}, "reward: should be a section with the keys function, url, model, judge, style, "),
        ({"reward": {"functions": "m:f"}}, "reward.functions: should be a list"),
        ({"reward": {"functions": []}}, "reward.functions: should be a list with 1 or more entries"),
        (
            {"reward": {"functions": ["m:f"]}},
            "reward.functions.0: should be a section with the keys function, url, model, judge, weight, name, style, ",
        ),
        (
            {"reward": {"functions": [{"func": "m:f"}]}},
            "reward.functions.0.func: unknown key: did you mean function?",
        ),
        ({"reward": {"function": "m:f", "arguments": ["a"]}}, "reward.arguments: should be a section"),
        (
            {"reward": {"function": "m:f", "arguments": {1: 2}}},
            "reward.arguments.1: a key should be text: put it in quotes",
        ),
        ({"reward": {"function": "m:f", "workers": "two"}}, "reward.workers: should be a whole number, not 'two'"),
        ({"sampling": {"temperature": "hot"}}, "sampling.temperature: should be a number, not 'hot'"),
        ({"sampling": {"top_p": 2}}, "sampling.top_p: should be 1 or less, not 2"),
        ({"algorithm": "grpo"}, "algorithm: should be a section with the keys name, group_size, updates_per_step, "),
        ({"algorithm": {"clip_high": float("inf")}}, "algorithm.clip_high: should be a finite number, not inf"),
        ({"algorithm": {"tis_cap": "none"}}, "algorithm.tis_cap: should be a number, or 'off', not 'none'"),
        ({"algorithm": {"tis_cap": 0}}, "algorithm.tis_cap: should be above 0, or 'off', not 0"),
        ({"elastic": {"seeding": "atuo"}}, "elastic.seeding: should be a number, or 'auto' or 'off', not 'atuo'"),
        ({"elastic": {"seeding": -1}}, "elastic.seeding: should be 0 or more, or 'auto' or 'off', not -1"),
        ({"elastic": {"seeding": [1]}}, "elastic.seeding: should be a number, or 'auto' or 'off'"),
        ({"optimizer": {"betas": 0.9}}, "optimizer.betas: should be a list"),
        ({"optimizer": {"betas": []}}, "optimizer.betas: should be a list with 2 entries"),
        ({"optimizer": {"betas": [0.9]}}, "optimizer.betas: should be a list with 2 entries"),
        ({"optimizer": {"betas": [0.9, 0.9, 0.9]}}, "optimizer.betas: should be a list with 2 entries at most"),
        ({"optimizer": {"betas": ["high", 0.9]}}, "optimizer.betas.0: should be a number, not 'high'"),
        ({"lora": {"targets": "q"}}, "lora.targets: should be 'all-linear', or a list, not 'q'"),
        ({"lora": {"targets": []}}, "lora.targets: should be 'all-linear', or a list with 1 or more entries"),
        ({"lora": {"targets": ["q", 1]}}, "lora.targets.1: should be text"),
        ({"log": {"wandb": "runs"}}, "log.wandb: should be a section with the keys project, entity, group, tags"),
        ({"log": {"wandb": {"project": "p", "tags": "a"}}}, "log.wandb.tags: should be a list"),
        ({"log": {"wandb": {"project": "p", "tags": [1]}}}, "log.wandb.tags.0: should be text"),
        ({"log": {"tensorboard": "maybe"}}, "log.tensorboard: should be true or false"),
        ({"trainer": {"backend": "x"}}, "trainer.backend: 'x' is unknown: use 'torch' or 'megatron'"),
        ({"trainer": {"backend": ["torch"]}}, "trainer.backend: should be 'torch' or 'megatron'"),
        (
            {"trainer": {"backend": "megatrn"}},
            "trainer.backend: 'megatrn' is unknown: did you mean 'megatron'? Use 'torch' or 'megatron'",
        ),
        (
            {"trainer": {"backend": 100 * "x"}},
            f"trainer.backend: '{39 * 'x'}...' is unknown: use 'torch' or 'megatron'",
        ),
        ({"trainer": {"batch": 1}}, "trainer.batch: unknown key: remove it or fix its spelling"),
        (
            {"eval": {"eval_step": 8}},
            "eval.eval_step: unknown key: did you mean eval_steps? RLBoost calls it eval.every",
        ),
        (
            {"optimizer": {"decay": None}},
            "optimizer.decay: should be a number, not null: give one, or leave the key out if it has a default",
        ),
    ],
)
def test_invalid_value_error_names_the_expected_type(changes: dict[str, Any], text: str) -> None:
    said = complaint(**changes)
    assert said == text or (text.endswith(", ") and said.startswith(text))


def test_non_text_key_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^1: a key should be text: put it in quotes$"):
        parse(dict[Any, Any]({**JOB}) | {1: 2})


def test_several_wrong_fields_are_named_each() -> None:
    text = complaint(elastic={"seeding": "x", "seading": 1}, steps=0)
    assert text.split("; ") == [
        "elastic.seeding: should be a number, or 'auto' or 'off', not 'x'",
        "elastic.seading: unknown key: did you mean seeding?",
        "steps: should be 1 or more, not 0",
    ]


def test_problem_of_two_sections_names_the_field_to_change() -> None:
    assert complaint(eval={"every": 1}).startswith("data.eval: missing, and eval is set: name")


INNER: dict[str, type[BaseModel]] = {
    "lora": LoraSpec,
    "environment": EnvironmentSpec,
    "data.curriculum": CurriculumSpec,
    "log.wandb": WandbSpec,
    "log.mlflow": MlflowSpec,
    "log.swanlab": SwanlabSpec,
    "algorithm.critic": CriticSpec,
    "algorithm.preference": PreferenceSpec,
    "reward.functions": RewardPart,
}
"""Sections that may be missing, or stand in a list."""
VALUES: tuple[Any, ...] = (None, True, 3, -1.5, float("nan"), "x", "", [], [[]], [{"x": 1}], {}, {"x": 1}, {1: 2}, b"x")
PYTHONS = re.compile(r"Input|valid|instance|dict|[Tt]uple|Value error|Extra|str\b|literal\[|None|item|Spec\b")
"""What a user who has never seen Python cannot know."""


def fields(section: type[BaseModel], *above: str) -> Iterator[tuple[str, ...]]:
    """Yield the paths of a section's fields and of those of the sections in it."""
    for name, field in section.model_fields.items():
        path = (*above, name)
        yield path
        inner: Any = INNER.get(".".join(path), field.annotation)
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            yield from fields(inner, *path)


def said(raw: dict[Any, Any]) -> str:
    try:
        parse(raw)
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("path", list(fields(RlJob)), ids=".".join)
def test_no_wrong_value_is_answered_in_the_words_of_python(path: tuple[str, ...]) -> None:
    for value in VALUES:
        given: Any = value
        for name in reversed(path):
            given = {name: given} if name != "functions" or given is value else {name: [given]}
        told = said({**JOB, **given}).replace(repr(value), "")
        assert not PYTHONS.search(told), f"{given}: {told}"


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"learning_rate": 1e-6}, "learning_rate: unknown key: RLBoost calls it optimizer.lr"),
        ({"sampling": {"max_completion_length": 8}}, "unknown key: RLBoost calls it sampling.max_tokens"),
        ({"data": {"train_batch_size": 8}}, "unknown key: RLBoost calls it data.prompts_per_step"),
        ({"algorithm": {"loss_type": "dapo"}}, "unknown key: RLBoost calls it algorithm.aggregation"),
        (
            {"report_to": "wandb"},
            "unknown key: RLBoost calls it log.wandb or log.mlflow or log.swanlab or log.tensorboard",
        ),
        (
            {"generation_batch_size": 256},
            "RLBoost calls it data.prompts_per_step = generation_batch_size / num_generations",
        ),
        ({"per_device_train_batch_size": 8}, "RLBoost calls it trainer.micro_batch_tokens (there in completions)"),
        ({"top_k": 8}, "top_k: unknown key: RLBoost calls it sampling.top_k"),
        ({"actor_rollout_ref": {"rollout": {"top_k": -1}}}, "rollout.top_k is sampling.top_k (there -1 for all)"),
        ({"reward": {"function": "rw.py:score"}}, "'rw.py:score' names a file: name its module, as rw:score, which"),
        ({"reward": {"function": "rw.py"}}, "module:function, such as rw:score for score of rw.py"),
        ({"reward": {"function": "./jobs/rw.py:score"}}, "name its module, as jobs.rw:score, which"),
        ({"reward": {"function": "/home/me/rw.py:score"}}, "name its module, as rw:score, which"),
        ({"reward": {"function": "../jobs/rw:R.score"}}, "name its module, as rw:R.score, which"),
        ({"lr": 1e-6}, "lr: unknown key: RLBoost calls it optimizer.lr or algorithm.critic.lr"),
        ({"data": {"truncation": "left"}}, "data.truncation: unknown key: RLBoost has no truncation"),
        ({"optimizer": {"warmup_ratio": 0.1}}, "set optimizer.warmup_steps to ratio x steps"),
        ({"logging_steps": 1}, "each step is logged"),
        ({"eos_token": "<|im_end|>"}, "generation_config.json (eos_token_id)"),
        ({"data": {"shuffle": True}}, "each epoch has another order of rows"),
        ({"remove_unused_columns": False}, "all columns of a row reach the reward"),
        ({"vllm_gpu_memory_utilization": 0.5}, "a setting of workers, RLBOOST_WORKER_GPU_MEMORY_UTILIZATION"),
        (
            {"actor_rollout_ref": {"rollout": {"tensor_model_parallel_size": 2}}},
            "rollout.tensor_model_parallel_size: a setting of workers, RLBOOST_WORKER_TENSOR_PARALLEL",
        ),
        ({"sampling": {"min_new_tokens": 4}}, "(docs/coming-from.md#what-differs): set sampling.min_tokens"),
        ({"sampling": {"typical_p": 0.9}}, "sampling has temperature, top_p, top_k and min_p"),
        (
            {"sampling": {"repetition_penalty": 1.1}},
            "the trainer's log-probabilities are of the model's own distribution",
        ),
        ({"sampling": {"logit_bias": {"5": 1}}}, "sampling.logit_bias: unknown key: RLBoost has no logit_bias"),
        ({"sampling": {"stop_token_ids": [7]}}, "a completion ends at an end token of the model, at a string of "),
        ({"stop_strings": ["#"]}, "stop_strings: unknown key: RLBoost has no stop_strings (docs/coming-from.md"),
        ({"actor_rollout_ref": {"rollout": {"stop": ["#"]}}}, "actor_rollout_ref.rollout.stop is sampling.stop"),
        (
            {"sampling": {"n": 8}},
            "sampling.n: unknown key: RLBoost has no n (docs/coming-from.md#what-differs): set ",
        ),
        (
            {"packing": True},
            "packing: unknown key: RLBoost has no packing (docs/coming-from.md#what-differs): rows",
        ),
        ({"data": {"apply_chat_template_kwargs": {}}}, "RLBoost calls it data.chat_template_kwargs"),
        ({"vllm_mode": "colocate"}, "vllm_mode: unknown key: RLBoost has no vllm_mode"),
        ({"generation_kwargs": {"top_k": 5}}, "generation_kwargs: unknown key: "),
        ({"num_train_epochs": 2}, "(docs/coming-from.md#what-differs): set steps to epochs x rows / data.prompts_"),
        (
            {"actor_rollout_ref": {"rollout": {"n": 8}, "actor": {"optim": {"lr": 1.0}}}},
            "actor_rollout_ref.rollout.n is algorithm.group_size, actor_rollout_ref.actor.optim.lr is optimizer.lr",
        ),
        (
            {"rollout": {"secret": "s"}},
            "rollout: unknown key: a section of another trainer (docs/coming-from.md#names)",
        ),
        ({"rollout": {"multi_turn": {"enable": True}}}, "a section of another trainer (docs/coming-from.md#names)"),
        ({"trainer": {"optim": {"lr": 1.0}}}, "trainer.optim.lr is optimizer.lr"),
        ({"trainer": {"optim": {}}}, "trainer.optim: unknown key: a section of another trainer"),
        ({"orchestrator": {"sampling": {"max_tokens": 8}}}, "orchestrator.sampling.max_tokens is sampling.max_tokens"),
        ({"inference": {"parallel": {"tp": 2}}}, "RLBoost has no inference (docs/coming-from.md#what-differs): "),
        ({"eval": {"temperature": 0.5}}, "RLBoost calls it eval.sets.NAME.sampling.temperature"),
        (
            {"rollout": {"val_kwargs": {"top_p": 0.5}}},
            "rollout.val_kwargs.top_p is eval.sets.NAME.sampling.top_p",
        ),
        ({"reward_weights": [1, 2]}, "RLBoost calls it reward.functions[].weight"),
        ({"epsilon": 0.2}, "RLBoost calls it algorithm.clip_low (there both sides, unless epsilon_high is set)"),
        ({"algorithm": {"clip_ratio": 0.2}}, "set algorithm.clip_low and algorithm.clip_high"),
        ({"loss_type": "grpo"}, "(there dapo is token_mean, grpo sequence_mean, dr_grpo constant)"),
        ({"kl_loss_type": "low_var_kl"}, "RLBoost calls it algorithm.kl_estimator (there kl is k1, mse k2, "),
        ({"algorithm": {"use_kl_in_reward": True}}, "algorithm.kl_coef above 0 adds a KL penalty"),
        ({"kl_coeff": 0.1}, "did you mean kl_coef? RLBoost calls it algorithm.kl_coef"),
        ({"ref": {"model": "m"}}, "the reference is the job's model as it starts"),
        ({"algorithm": {"name": "GRPO"}}, "'GRPO' is unknown: did you mean 'grpo'?"),
    ],
)
def test_key_of_another_trainer_is_answered_with_its_name_here(changes: dict[str, Any], text: str) -> None:
    assert text in complaint(**{name: _merged(name, value) for name, value in changes.items()})


def _merged(name: str, value: object) -> object:
    before = JOB.get(name)
    return {**before, **value} if isinstance(before, dict) and isinstance(value, dict) else value


def test_every_name_of_another_trainer_has_advice() -> None:
    names = {name for cells in NAMES.values() for cell in cells for name in re.findall(r"`([^` ]+)`", cell)}
    second_in_a_calculation = {"actor.ppo_mini_batch_size", "gradient_accumulation_steps"}
    assert second_in_a_calculation < names
    assert {name for name in names if not advice(name, 1)} == {"train.batch_size"}
