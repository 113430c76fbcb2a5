"""The job file. Unknown keys are rejected; every error names its field and says what to do."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from types import NoneType
from typing import Annotated, Any, ClassVar, Literal, Self, cast, get_args

from pydantic import BeforeValidator, Field, ValidationError, field_validator, model_validator

from rlboost.shared.data.shards import AGENT_ROWS, Source, names_of
from rlboost.shared.errors import ConfigError
from rlboost.shared.ids import MAX_STEPS
from rlboost.shared.job import other_trainers
from rlboost.shared.job.algorithm import GROUPLESS, AlgorithmSpec, PairsSpec, TeacherSpec, with_former_defaults
from rlboost.shared.job.base import BaseJob, ExternalJob, ServedJob, UntrainedJob, served_id
from rlboost.shared.job.data import (
    DataSpec,
    DpoDataSpec,
    EvalDataSpec,
    OfflineDataSpec,
    RlDataSpec,
    SftDataSpec,
    TrainDataSpec,
)
from rlboost.shared.job.fleet import (
    REMOVED_ELASTIC,
    EvalElasticSpec,
    EvalSpec,
    ModelSpec,
    OfflineElasticSpec,
    OfflineEvalSpec,
    RlElasticSpec,
    SamplingSpec,
    ServedElasticSpec,
    VersionsSpec,
)
from rlboost.shared.job.reward import AgentSpec, ConversationSpec, EnvironmentSpec, RewardPart, RewardSpec
from rlboost.shared.job.training import LoraSpec, OptimizerSpec, TrainerSpec
from rlboost.shared.process.modules import is_installed, pip_install
from rlboost.shared.user_code import functions
from rlboost.shared.user_code.functions import ForbiddenFunction, check_name
from rlboost.shared.validation import Section, describe, one_of

# --- The section of a job file about logging metrics to Weights & Biases and TensorBoard ------------------------------


class WandbSpec(Section):
    """A run of Weights & Biases. WANDB_API_KEY and WANDB_MODE are read from the trainer's environment."""

    project: str = Field(min_length=1)
    """Project of the run."""
    entity: str | None = None
    """Owner of the project; by default the owner of the API key."""
    group: str | None = None
    """Group of the run."""
    tags: tuple[str, ...] = ()
    """Tags of the run."""


class LogSpec(Section):
    """Where the run's metrics are logged, in addition to `metrics.jsonl`."""

    wandb: WandbSpec | None = None
    """Log to Weights & Biases."""
    tensorboard: bool = False
    """Write event files to the run's folder `tensorboard/`."""


def missing_log_libraries(spec: LogSpec) -> list[str]:
    """Return one line per enabled library that is not installed; imports nothing."""
    enabled = {"wandb": spec.wandb is not None, "tensorboard": spec.tensorboard}
    return [
        f"log.{name} needs {name}: install it with: {pip_install('logs')}"
        for name, is_enabled in enabled.items()
        if is_enabled and not is_installed(name)
    ]


# --- The job file -----------------------------------------------------------------------------------------------------


_SECTIONS_BY_KIND = ("data", "elastic", "eval", "algorithm")
"""Sections whose keys depend on the kind of job."""
NO_MAPPING = "a job file is a mapping with the keys model, data, reward, steps, ..."


class ServiceJob(BaseJob):
    """A job that the trainer service runs."""

    data: DataSpec
    """Source of prompts."""
    trainer: TrainerSpec = TrainerSpec()
    """How the trainer runs."""
    log: LogSpec = LogSpec()
    """Where metrics are logged, in addition to `metrics.jsonl`."""

    @property
    def needs_reference(self) -> bool:
        """Return True if losses need log-probabilities under the starting weights."""
        return False

    @property
    def teacher(self) -> TeacherSpec | None:
        """Return the section of the job's teacher."""
        return None

    @model_validator(mode="after")
    def _has_the_agent_of_its_rows(self) -> Self:
        for rows in self.data.rows:
            agent: AgentSpec | None = getattr(self, "agent", None)
            if AGENT_ROWS in names_of(rows.source) and (agent is None or agent.function is None):
                has = "it has none" if agent is None else "a remote agent has none here"
                raise ValueError(f"{rows.field}: {AGENT_ROWS} are the rows of the job's agent, and {has}")
        return self

    @model_validator(mode="after")
    def _replays_only_generated_samples(self) -> Self:
        if self.trainer.router_replay != "none" and self.kind != "rl":
            raise ValueError(
                f"trainer.router_replay: {self.trainer.router_replay} replays the experts of generated samples in "
                f"training, and a job of kind {self.kind} {self.purpose}: remove it"
            )
        return self


class _TrainingJob(ServiceJob):
    """A job that changes the model."""

    data: TrainDataSpec
    """Source of prompts."""
    elastic: VersionsSpec = VersionsSpec()
    """How the job uses workers."""
    optimizer: OptimizerSpec = OptimizerSpec()
    """The optimizer of the model."""
    lora: LoraSpec | None = None
    """The adapter, with `elastic.weights: lora`."""
    steps: int = Field(ge=1, lt=MAX_STEPS)
    """Training steps in all."""

    @property
    def adapter(self) -> LoraSpec | None:
        """Return the adapter that is trained, None if the whole model is."""
        if self.elastic.weights != "lora":
            return None
        lora = self.lora or LoraSpec()
        base = lora.base_model_name_or_path or self.model
        return lora.model_copy(update={"base_model_name_or_path": base})

    @model_validator(mode="after")
    def _adapter_matches_weights(self) -> Self:
        if self.lora is not None and self.elastic.weights != "lora":
            raise ValueError(
                f"elastic.weights: {self.elastic.weights} trains the whole model, but there is a section lora: set "
                "elastic.weights to lora to train an adapter, or remove the section"
            )
        if self.elastic.weights == "lora" and self.trainer.backend == "megatron":
            raise ValueError(
                "elastic.weights: lora needs trainer.backend: torch, which has data_parallel and context_parallel for "
                "several processes; megatron trains whole models"
            )
        if self.elastic.weights == "lora" and self.trainer.compile:
            raise ValueError("trainer.compile is for whole models, and elastic.weights is lora: remove compile")
        return self

    @model_validator(mode="after")
    def _optimizer_supports_the_parameters(self) -> Self:
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


def require_held_out_rows(evaluation: OfflineEvalSpec | None, rows: Source | None) -> None:
    """Raise ValueError if a job is to be evaluated and names no held-out rows."""
    if evaluation is not None and rows is None:
        raise ValueError("data.eval: missing, and eval is set: name the file of held-out rows, or remove eval")


_ModelName = Annotated[str, Field(min_length=1, max_length=32, pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]*$")]


class _RewardedJob(ServiceJob):
    """A job whose completions are generated by workers and rewarded."""

    environment: EnvironmentSpec | None = None
    """Makes each sample a conversation with an environment, whose rewards are added to those of `reward`, if any."""
    agent: AgentSpec | None = None
    """Makes each sample a session of an agent, whose reward is added to that of `reward`, if any."""
    reward: RewardSpec | None = None
    """The reward; may be omitted only with an `environment` or an `agent`."""
    sampling: SamplingSpec = SamplingSpec()
    """How completions are sampled."""
    models: dict[_ModelName, ModelSpec] = Field(default_factory=dict)
    """Other models that the workers serve while the job runs, by name: a judge of `reward.judge`, or one that is
    called at the OpenAI endpoint as `JOB.NAME`."""

    @property
    def reward_parts(self) -> tuple[RewardPart, ...]:
        """Return all reward functions; none if only the environment or the agent gives rewards."""
        return self.reward.parts if self.reward else ()

    @property
    def conversation(self) -> ConversationSpec | None:
        """Return the section of the environment or agent; None if a sample is one completion."""
        return self.environment or self.agent

    @property
    def _learns_without_rewards(self) -> bool:
        return False

    @property
    def judges(self) -> tuple[RewardPart, ...]:
        """Return the parts of the reward that a judge gives."""
        return tuple(part for part in self.reward_parts if part.judge is not None)

    @model_validator(mode="after")
    def _has_its_judges(self) -> Self:
        for part in self.judges:
            if part.judge is not None and part.judge.model not in self.models:
                has = f"it has {', '.join(self.models)}" if self.models else "it has none"
                raise ValueError(
                    f"reward.judge.model: {part.judge.model!r} is not among models, and {has}: define "
                    f"models: {{{part.judge.model}: {{model: FOLDER_OR_ID}}}}"
                )
        return self

    @model_validator(mode="after")
    def _has_a_reward(self) -> Self:
        if self.conversation is not None or self._learns_without_rewards:
            return self
        if self.reward is None:
            raise ValueError(f"reward: a job of kind {self.kind} needs it, or an environment or agent")
        if not any(part.weight for part in self.reward.parts):
            raise ValueError("reward: every function has weight 0 and is only logged: give one of them another weight")
        return self

    @model_validator(mode="after")
    def _is_environment_or_agent(self) -> Self:
        if self.environment is not None and self.agent is not None:
            raise ValueError("agent: a sample is a session of an agent or a conversation with an environment: give one")
        return self


class RlJob(_TrainingJob, _RewardedJob):
    """Reinforcement learning."""

    purpose: ClassVar[str] = "learns from what it generates, up to sampling.max_tokens"

    kind: Literal["rl"] = "rl"
    data: RlDataSpec
    """Source of prompts."""
    elastic: RlElasticSpec = RlElasticSpec()
    """How the job uses workers."""
    algorithm: AlgorithmSpec = AlgorithmSpec()
    """The algorithm."""
    eval: EvalSpec | None = None
    """Evaluation on held-out prompts; needs `data.eval`."""

    @property
    def _learns_without_rewards(self) -> bool:
        return self.algorithm.advantage == "none"

    @property
    def needs_reference(self) -> bool:
        return self.algorithm.needs_reference

    @property
    def teacher(self) -> TeacherSpec | None:
        return self.algorithm.teacher

    @field_validator("sampling")
    @classmethod
    def _samples_differ(cls, value: SamplingSpec) -> SamplingSpec:
        if value.temperature == 0:
            raise ValueError("sampling.temperature: 0 makes all completions of a group alike: give a value above 0")
        return value

    @model_validator(mode="after")
    def _replays_whole_completions(self) -> Self:
        if self.sampling.stop and self.trainer.router_replay != "none":
            raise ValueError(
                "sampling.stop: not supported with trainer.router_replay, as engines return the experts only of "
                "completions that they end themselves: remove one of the two"
            )
        return self

    @model_validator(mode="after")
    def _supports_an_agent(self) -> Self:
        if self.agent is None:
            return self
        if self.trainer.router_replay != "none":
            raise ValueError(
                "trainer.router_replay: not supported with an agent, whose turns may branch: set it to none"
            )
        if self.algorithm.overlong_penalty:
            raise ValueError(
                "algorithm.overlong_penalty: not supported with an agent: each of its turns has a limit: set it to 0"
            )
        if self.algorithm.advantage == "best_worst":
            raise ValueError(
                "algorithm.advantage: best_worst compares whole completions, and turns of an agent may branch"
            )
        return self

    @model_validator(mode="after")
    def _supports_a_teacher(self) -> Self:
        if self.teacher is not None and self.trainer.router_replay != "none":
            raise ValueError(
                "trainer.router_replay: replays the experts of the job's model, which algorithm.teacher does not have: "
                "set it to none"
            )
        if self.eval is not None and self.reward is None and self.conversation is None:
            raise ValueError("eval: it needs a reward, which otherwise is only logged: give reward, or remove eval")
        return self

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        require_held_out_rows(self.eval, self.data.eval)
        if self.algorithm.updates_per_step > self.data.prompts_per_step:
            raise ValueError("algorithm.updates_per_step: more than data.prompts_per_step: lower it")
        if self.data.prompts_per_step * self.algorithm.group_size < 2:
            raise ValueError("algorithm.group_size: a step of one sample has nothing to compare with: raise it")
        section, conversation = "environment" if self.agent is None else "agent", self.conversation
        least = None if conversation is None else conversation.min_group_size
        if least is not None and least > self.algorithm.group_size:
            raise ValueError(f"{section}.min_group_size: more than algorithm.group_size: lower it")
        if least == 1 < self.algorithm.group_size and self.algorithm.advantage not in GROUPLESS:
            raise ValueError(f"{section}.min_group_size: a group of one has nothing to compare with: give 2 or more")
        if self.algorithm.critic is not None and self.trainer.backend == "megatron":
            raise ValueError(
                "algorithm.advantage: gae trains a critic, which needs trainer.backend: torch, with data_parallel and "
                "context_parallel for several processes; with megatron take an algorithm that compares rewards with "
                "each other, such as grpo"
            )
        if self.trainer.starts_from_checkpoint and self.data.curriculum is not None:
            raise ValueError(
                "trainer.resume: another job's checkpoint does not say what became of its prompts, which "
                "data.curriculum needs: begin with that job's weights (model: .rlboost/runs/JOB/model, and no "
                "trainer.resume), or remove data.curriculum"
            )
        return self


class OfflineJob(_TrainingJob):
    """A job that learns from completions in the data, without workers and rewards."""

    purpose: ClassVar[str] = "generates nothing"
    environment: ClassVar[None] = None
    agent: ClassVar[None] = None
    conversation: ClassVar[None] = None
    reward: ClassVar[None] = None
    reward_parts: ClassVar[tuple[RewardPart, ...]] = ()
    sampling: ClassVar[SamplingSpec] = SamplingSpec()
    """How the served result is sampled."""

    data: OfflineDataSpec
    elastic: OfflineElasticSpec = OfflineElasticSpec()
    eval: OfflineEvalSpec | None = None
    """Evaluation on held-out rows; needs `data.eval`."""

    @model_validator(mode="after")
    def _has_held_out_rows(self) -> Self:
        require_held_out_rows(self.eval, self.data.eval)
        return self


class SftJob(OfflineJob):
    """Supervised fine-tuning."""

    kind: Literal["sft"] = "sft"
    data: SftDataSpec


class DpoJob(OfflineJob):
    """Direct preference optimization on pairs in the data."""

    kind: Literal["dpo"] = "dpo"
    data: DpoDataSpec
    algorithm: PairsSpec = PairsSpec()

    @property
    def needs_reference(self) -> bool:
        return True

    @model_validator(mode="after")
    def _trains_without_dropout(self) -> Self:
        if self.adapter is not None and self.adapter.dropout:
            raise ValueError(
                "lora.dropout: pairs are compared without dropout, as with TRL's disable_dropout: set it to 0"
            )
        return self


class EvalJob(_RewardedJob):
    """One evaluation; the step loop treats it as a job without steps, which evaluates after the last one."""

    purpose: ClassVar[str] = "trains nothing"
    steps: ClassVar[int] = 0
    algorithm: ClassVar[AlgorithmSpec] = AlgorithmSpec()
    optimizer: ClassVar[OptimizerSpec] = OptimizerSpec()
    adapter: ClassVar[None] = None

    kind: Literal["eval"] = "eval"
    data: EvalDataSpec
    elastic: EvalElasticSpec = EvalElasticSpec()
    eval: EvalSpec

    @model_validator(mode="after")
    def _starts_from_a_model(self) -> Self:
        if self.trainer.starts_from_checkpoint:
            raise ValueError(
                "trainer.resume: a job of kind eval begins with a model, not with another job's checkpoint: remove it, "
                "and name that job's model (model: .rlboost/runs/JOB/model)"
            )
        return self


GeneratingJob = RlJob | EvalJob
"""Jobs of the step loop, whose samples workers generate."""
JobSpec = Annotated[RlJob | SftJob | DpoJob | EvalJob, Field(discriminator="kind")]
"""A job of the trainer service; `parse` returns one."""
AnyJob = Annotated[RlJob | SftJob | DpoJob | EvalJob | ExternalJob | ServedJob, Field(discriminator="kind")]
"""A job; `parse_stored` returns one."""
_JobType = type[RlJob] | type[SftJob] | type[DpoJob] | type[EvalJob] | type[ExternalJob] | type[ServedJob]
_KINDS: Mapping[str, _JobType] = {
    "rl": RlJob,
    "sft": SftJob,
    "dpo": DpoJob,
    "eval": EvalJob,
    "external": ExternalJob,
}
"""Kinds of jobs that a file may describe."""
_STORED_KINDS = {**_KINDS, "served": ServedJob}


class InvalidJob(ConfigError):
    """A job file is invalid; each line names a field, or the fields to remove."""

    def __init__(self, problems: Sequence[str], inapplicable: Sequence[str] = (), because: str = "") -> None:
        """Take one line per invalid field, and the fields that do not apply with the reason."""
        advice = f"{because}: remove {', '.join(inapplicable)}"
        self.problems = [*([advice] if inapplicable else []), *problems]
        """One line each."""
        self.fields = [(name, advice) for name in inapplicable]
        self.fields += [(field, text) for field, _, text in (line.partition(": ") for line in problems)]
        """Each invalid field, with what to do."""
        super().__init__("; ".join(self.problems))


def parse(raw: object) -> JobSpec:
    """Return the job of the trainer service that a mapping describes.

    Raises:
        InvalidJob: names each invalid field, also functions that no trainer runs, and rows that nothing reads.

    """
    job = parse_any(raw)
    if isinstance(job, UntrainedJob):
        raise InvalidJob(["kind: external is for a trainer of your own, which creates the job: see rlboost.Fleet"])
    return job


def parse_any(raw: object) -> AnyJob:
    """Return the job of any kind that a mapping describes; raises as `parse` does."""
    job = _job(raw, is_stored=False)
    if isinstance(job, UntrainedJob):
        return job
    problems = _forbidden_functions(job)
    if isinstance(job, OfflineJob) and job.data.eval is not None and job.eval is None:
        problems.append("data.eval: not used without a section eval: add eval: {every: 10}, or remove it")
    if problems:
        raise InvalidJob(problems)
    return job


def _forbidden_functions(job: JobSpec) -> list[str]:
    named: list[tuple[str, str | None, functions.Kind]] = [
        ("reward.functions" if part.name else "reward.function", part.function, "reward function")
        for part in job.reward_parts
    ]
    if job.environment is not None:
        named.append(("environment.function", job.environment.function, "environment"))
    if job.agent is not None:
        named.append(("agent.function", job.agent.function, "agent"))
    if job.kind == "rl":
        named.append(("algorithm.loss", job.algorithm.loss, "loss function"))
    if (curriculum := job.data.curriculum) is not None:
        named.append(("data.curriculum.function", curriculum.function, "curriculum function"))
    problems = []
    for field, path, kind in named:
        try:
            check_name(path or "", kind)
        except ForbiddenFunction as error:
            problems.append(f"{field}: {path} is not allowed: {error}")
    return problems


def _job(raw: object, *, is_stored: bool) -> AnyJob:
    if not isinstance(raw, dict):
        raise ConfigError(NO_MAPPING)
    kind = raw.get("kind", "rl")
    kinds = _STORED_KINDS if is_stored else _KINDS
    if not isinstance(kind, str) or kind not in kinds:
        raise InvalidJob([f"kind: {one_of(kind, list(kinds))}"])
    spec = kinds[kind]
    applicable, inapplicable = _split_by_kind(spec, raw)
    if is_stored and kind == "rl" and isinstance(algorithm := applicable.get("algorithm"), dict):
        applicable["algorithm"] = with_former_defaults(algorithm)
    if is_stored and isinstance(elastic := applicable.get("elastic"), dict):
        applicable["elastic"] = {name: value for name, value in elastic.items() if name not in REMOVED_ELASTIC}
    rejected = [] if is_stored else inapplicable
    because = f"a job of kind {kind} {spec.purpose}"
    try:
        job = spec.model_validate(applicable)
    except ValidationError as error:
        raise InvalidJob(describe(error, spec, advice=other_trainers.advice), rejected, because) from error
    if rejected:
        raise InvalidJob([], rejected, because)
    return job


def _split_by_kind(spec: type[BaseJob], raw: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the keys that may apply to a kind of job, and the names of given keys that apply only to other kinds."""
    applicable, inapplicable = _without_other_keys(spec, _KINDS.values(), raw)
    for name in _SECTIONS_BY_KIND:
        if isinstance(applicable.get(name), dict):
            sections = [_section(kind, name) for kind in _KINDS.values() if name in kind.model_fields]
            applicable[name], more = _without_other_keys(_section(spec, name), sections, applicable[name])
            inapplicable += [f"{name}.{key}" for key in more]
    return applicable, inapplicable


def _without_other_keys(
    spec: type[Section], all_kinds: Iterable[type[Section]], raw: Mapping[str, Any]
) -> tuple[dict[str, Any], list[str]]:
    others = {name for one in all_kinds for name in one.model_fields}.difference(spec.model_fields)
    applicable = {name: value for name, value in raw.items() if name not in others}
    return applicable, [name for name, value in raw.items() if name in others and value is not None]


def _section(kind: type[BaseJob], name: str) -> type[Section]:
    section: Any = kind.model_fields[name].annotation
    (given,) = {*get_args(section)} - {NoneType} or {section}
    return cast("type[Section]", given)


def to_json(spec: AnyJob) -> str:
    """Return the resolved job as JSON; `parse(json.loads(...))` returns the same job."""
    return json.dumps(spec.model_dump(mode="json"))


def parse_stored(raw: object) -> AnyJob:
    """Return a stored job, ignoring keys that do not apply to it.

    It was validated when it was created, possibly by an earlier release that accepted more and stored every default. A
    setting that did not exist then gets the value that matches the earlier behavior.

    Raises:
        InvalidJob: names each invalid field.

    """
    return cast("AnyJob", raw) if isinstance(raw, BaseJob) else _job(raw, is_stored=True)


def served_jobs(job_id: str, spec: AnyJob) -> dict[str, ServedJob]:
    """Return the jobs that serve the models of a job, by id: they follow from its file alone."""
    models = spec.models if isinstance(spec, RlJob | EvalJob) else {}
    return {
        served_id(job_id, name): ServedJob(
            name=f"{spec.name}.{name}",
            model=model.model,
            job=job_id,
            elastic=ServedElasticSpec(share=model.share, max_dollars=model.max_dollars),
        )
        for name, model in models.items()
    }


StoredJob = Annotated[AnyJob, BeforeValidator(parse_stored)]
"""A job as a field of a stored record."""
