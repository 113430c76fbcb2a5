"""The sections of a job file about what workers do: sampling, evaluations, and the fleet itself."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self

from pydantic import AwareDatetime, BeforeValidator, Field, ValidationError, field_validator, model_validator

from rlboost.shared.data.rows import Source
from rlboost.shared.job.data import DataSpec, Rows
from rlboost.shared.job.training import LoraSpec, OptimizerSpec, TrainerSpec
from rlboost.shared.messages import InFlightPolicy
from rlboost.shared.validation import Section, describe, off_is_no_boolean

# --- Units of measurement ---------------------------------------------------------------------------------------------


HOUR_S = 3600.0
"""Seconds in one hour."""


# --- The section ------------------------------------------------------------------------------------------------------


REMOVED_ELASTIC = frozenset({"link"})
"""Keys of `elastic` that a stored job may have and that no longer have an effect."""
MAX_STALENESS = 16
"""Beyond it a sample's tokens say little about the policy that is trained."""
MIN_TEMPERATURE = 0.01
"""vLLM samples at this one in place of lower ones, and the trainer would score another."""


def _one_or_more(value: object) -> object:
    return (value,) if isinstance(value, str) else value


_StopString = Annotated[str, Field(min_length=1, max_length=1024)]
StopStrings = Annotated[tuple[_StopString, ...], Field(max_length=16), BeforeValidator(_one_or_more)]
"""Strings, or a single one, that end a completion."""


class SamplingSpec(Section):
    """How completions are sampled."""

    temperature: float = Field(1.0, ge=0, le=10)
    """Sampling temperature, from 0.01, the least of vLLM; 0 (greedy) only for jobs of kind `eval`."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Nucleus sampling; 1 keeps every token. Log-probabilities stay those of the whole distribution, which biases the
    gradient and restricts vllm workers."""
    top_k: int = Field(0, ge=0, lt=1 << 31)
    """Sample from this many of the most likely tokens; 0: from all. Log-probabilities as with `top_p`."""
    min_p: float = Field(0.0, ge=0, le=1)
    """Sample from the tokens that are at least this fraction as likely as the most likely one; 0: from all.
    Log-probabilities as with `top_p`."""
    max_tokens: int = Field(256, ge=1)
    """Maximum tokens of a completion."""
    min_tokens: int = Field(0, ge=0)
    """Sample no end token before this many tokens of a completion, or of each turn. Log-probabilities as with
    `top_p`."""

    stop: StopStrings = ()
    """Strings that end a completion or a turn, at most 16, or a single one. It ends with the token that completes one
    of them in its text, and rewards and environments get this text, stop string included."""

    @field_validator("temperature")
    @classmethod
    def _is_not_raised_by_engines(cls, value: float) -> float:
        if 0 < value < MIN_TEMPERATURE:
            raise ValueError(f"should be 0 (greedy), or {MIN_TEMPERATURE} or more, not {value}")
        return value

    @model_validator(mode="after")
    def _can_have_the_least_tokens(self) -> Self:
        if self.min_tokens > self.max_tokens:
            raise ValueError(
                f"sampling.min_tokens: {self.min_tokens} is more than max_tokens, {self.max_tokens}: lower it"
            )
        return self

    @property
    def advice(self) -> str:
        """Return what to know about reinforcement learning with samples that are not drawn from all tokens."""
        given = {
            "top_p below 1": self.top_p < 1,
            "top_k": self.top_k,
            "min_p": self.min_p,
            "min_tokens": self.min_tokens,
        }
        names = [f"sampling.{name}" for name, is_given in given.items() if is_given]
        if not names:
            return ""
        return (
            f"{' and '.join(names)} draw{'s' * (len(names) == 1)} training samples from some of the tokens, and their "
            "log-probabilities, ratios and KL are of the whole distribution: the gradient is not corrected for tokens "
            "that cannot be drawn, and vllm workers need an option and temperature 1 (docs/algorithms.md#top-p)"
        )

    @property
    def scored_temperature(self) -> float:
        """Return the temperature that log-probabilities are of: at 0 a draw is a certainty, so the model's own."""
        return self.temperature or 1.0


class VersionsSpec(Section):
    """How versions of the weights are published."""

    weights: Literal["full", "delta", "lora"] = "full"
    """How versions are published: whole; also as lossless deltas, which costs the trainer host memory for one copy of
    the model; or, with an adapter that is trained in place of the model (section `lora`), as that adapter."""


class _ShareSpec(Section):
    """How spot workers are shared out."""

    share: float = Field(1.0, gt=0)
    """Share of the spot workers, relative to those of other jobs."""
    max_dollars: float | None = Field(None, gt=0)
    """Budget: spot workers are drained before the job has cost this much. Reserved ones continue."""


class _FleetSpec(_ShareSpec):
    """How workers are used."""

    seeding: Annotated[float, Field(ge=0)] | Literal["auto", "off"] = "auto"
    """Seconds that the reserved workers generate at the start of a step while there are spot workers. `auto`:
    the manager learns it for each fleet size; `off`: not at all."""

    @field_validator("seeding", mode="before")
    @classmethod
    def _off_is_no_boolean(cls, value: object) -> object:
        return off_is_no_boolean(value)


class RlElasticSpec(VersionsSpec, _FleetSpec):
    """How the job uses workers that come and go."""

    max_staleness: int = Field(0, ge=0, le=MAX_STALENESS)
    """Maximum number of weight versions between generating a token and training on it; 0 is strictly on-policy."""
    in_flight: InFlightPolicy = "recompute"
    """With `max_staleness` above 0: what running samples do when their worker gets new weights. They continue with a
    recomputed KV cache, continue with the cache they have, or finish under the old weights first."""
    finish_by: AwareDatetime | None = None
    """Deadline with its time zone, such as `2026-12-01T18:00:00+01:00`: autoscaling starts the cheapest workers that
    finish the job in time, also those that cost more than they are worth. If none can, `rlboost status` says when the
    job will end."""


class OfflineElasticSpec(VersionsSpec):
    """How the result is published. Workers only serve it: they are shared out as by default."""

    seeding: ClassVar[Literal["auto"]] = "auto"
    share: ClassVar[float] = 1.0
    max_dollars: ClassVar[None] = None
    in_flight: ClassVar[InFlightPolicy] = "recompute"


class EvalElasticSpec(_FleetSpec):
    """How the evaluation uses workers. There is one version, and it is whole."""

    weights: ClassVar[Literal["full"]] = "full"
    max_staleness: ClassVar[int] = 0
    in_flight: ClassVar[InFlightPolicy] = "recompute"


class ExternalElasticSpec(_ShareSpec):
    """How the job uses workers. Its trainer's device is its own, and each request has its own staleness."""

    seeding: ClassVar[Literal["off"]] = "off"
    in_flight: InFlightPolicy = "recompute"
    """What running samples that may have more than one version do when their worker gets new weights. They continue
    with a recomputed KV cache, continue with the cache they have, or finish under the old weights first."""


class ModelSpec(_ShareSpec):
    """Another model of the job, which the same workers serve."""

    model: str = Field(min_length=1)
    """Folder or Hugging Face id of the model."""
    share: float = Field(0.5, gt=0)
    """Share of the spot workers while it has requests, relative to the job's `elastic.share`."""
    max_dollars: float | None = Field(None, gt=0)
    """Budget of this model, which `elastic.max_dollars` does not count: spot workers serve it no more before it has
    cost this much."""


class ServedElasticSpec(_ShareSpec):
    """How a served model uses workers. Its versions are whole, and it has no device of its own."""

    seeding: ClassVar[Literal["off"]] = "off"
    in_flight: ClassVar[InFlightPolicy] = "recompute"


class OfflineEvalSet(Section):
    """A further set of held-out rows, evaluated whenever the job is. Its metrics are named `eval/NAME/...`."""

    data: Source
    """Its rows, as in `data.eval`."""
    split: str | None = None
    """Split of a Hugging Face dataset; that of `data.eval_split` if not given."""
    subset: str | None = None
    """The configuration of a Hugging Face dataset that has several."""
    prompt_key: str | None = None
    """The column of the prompt; that of `data.prompt_key` if not given."""


class EvalSet(OfflineEvalSet):
    """A further set of held-out prompts."""

    samples: int | None = Field(None, ge=1)
    """Number of completions; `eval.samples` if not given."""
    pass_reward: float | None = None
    """Lowest reward of a completion that passes; `eval.pass_reward` if not given."""
    sampling: dict[str, Any] = Field(default_factory=dict)
    """What differs from the job's `sampling`, such as `{temperature: 0, max_tokens: 4096}`."""


_SET_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")


class OfflineEvalSpec(Section):
    """Evaluation on held-out rows."""

    every: int = Field(10, ge=1)
    """Steps between evaluations; the model is also evaluated before the first step and after the last one."""
    sets: Mapping[str, OfflineEvalSet] = Field(default_factory=dict)
    """Further sets of held-out rows by name, with `data.eval` or in place of it."""

    @field_validator("sets")
    @classmethod
    def _are_named(cls, value: Mapping[str, OfflineEvalSet]) -> Mapping[str, OfflineEvalSet]:
        for name in value:
            if not _SET_NAME.fullmatch(name):
                raise ValueError(
                    f"{name!r} is a part of metrics' names: use at most 64 ASCII letters, digits, '_' and '-', with a "
                    "letter or digit first"
                )
        return value

    def is_due(self, step: int, n_steps: int) -> bool:
        """Return True if the model is evaluated before this step, or after the last one of `n_steps`."""
        return step % self.every == 0 or step == n_steps


class EvalSpec(OfflineEvalSpec):
    """Evaluation on held-out prompts, generated alongside the training samples of the same step."""

    samples: int = Field(256, ge=1)
    """Number of completions, spread evenly over the evaluation prompts."""
    pass_reward: float = 1.0
    """Lowest reward of a completion that passes, for `eval/pass@k`."""
    sets: Mapping[str, EvalSet] = Field(default_factory=dict)


class HeldOutSet(NamedTuple):
    """A set of held-out rows, with all that it takes from the rest of the job file."""

    name: str
    """Empty for `data.eval`."""
    rows: Rows
    samples: int = 0
    """Number of completions; 0 in a job that generates none."""
    pass_reward: float = 1.0
    sampling: SamplingSpec = SamplingSpec()

    @property
    def prefix(self) -> str:
        """Return what the names of its metrics begin with."""
        return f"eval/{self.name}/" if self.name else "eval/"

    @property
    def section(self) -> str:
        """Return the section of the job file that has its keys."""
        return f"eval.sets.{self.name}" if self.name else "eval"


def held_out_sets(data: DataSpec, evaluation: OfflineEvalSpec | None, sampling: SamplingSpec) -> tuple[HeldOutSet, ...]:
    """Return the sets of a job, `data.eval` first; none if it has no section `eval`.

    Raises:
        ValueError: it is to be evaluated and has none, or a set's `sampling` is invalid; names each key.

    """
    if evaluation is None:
        return ()
    samples, pass_reward = 0, 1.0
    if isinstance(evaluation, EvalSpec):
        samples, pass_reward = evaluation.samples, evaluation.pass_reward
    found = [HeldOutSet("", rows, samples, pass_reward, sampling) for rows in data.rows if rows.field == "data.eval"]
    default_split = getattr(data, "eval_split", "test")
    for name, given in evaluation.sets.items():
        split, key = given.split or default_split, given.prompt_key or data.prompt_key
        one = HeldOutSet(name, Rows(f"eval.sets.{name}.data", given.data, split, given.subset, key, bool(given.split)))
        if isinstance(given, EvalSet):
            one = one._replace(
                samples=given.samples or samples,
                pass_reward=pass_reward if given.pass_reward is None else given.pass_reward,
                sampling=_merged(sampling, given.sampling, f"{one.section}.sampling"),
            )
        found.append(one)
    if not found:
        raise ValueError(
            "data.eval: missing, and eval is set: name the file of held-out rows, give eval.sets, or remove eval"
        )
    return tuple(found)


def _merged(sampling: SamplingSpec, changes: Mapping[str, Any], section: str) -> SamplingSpec:
    try:
        return SamplingSpec.model_validate({**sampling.model_dump(), **changes})
    except ValidationError as error:
        lines = (line.removeprefix("sampling.") for line in describe(error, SamplingSpec, "sampling"))
        raise ValueError("; ".join(f"{section}.{line}" for line in lines)) from error


class PolicySpec(Section):
    """Another policy that the job's agent calls, and that learns with the job's own.

    A section that it has replaces the whole section of the job.
    """

    model: str = Field(min_length=1)
    """Folder or Hugging Face id of the model that the policy starts from."""
    sampling: SamplingSpec | None = None
    """How its turns are sampled."""
    optimizer: OptimizerSpec | None = None
    """The optimizer of its model."""
    lora: LoraSpec | None = None
    """Its adapter, with `elastic.weights: lora`."""
    trainer: TrainerSpec | None = None
    """How its trainer runs."""
    elastic: RlElasticSpec | None = None
    """How it uses workers."""
