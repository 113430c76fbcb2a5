"""The job file: what a user asks for. Unknown keys are refused; every error names its field and says what to do."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self, cast

import yaml
from pydantic import BeforeValidator, Field, ValidationError, ValidationInfo, field_validator, model_validator

from shared import strict_yaml
from shared.algorithm import AlgorithmSpec, as_it_ran
from shared.errors import ConfigError
from shared.ids import MAX_STEPS
from shared.jobspec_data import DataSpec, EvalDataSpec, RlDataSpec, SftDataSpec, TrainDataSpec
from shared.jobspec_fleet import (
    EvalElasticSpec,
    EvalSpec,
    RlElasticSpec,
    SamplingSpec,
    SftElasticSpec,
    VersionsSpec,
)
from shared.reward import EnvironmentSpec, RewardPart, RewardSpec
from shared.runlog import LogSpec
from shared.training import LoraSpec, OptimizerSpec, TrainerSpec
from shared.validation import Section, describe, one_of

Kind = Literal["rl", "sft", "eval"]
_OF_EACH_KIND = ("data", "elastic")
"""Sections that are others in jobs of other kinds."""
_NO_MAPPING = "a job file is a mapping with the keys model, data, reward, steps, ..."
# YAML takes JSON's 1e-06 for text.
_READERS: Mapping[str, Callable[[str], object]] = {".toml": tomllib.loads, ".json": json.loads}


class BaseJob(Section):
    """What every job says."""

    gist: ClassVar[str]
    """What it does, or does not, in words: so a setting that does not apply is refused."""

    kind: Kind
    """`rl`: reinforcement learning. `sft`: supervised fine-tuning on completions that the data has. `eval`: one
    evaluation of the model, which stays as it is."""
    name: str = Field("job", min_length=1, max_length=64, pattern=r"^[A-Za-z0-9._-]+$")
    model: str = Field(min_length=1)
    data: DataSpec
    trainer: TrainerSpec = TrainerSpec()
    log: LogSpec = LogSpec()


class _TrainingJob(BaseJob):
    """A job that changes the model."""

    data: TrainDataSpec
    elastic: VersionsSpec = VersionsSpec()
    optimizer: OptimizerSpec = OptimizerSpec()
    lora: LoraSpec | None = None
    """Only with `elastic.weights: lora`, where it may be left out for the defaults."""
    steps: int = Field(ge=1, lt=MAX_STEPS)

    @property
    def adapter(self) -> LoraSpec | None:
        """Return what adapter is trained, None where the whole model is."""
        if self.elastic.weights != "lora":
            return None
        return self.lora or LoraSpec()

    @model_validator(mode="after")
    def _adapter_is_asked_for_once(self) -> Self:
        if self.lora is not None and self.elastic.weights != "lora":
            raise ValueError(
                f"there is a section lora, but elastic.weights is {self.elastic.weights!r}: set elastic.weights to "
                "lora to train an adapter, or remove the section to train the whole model"
            )
        if self.elastic.weights == "lora" and not self.trainer.in_one_process:
            raise ValueError(
                "elastic.weights: lora needs trainer.backend: torch in one process; several train whole models"
            )
        return self

    @model_validator(mode="after")
    def _optimizer_can_update_what_is_trained(self) -> Self:
        if self.optimizer.name == "muon" and not self.trainer.in_one_process:
            raise ValueError(
                "optimizer.name: muon needs trainer.backend: torch in one process, as it takes whole matrices; with "
                "several set adamw"
            )
        if self.optimizer.name == "muon" and self.adapter is not None:
            raise ValueError(
                "optimizer.name: muon is for whole matrices, and elastic.weights: lora trains two thin factors of each "
                "change: set adamw, or elastic.weights: full"
            )
        return self


class _RewardedJob(BaseJob):
    """A job whose completions come from workers and are rewarded."""

    environment: EnvironmentSpec | None = None
    """Where there is one, a sample is a conversation with it; its rewards are added to those of `reward`, if any."""
    reward: RewardSpec | None = Field(None, validate_default=True)
    sampling: SamplingSpec = SamplingSpec()

    @property
    def reward_parts(self) -> tuple[RewardPart, ...]:
        """Return all reward functions, none where the environment alone rewards."""
        return self.reward.parts if self.reward else ()

    @field_validator("reward")
    @classmethod
    def _something_rewards(cls, value: RewardSpec | None, info: ValidationInfo) -> RewardSpec | None:
        if value is None and info.data.get("environment") is None:
            raise ValueError(f"a job of kind {info.data.get('kind')} needs it, or an environment")
        return value


class RlJob(_TrainingJob, _RewardedJob):
    """Reinforcement learning."""

    gist: ClassVar[str] = "learns from what it generates, up to sampling.max_tokens"

    kind: Literal["rl"] = "rl"
    data: RlDataSpec
    elastic: RlElasticSpec = RlElasticSpec()
    algorithm: AlgorithmSpec = AlgorithmSpec()
    eval: EvalSpec | None = None

    @field_validator("sampling")
    @classmethod
    def _can_be_learnt_from(cls, value: SamplingSpec) -> SamplingSpec:
        if value.temperature == 0:
            raise ValueError("sampling.temperature: 0 makes all completions of a group alike: give a value above 0")
        return value

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.eval is not None and self.data.eval is None:
            raise ValueError("eval is set but data.eval is not: name the file of held-out prompts, or remove eval")
        if self.algorithm.updates_per_step > self.data.prompts_per_step:
            raise ValueError("algorithm.updates_per_step is larger than data.prompts_per_step: lower it")
        if self.data.prompts_per_step * self.algorithm.group_size < 2:
            raise ValueError("algorithm.group_size: a step of one sample has nothing to compare with: raise it")
        if self.algorithm.critic is not None and not self.trainer.in_one_process:
            raise ValueError(
                "algorithm.advantage: gae trains a critic, which needs trainer.backend: torch in one process; in "
                "several take an algorithm that compares rewards with each other, such as grpo"
            )
        if self.trainer.begins_elsewhere and self.data.curriculum is not None:
            raise ValueError(
                "trainer.resume: another job's checkpoint does not say what became of its prompts, which "
                "data.curriculum needs: begin with that job's weights (model: .rlboost/runs/JOB/model, and no "
                "trainer.resume), or remove data.curriculum"
            )
        return self


class SftJob(_TrainingJob):
    """Supervised fine-tuning."""

    gist: ClassVar[str] = "generates nothing"
    environment: ClassVar[None] = None
    reward: ClassVar[None] = None
    reward_parts: ClassVar[tuple[RewardPart, ...]] = ()
    sampling: ClassVar[SamplingSpec] = SamplingSpec()
    """How the result is sampled that is served."""

    kind: Literal["sft"] = "sft"
    data: SftDataSpec
    elastic: SftElasticSpec = SftElasticSpec()


class EvalJob(_RewardedJob):
    """One evaluation: to the loop of steps, which evaluates after the last one, a job of no steps."""

    gist: ClassVar[str] = "trains nothing"
    steps: ClassVar[int] = 0
    algorithm: ClassVar[AlgorithmSpec] = AlgorithmSpec()
    optimizer: ClassVar[OptimizerSpec] = OptimizerSpec()
    adapter: ClassVar[None] = None

    kind: Literal["eval"] = "eval"
    data: EvalDataSpec
    elastic: EvalElasticSpec = EvalElasticSpec()
    eval: EvalSpec

    @model_validator(mode="after")
    def _begins_with_a_model(self) -> Self:
        if self.trainer.begins_elsewhere:
            raise ValueError(
                "trainer.resume: a job of kind eval begins with a model, not with another job's checkpoint: remove it, "
                "and name that job's model (model: .rlboost/runs/JOB/model)"
            )
        return self


GeneratingJob = RlJob | EvalJob
"""What goes through the loop of steps, whose samples workers generate."""
JobSpec = Annotated[RlJob | SftJob | EvalJob, Field(discriminator="kind")]
"""A whole job file; `parse` makes one."""
_KINDS: Mapping[str, type[RlJob] | type[SftJob] | type[EvalJob]] = {"rl": RlJob, "sft": SftJob, "eval": EvalJob}


class WrongJob(ConfigError):
    """What is wrong with a job file: lines, each naming its field, or the fields that are to be removed."""

    def __init__(self, problems: Sequence[str], useless: Sequence[str] = (), because: str = "") -> None:
        """Take what is wrong with fields, and what does not apply and why."""
        told = f"{because}: remove {', '.join(useless)}"
        self.problems = [*([told] if useless else []), *problems]
        """One line each."""
        self.fields = [(name, told) for name in useless]
        self.fields += [(field, text) for field, _, text in (line.partition(": ") for line in problems)]
        """Each wrong field, with what to do."""
        super().__init__("; ".join(self.problems))


def parse(raw: object) -> JobSpec:
    """Return the job that a mapping describes.

    Raises:
        WrongJob: naming each wrong field.

    """
    return _job(raw, is_stored=False)


def _job(raw: object, *, is_stored: bool) -> JobSpec:
    if not isinstance(raw, dict):
        raise ConfigError(_NO_MAPPING)
    kind = raw.get("kind", "rl")
    if not isinstance(kind, str) or kind not in _KINDS:
        raise WrongJob([f"kind: {one_of(*_KINDS)}"])
    spec = _KINDS[kind]
    applies, useless = _sorted_out(spec, raw)
    if is_stored and isinstance(algorithm := applies.get("algorithm"), dict):
        applies["algorithm"] = as_it_ran(algorithm)
    refused = [] if is_stored else useless
    because = f"a job of kind {kind} {spec.gist}"
    try:
        job = spec.model_validate(applies)
    except ValidationError as error:
        raise WrongJob(describe(error, spec), refused, because) from error
    if refused:
        raise WrongJob([], refused, because)
    return job


def _sorted_out(spec: type[BaseJob], raw: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return what may apply to a kind of job, and the names of what is given and applies to other kinds alone."""
    applies, useless = _without_others(spec, _KINDS.values(), raw)
    for name in _OF_EACH_KIND:
        if isinstance(applies.get(name), dict):
            sections = [_section(kind, name) for kind in _KINDS.values()]
            applies[name], more = _without_others(_section(spec, name), sections, applies[name])
            useless += [f"{name}.{key}" for key in more]
    return applies, useless


def _without_others(
    mine: type[Section], all_kinds: Iterable[type[Section]], raw: Mapping[str, Any]
) -> tuple[dict[str, Any], list[str]]:
    others = {name for one in all_kinds for name in one.model_fields}.difference(mine.model_fields)
    applies = {name: value for name, value in raw.items() if name not in others}
    return applies, [name for name, value in raw.items() if name in others and value is not None]


def _section(kind: type[BaseJob], name: str) -> type[Section]:
    section: Any = kind.model_fields[name].annotation
    return cast("type[Section]", section)


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
    except UnicodeDecodeError as error:
        raise ConfigError(f"job file {path} is not UTF-8: {error}") from error
    try:
        raw = _READERS.get(file.suffix, strict_yaml.read)(text)
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"job file {path} does not parse: {error}") from error
    if not isinstance(raw, dict):
        raise ConfigError(f"job file {path}: {_NO_MAPPING}")
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
    (*parents, leaf), value = read_override(override)
    node = raw
    for parent in parents:
        if (child := node.get(parent)) is None:
            child = node[parent] = {}
        if not isinstance(child, dict):
            raise ConfigError(f"override {override!r}: {parent} is not a section")
        node = child
    node[leaf] = value


def read_override(override: str) -> tuple[list[str], object]:
    """Return the names of an override, from the outermost section to the key, and its value.

    What is no YAML is text, as `*.jsonl` is, unless it has to be a section or a list.

    Raises:
        ConfigError: it is not of the form `a.b=v`, or `v` is a section or list that does not parse.

    """
    key, separator, text = override.partition("=")
    if not separator or not all(names := key.split(".")):
        raise ConfigError(f"override {override!r} is not of the form a.b=value")
    try:
        return names, strict_yaml.read(text)
    except (yaml.YAMLError, ValueError) as error:
        if isinstance(error, strict_yaml.GivenTwice):
            raise ConfigError(f"override {override!r}: {error.problem}") from error
        # A pattern may begin with a bracket, which it closes.
        if text.startswith("{") or (text.startswith("[") and "]" not in text):
            why = error.problem if isinstance(error, yaml.MarkedYAMLError) else error
            raise ConfigError(
                f"override {override!r} does not parse: {why}: close what it opens, and put all of it in quotes"
            ) from error
        return names, text


def to_json(spec: JobSpec) -> str:
    """Return the resolved job as JSON, with what applies to it; `parse(json.loads(...))` gives the same job back."""
    return json.dumps(spec.model_dump(mode="json"))


def recalled(raw: object) -> JobSpec:
    """Return a job that was stored; what does not apply to it is passed over.

    It was checked when it came, maybe by an earlier version, which let more pass and stored every default. What there
    was no setting for yet stays as it was then.

    Raises:
        WrongJob: naming each wrong field.

    """
    return raw if isinstance(raw, RlJob | SftJob | EvalJob) else _job(raw, is_stored=True)


StoredJob = Annotated[JobSpec, BeforeValidator(recalled)]
"""A job as a field of what is stored."""
