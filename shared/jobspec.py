"""The job file: what a user asks for. Unknown keys are refused; every error names its field and says what to do."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from shared.algorithm import AlgorithmSpec
from shared.errors import ConfigError
from shared.ids import MAX_GROUPS_PER_STEP, MAX_STEPS
from shared.messages import InFlight
from shared.validation import describe, off_is_no_boolean

MAX_STALENESS = 16
"""Beyond it a sample's tokens say little about the policy that is trained."""


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class DataSpec(_Section):
    """Where prompts come from; extra columns reach the reward.

    `.jsonl` files with one problem a line, `.parquet` files, folders or ids of Hugging Face datasets.
    """

    train: str
    eval: str | None = None
    train_split: str = "train"
    """Of a Hugging Face dataset with several."""
    eval_split: str = "test"
    subset: str | None = None
    """Of a Hugging Face dataset with several (its configuration)."""
    prompt_key: str = "prompt"
    """Where a row holds its prompt: text, or chat messages, which go through the model's chat template."""
    max_prompt_tokens: int | None = Field(None, ge=1)
    """Rows with longer prompts are left out, and counted."""
    prompts_per_step: int = Field(32, ge=1, lt=MAX_GROUPS_PER_STEP)


RewardStyle = Literal["auto", "trl", "verl"]
"""How a reward function is called; `auto` looks at the names of its parameters."""


def _function_path(value: str | None) -> str | None:
    if value is None:
        return None
    module, _, name = value.partition(":")
    if not module or not name:
        raise ValueError(f"{value!r} is not of the form package.module:function")
    return value


def _address(value: str | None) -> str | None:
    if value is not None and not re.fullmatch(r"https?://[^\s/]+.*", value):
        raise ValueError(f"{value!r} is not of the form http://host:port/path")
    return value


FunctionPath = Annotated[str | None, AfterValidator(_function_path)]
Address = Annotated[str | None, AfterValidator(_address)]


class RewardPart(_Section):
    """One of several reward functions."""

    function: FunctionPath = None
    """`package.module:function`."""
    url: Address = None
    """In place of a function: where the group is sent by POST, see `services.trainer.remote_reward`."""
    weight: float = Field(1.0, allow_inf_nan=False)
    """What its rewards are multiplied by before they are added up; 0 only logs them."""
    name: str = Field("", pattern=r"^[A-Za-z0-9._-]*$")
    """It is logged as `reward/<name>/mean`; left out, it is the function's own name, or `remote`."""
    style: RewardStyle = "auto"
    arguments: dict[str, Any] = {}
    """Given to the function by name, beside the columns of the data."""

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.function is None) == (self.url is None):
            raise ValueError("give either function or url")
        if self.url is not None and (self.style != "auto" or self.arguments):
            raise ValueError("style and arguments are for a function; a url gets the columns of the data")
        return self

    @property
    def source(self) -> str:
        """Return what people know it by: the function's path, or the url."""
        return self.function or self.url or ""


class RewardSpec(_Section):
    """The reward: one function, or a service that is asked over HTTP, or several of these with weights.

    A function has TRL's signature, `f(prompts, completions, completion_ids, **columns)`, or verl's,
    `f(data_source, solution_str, ground_truth, extra_info)`; it may be async.
    """

    function: FunctionPath = None
    url: Address = None
    style: RewardStyle = "auto"
    arguments: dict[str, Any] = {}
    functions: Annotated[tuple[RewardPart, ...], Field(min_length=1)] | None = None
    timeout_s: float = Field(5.0, gt=0)
    """For one group, all functions together."""
    workers: int = Field(1, ge=1)

    @model_validator(mode="after")
    def _one_form(self) -> Self:
        if sum(given is not None for given in (self.function, self.url, self.functions)) != 1:
            raise ValueError("give either function, or functions: a list of {function, weight, name}, or url")
        if self.functions is not None and (self.style != "auto" or self.arguments):
            raise ValueError("style and arguments belong to each of functions")
        if len(set(names := [part.name for part in self.parts])) < len(names):
            raise ValueError(f"two functions are called {max(names, key=names.count)!r}: give each a name")
        return self

    @property
    def parts(self) -> tuple[RewardPart, ...]:
        """Return all functions, each with a name; a single one's is empty: its rewards are the reward."""
        if self.functions is None:
            return (RewardPart(function=self.function, url=self.url, style=self.style, arguments=self.arguments),)
        return tuple(
            part if part.name else part.model_copy(update={"name": (part.function or ":remote").rpartition(":")[2]})
            for part in self.functions
        )


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

    backend: Literal["torch", "megatron"] = "torch"
    """`torch` trains in one process; `megatron` (megatron-core) in as many as the three numbers below make together."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    checkpoint_every: int = Field(10, ge=1)
    resume: Literal["auto", "never"] = "auto"
    micro_batch_tokens: int = Field(4096, ge=1)
    seed: int = 0
    tensor_parallel: int = Field(1, ge=1)
    """Processes that share each layer."""
    pipeline_parallel: int = Field(1, ge=1)
    """Processes that share the layers, one after the other."""
    data_parallel: int = Field(1, ge=1)
    """Copies of all that, which share the samples."""
    sequence_parallel: bool = False
    """With `tensor_parallel`: norms, too, are shared out, along the tokens (arXiv 2205.05198)."""
    distributed_optimizer: bool = False
    """With `data_parallel`: each copy keeps a part of the optimizer's state (ZeRO stage 1, arXiv 1910.02054)."""

    @model_validator(mode="after")
    def _applies(self) -> Self:
        numbers = ("tensor_parallel", "pipeline_parallel", "data_parallel")
        asked = [name for name in numbers if getattr(self, name) > 1]
        asked += [name for name in ("sequence_parallel", "distributed_optimizer") if getattr(self, name)]
        if self.backend == "torch" and asked:
            raise ValueError(f"{asked[0]} needs trainer.backend: megatron; the torch backend is one process")
        if self.sequence_parallel and self.tensor_parallel == 1:
            raise ValueError("sequence_parallel is for tensor_parallel above 1: raise that, or remove it")
        if self.distributed_optimizer and self.data_parallel == 1:
            raise ValueError("distributed_optimizer is for data_parallel above 1: raise that, or remove it")
        return self


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


class LoraSpec(_Section):
    """A low-rank adapter (LoRA, arXiv 2106.09685) on linear layers, with the defaults of PEFT."""

    rank: int = Field(8, ge=1)
    alpha: float = Field(8.0, gt=0, allow_inf_nan=False)
    """The adapter's product is scaled by `alpha / rank`."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """Of the adapter's input, while training only: above 0 the trained distribution is not quite the sampled one."""
    targets: Literal["all-linear"] | Annotated[tuple[str, ...], Field(min_length=1)] = "all-linear"
    """Names of the layers that get one, as in PEFT's `target_modules`; `all-linear`: all but the output head."""


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
    lora: LoraSpec | None = None
    """Only with `elastic.weights: lora`, where it may be left out for the defaults."""
    steps: int = Field(ge=1, lt=MAX_STEPS)
    eval: EvalSpec | None = None

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
        if self.trainer.backend == "megatron" and self.elastic.weights == "lora":
            raise ValueError("elastic.weights: lora needs trainer.backend: torch; megatron trains whole models")
        if self.lora is not None and self.elastic.weights != "lora":
            raise ValueError(
                f"there is a section lora, but elastic.weights is {self.elastic.weights!r}: set elastic.weights to "
                "lora to train an adapter, or remove the section to train the whole model"
            )
        return self

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
