"""The job file: what a user asks for. Unknown keys are refused; every error names its field and says what to do."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import Field, ValidationError, ValidationInfo, field_validator, model_validator

from shared.algorithm import AlgorithmSpec
from shared.curriculum import CurriculumSpec
from shared.errors import ConfigError
from shared.ids import MAX_GROUPS_PER_STEP, MAX_STEPS
from shared.messages import InFlight
from shared.reward import EnvironmentSpec, RewardPart, RewardSpec
from shared.runlog import LogSpec
from shared.training import LoraSpec, OptimizerSpec, TrainerSpec
from shared.validation import Section, describe, off_is_no_boolean

MAX_STALENESS = 16
"""Beyond it a sample's tokens say little about the policy that is trained."""

Kind = Literal["rl", "sft", "eval"]
_NEEDED: dict[Kind, tuple[str, ...]] = {"rl": ("reward", "steps"), "sft": ("steps",), "eval": ("reward", "eval")}
_WANTED = {"reward": "it, or an environment", "steps": "at least one", "eval": "it, if only {samples: 256}"}
_USELESS: dict[Kind, tuple[str, ...]] = {
    "rl": (),
    "sft": ("environment", "reward", "algorithm", "sampling", "eval"),
    "eval": ("algorithm", "optimizer", "lora", "steps"),
}
_BECAUSE: dict[Kind, str] = {"rl": "", "sft": "generates nothing", "eval": "trains nothing"}


class DataSpec(Section):
    """Where prompts come from; extra columns reach the reward.

    `.jsonl` files with one problem a line, `.parquet` files, folders or ids of Hugging Face datasets.
    """

    train: str | None = None
    """Every job that trains needs it."""
    eval: str | None = None
    train_split: str = "train"
    """Of a Hugging Face dataset with several."""
    eval_split: str = "test"
    subset: str | None = None
    """Of a Hugging Face dataset with several (its configuration)."""
    prompt_key: str = "prompt"
    """Where a row holds its prompt: text, or chat messages, which go through the model's chat template."""
    completion_key: str = "completion"
    """With `kind: sft`, where a row holds what is to be imitated: text, or chat messages of the assistant."""
    max_prompt_tokens: int | None = Field(None, ge=1)
    """Rows with longer prompts are left out, and counted."""
    max_completion_tokens: int | None = Field(None, ge=1)
    """With `kind: sft`, rows with longer completions are left out, and counted."""
    prompts_per_step: int = Field(32, ge=1, lt=MAX_GROUPS_PER_STEP)
    curriculum: CurriculumSpec | None = None
    """Which prompts are skipped for what became of them before."""

    @property
    def limits(self) -> str:
        """Return what rows are left out for, in words."""
        most = {"max_prompt_tokens": self.max_prompt_tokens, "max_completion_tokens": self.max_completion_tokens}
        return " or ".join(f"more than {n} tokens (data.{name})" for name, n in most.items() if n is not None)


class SamplingSpec(Section):
    """How rollouts are drawn."""

    temperature: float = Field(1.0, ge=0)
    """0, the most likely token each time, is for jobs of kind eval."""
    top_p: float = Field(1.0, gt=0, le=1)
    max_tokens: int = Field(256, ge=1)

    @property
    def scored_temperature(self) -> float:
        """Return the temperature that log-probabilities are of: at 0 a draw is a certainty, so the model's own."""
        return self.temperature or 1.0


class ElasticSpec(Section):
    """How the job uses workers that come and go."""

    max_staleness: int = Field(0, ge=0, le=MAX_STALENESS)
    """How many weight versions may lie between making a token and training on it; 0 is strictly on-policy."""
    seeding: Annotated[float, Field(ge=0, allow_inf_nan=False)] | Literal["auto", "off"] = "auto"
    """How long the reserved engines generate at the start of a step while preemptible workers are there.

    Seconds; or `auto`: the manager learns it for each fleet size; or `off`: not at all.
    """
    share: float = Field(1.0, gt=0, allow_inf_nan=False)
    """The job's part of the preemptible workers, relative to the other jobs' shares."""
    weights: Literal["full", "delta", "lora"] = "full"
    """How a version is published: whole chunks only, or deltas to the last version beside them, or an adapter alone.

    `delta` makes pulls small where workers are far, and costs the trainer host memory for one copy of the model. With
    `lora` the model stays as it is and an adapter is trained (section `lora`); workers fetch the model once.
    """
    link: Literal["fast", "slow"] = "fast"
    """How far workers are, with `weights: delta`.

    `slow` makes deltas a fifth smaller, for links of less than about 100 Mb/s a worker or where bytes that leave cost
    money; making and applying them takes several times as long.
    """
    in_flight: InFlight = "recompute"
    """With `max_staleness` above 0, what becomes of samples that run when a worker gets new weights.

    `recompute`: they go on under these, with their KV cache made anew. `keep`: they go on with the cache that they
    have, so their tokens attend to what older weights made. `finish`: they end under the old weights first.
    """

    @field_validator("seeding", mode="before")
    @classmethod
    def _off_is_no_boolean(cls, value: object) -> object:
        return off_is_no_boolean(value)


class EvalSpec(Section):
    """Evaluation on held-out prompts, generated beside the training samples of the same step."""

    every: int = Field(10, ge=1)
    samples: int = Field(256, ge=1)
    """How many completions in all, spread evenly over the evaluation prompts."""
    pass_reward: float = Field(1.0, allow_inf_nan=False)
    """The least reward of a completion that passes, for `eval/pass@k`."""


class JobSpec(Section):
    """A whole job file."""

    kind: Kind = "rl"
    """`rl`: reinforcement learning. `sft`: supervised fine-tuning on completions that the data has. `eval`: one
    evaluation of the model, which stays as it is."""
    name: str = Field("job", min_length=1, max_length=64, pattern=r"^[A-Za-z0-9._-]+$")
    model: str
    data: DataSpec
    environment: EnvironmentSpec | None = None
    """Where there is one, a sample is a conversation with it; its rewards are added to those of `reward`, if any."""
    reward: RewardSpec | None = Field(None, validate_default=True)
    algorithm: AlgorithmSpec = AlgorithmSpec()
    sampling: SamplingSpec = SamplingSpec()
    optimizer: OptimizerSpec = OptimizerSpec()
    trainer: TrainerSpec = TrainerSpec()
    elastic: ElasticSpec = ElasticSpec()
    log: LogSpec = LogSpec()
    lora: LoraSpec | None = None
    """Only with `elastic.weights: lora`, where it may be left out for the defaults."""
    steps: int = Field(0, ge=0, lt=MAX_STEPS, validate_default=True)
    eval: EvalSpec | None = Field(None, validate_default=True)

    @field_validator("environment", "reward", "algorithm", "sampling", "optimizer", "lora", "steps", "eval")
    @classmethod
    def _suits_the_kind(cls, value: object, info: ValidationInfo) -> object:
        kind: Kind | None = info.data.get("kind")
        if kind is None:
            return value  # it is no kind, and that is told
        name = str(info.field_name)
        is_given = value != cls.model_fields[name].get_default()
        if name in _NEEDED[kind] and not is_given and not (name == "reward" and info.data.get("environment")):
            raise ValueError(f"a job of kind {kind} needs {_WANTED[name]}")
        if name in _USELESS[kind] and is_given:
            raise ValueError(f"a job of kind {kind} {_BECAUSE[kind]}: remove it")
        return value

    @field_validator("sampling")
    @classmethod
    def _can_be_learnt_from(cls, value: SamplingSpec, info: ValidationInfo) -> SamplingSpec:
        if info.data.get("kind") == "rl" and value.temperature == 0:
            raise ValueError("sampling.temperature: 0 makes all completions of a group alike: give a value above 0")
        return value

    @field_validator("data")
    @classmethod
    def _has_what_the_kind_reads(cls, value: DataSpec, info: ValidationInfo) -> DataSpec:
        kind: Kind | None = info.data.get("kind")
        if kind == "eval" and value.eval is None:
            raise ValueError("data.eval: a job of kind eval needs it")
        if kind == "eval" and value.train is not None:
            raise ValueError("data.train: a job of kind eval reads only data.eval: remove it")
        if kind in {"rl", "sft"} and value.train is None:
            raise ValueError(f"data.train: a job of kind {kind} needs it")
        if kind in {"sft", "eval"} and value.curriculum is not None:
            raise ValueError("data.curriculum: it is for jobs of kind rl: remove it")
        if kind in {"rl", "eval"} and value.max_completion_tokens is not None:
            raise ValueError("data.max_completion_tokens: it is for jobs of kind sft: set sampling.max_tokens instead")
        return value

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.eval is not None and self.data.eval is None:
            raise ValueError("eval is set but data.eval is not: name the file of held-out prompts, or remove eval")
        if self.algorithm.updates_per_step > self.data.prompts_per_step:
            raise ValueError("algorithm.updates_per_step is larger than data.prompts_per_step: lower it")
        if self.data.prompts_per_step * self.algorithm.group_size < 2:
            raise ValueError("algorithm.group_size: a step of one sample has nothing to compare with: raise it")
        if self.elastic.link == "slow" and self.elastic.weights != "delta":
            raise ValueError("elastic.link: slow is about deltas: set elastic.weights to delta, or remove it")
        if self.lora is not None and self.elastic.weights != "lora":
            raise ValueError(
                f"there is a section lora, but elastic.weights is {self.elastic.weights!r}: set elastic.weights to "
                "lora to train an adapter, or remove the section to train the whole model"
            )
        if self.kind == "eval" and self.elastic.weights == "lora":
            raise ValueError("elastic.weights: a job of kind eval trains no adapter: remove it")
        if self.kind == "sft" and self.elastic.model_copy(update={"weights": "full"}) != ElasticSpec():
            raise ValueError("elastic: a job of kind sft generates nothing: remove all but elastic.weights")
        return self

    @model_validator(mode="after")
    def _can_begin_elsewhere(self) -> Self:
        if self.trainer.begins_elsewhere and self.kind == "eval":
            raise ValueError(
                "trainer.resume: a job of kind eval begins with a model, not with another job's checkpoint: remove it, "
                "and name that job's model (model: .rlboost/runs/JOB/model)"
            )
        if self.trainer.begins_elsewhere and self.data.curriculum is not None:
            raise ValueError(
                "trainer.resume: another job's checkpoint does not say what became of its prompts, which "
                "data.curriculum needs: begin with that job's weights (model: .rlboost/runs/JOB/model, and no "
                "trainer.resume), or remove data.curriculum"
            )
        return self

    @model_validator(mode="after")
    def _several_processes_can(self) -> Self:
        if self.trainer.in_one_process:
            return self
        if self.algorithm.critic is not None:
            raise ValueError(
                "algorithm.advantage: gae trains a critic, which needs trainer.backend: torch in one process; in "
                "several take an algorithm that compares rewards with each other, such as grpo"
            )
        if self.elastic.weights == "lora":
            raise ValueError(
                "elastic.weights: lora needs trainer.backend: torch in one process; several train whole models"
            )
        return self

    @property
    def reward_parts(self) -> tuple[RewardPart, ...]:
        """Return all reward functions, none where nothing is rewarded."""
        return self.reward.parts if self.reward else ()

    @property
    def adapter(self) -> LoraSpec | None:
        """Return what adapter is trained, None where the whole model is."""
        if self.elastic.weights != "lora":
            return None
        return self.lora or LoraSpec()


def parse(raw: object) -> JobSpec:
    """Return the job that a mapping describes.

    Raises:
        ConfigError: naming each wrong field.

    """
    if not isinstance(raw, dict):
        raise ConfigError("a job file is a mapping with the keys model, data, reward, steps, ...")
    try:
        return JobSpec.model_validate(raw)
    except ValidationError as error:
        raise ConfigError("; ".join(describe(error))) from error


def load(path: str, overrides: list[str] | None = None) -> dict[str, Any]:
    """Return the mapping in a YAML, TOML or JSON job file, with `a.b=v` overrides applied; not yet validated.

    Raises:
        ConfigError: the file is missing or does not parse, or an override is not of the form `a.b=v`.

    """
    file = Path(path)
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"job file {path}: {error.strerror or error}: name a file that can be read") from error
    try:
        raw = tomllib.loads(text) if file.suffix == ".toml" else yaml.safe_load(text)
    except (yaml.YAMLError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"job file {path} does not parse: {error}") from error
    if not isinstance(raw, dict):
        raise ConfigError(f"job file {path}: a mapping with the keys model, data, reward, steps, ... is expected")
    for override in overrides or []:
        set_by_override(raw, override)
    return raw


def set_by_override(raw: dict[str, Any], override: str) -> None:
    """Set one value of a job file, in place.

    Args:
        raw: the job file as a mapping.
        override: `a.b=v`, where `v` is read as YAML.

    Raises:
        ConfigError: it is not of that form, or `a` is no section.

    """
    key, separator, text = override.partition("=")
    if not separator or not key:
        raise ConfigError(f"override {override!r} is not of the form a.b=value")
    *parents, leaf = key.split(".")
    node = raw
    for parent in parents:
        if (child := node.get(parent)) is None:
            child = node[parent] = {}
        if not isinstance(child, dict):
            raise ConfigError(f"override {override!r}: {parent} is not a section")
        node = child
    try:
        node[leaf] = yaml.safe_load(text)
    except yaml.YAMLError:
        node[leaf] = text


def to_json(spec: JobSpec) -> str:
    """Return the resolved job as JSON; `parse(json.loads(...))` gives the same job back."""
    return json.dumps(spec.model_dump(mode="json"))
