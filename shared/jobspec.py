"""The job file: what a user asks for. Unknown keys are refused; every error names its field and says what to do."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from shared.errors import ConfigError
from shared.ids import MAX_GROUP_SIZE, MAX_GROUPS_PER_STEP, MAX_STEPS
from shared.validation import describe

MAX_STALENESS = 16
"""Beyond it a sample's tokens say little about the policy that is trained."""


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class DataSpec(_Section):
    """Where prompts come from: `.jsonl` files with one problem a line; extra columns reach the reward."""

    train: str
    eval: str | None = None
    prompt_key: str = "prompt"
    prompts_per_step: int = Field(32, ge=1, lt=MAX_GROUPS_PER_STEP)


class RewardSpec(_Section):
    """The reward: `module:function` with TRL's signature `f(prompts, completions, completion_ids, **columns)`."""

    function: str
    timeout_s: float = Field(5.0, gt=0)
    workers: int = Field(1, ge=1)

    @field_validator("function")
    @classmethod
    def _has_a_colon(cls, value: str) -> str:
        module, _, name = value.partition(":")
        if not module or not name:
            raise ValueError(f"{value!r} is not of the form package.module:function")
        return value


class AlgorithmSpec(_Section):
    """GRPO (DeepSeekMath, arXiv 2402.03300) with DAPO's clip-higher and token-mean loss (arXiv 2503.14476)."""

    name: Literal["grpo"] = "grpo"
    group_size: int = Field(8, ge=1, le=MAX_GROUP_SIZE)
    clip_low: float = Field(0.2, gt=0, lt=1)
    clip_high: float = Field(0.28, gt=0)
    kl_coef: float = Field(0.0, ge=0, le=0)
    """Only 0 so far: no reference model is kept."""
    updates_per_step: int = Field(1, ge=1)
    tis_cap: Annotated[float, Field(gt=0, allow_inf_nan=False)] | Literal["off"] = 2.0
    """With `elastic.max_staleness` above 0: where the importance weight of a token of older weights is cut.

    `off` leaves such tokens unweighted. Without staleness there is nothing to weigh.
    """

    @field_validator("tis_cap", mode="before")
    @classmethod
    def _off_is_no_boolean(cls, value: object) -> object:
        return _off(value)


class SamplingSpec(_Section):
    """How rollouts are drawn."""

    temperature: float = Field(1.0, ge=0)
    top_p: float = Field(1.0, gt=0, le=1)
    max_tokens: int = Field(256, ge=1)


class OptimizerSpec(_Section):
    """AdamW."""

    lr: float = Field(1e-6, gt=0)
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = Field(0.0, ge=0)
    warmup_steps: int = Field(0, ge=0)
    decay: float = Field(0.0, ge=0, le=1)
    """The learning rate falls linearly by this fraction from the first to the last step."""
    grad_clip: float = Field(1.0, gt=0)


class TrainerSpec(_Section):
    """How the trainer runs."""

    backend: Literal["torch"] = "torch"
    dtype: Literal["float32", "bfloat16"] = "float32"
    checkpoint_every: int = Field(10, ge=1)
    resume: Literal["auto", "never"] = "auto"
    micro_batch_tokens: int = Field(4096, ge=1)
    seed: int = 0


class ElasticSpec(_Section):
    """How the job uses workers that come and go."""

    max_staleness: int = Field(0, ge=0, le=MAX_STALENESS)
    """How many weight versions may lie between making a token and training on it; 0 is strictly on-policy."""
    seeding: Annotated[float, Field(ge=0, allow_inf_nan=False)] | Literal["auto", "off"] = "auto"
    """How long the reserved engines generate at the start of a step while preemptible workers are there.

    Seconds; or `auto`: the manager learns it for each fleet size; or `off`: not at all.
    """
    share: float = Field(1.0, gt=0, allow_inf_nan=False)
    """The job's part of the preemptible workers, relative to the other jobs' shares."""
    weights: Literal["full", "delta"] = "full"
    """How a version is published: whole chunks only, or deltas to the last version beside them.

    `delta` makes pulls small where workers are far, and costs the trainer host memory for one copy of the model.
    """

    @field_validator("seeding", mode="before")
    @classmethod
    def _off_is_no_boolean(cls, value: object) -> object:
        return _off(value)


class EvalSpec(_Section):
    """Evaluation on held-out prompts, generated beside the training samples of the same step."""

    every: int = Field(10, ge=1)
    samples: int = Field(256, ge=1)
    """How many completions in all, spread evenly over the evaluation prompts."""


class JobSpec(_Section):
    """A whole job file."""

    name: str = Field("job", min_length=1, max_length=64, pattern=r"^[A-Za-z0-9._-]+$")
    model: str
    data: DataSpec
    reward: RewardSpec
    algorithm: AlgorithmSpec = AlgorithmSpec()
    sampling: SamplingSpec = SamplingSpec()
    optimizer: OptimizerSpec = OptimizerSpec()
    trainer: TrainerSpec = TrainerSpec()
    elastic: ElasticSpec = ElasticSpec()
    steps: int = Field(ge=1, lt=MAX_STEPS)
    eval: EvalSpec | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.eval is not None and self.data.eval is None:
            raise ValueError("eval is set but data.eval is not: name the file of held-out prompts, or remove eval")
        if self.algorithm.updates_per_step > self.data.prompts_per_step:
            raise ValueError("algorithm.updates_per_step is larger than data.prompts_per_step: lower it")
        return self


def _off(value: object) -> object:
    # YAML reads a bare off as false; a bare on means nothing here.
    return {False: "off", True: "on"}[value] if isinstance(value, bool) else value


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
        _override(raw, override)
    return raw


def _override(raw: dict[str, Any], override: str) -> None:
    key, separator, text = override.partition("=")
    if not separator or not key:
        raise ConfigError(f"override {override!r} is not of the form a.b=value")
    *parents, leaf = key.split(".")
    node = raw
    for parent in parents:
        child = node.setdefault(parent, {})
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
