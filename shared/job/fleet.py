"""The sections of a job file about what workers do: sampling, evaluations, and the fleet itself."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, field_validator

from rlboost.shared.messages import InFlight
from rlboost.shared.validation import Section, off_is_no_boolean

REMOVED_ELASTIC = frozenset({"link"})
"""Keys of `elastic` that a stored job may have and that no longer have an effect."""
MAX_STALENESS = 16
"""Beyond it a sample's tokens say little about the policy that is trained."""


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


class VersionsSpec(Section):
    """How versions of the weights are published."""

    weights: Literal["full", "delta", "lora"] = "full"
    """Whole chunks only, or deltas to the last version beside them, or an adapter alone.

    `delta` makes pulls small where workers are far, and costs the trainer host memory for one copy of the model. With
    `lora` the model stays as it is and an adapter is trained (section `lora`); workers fetch the model once.
    """


class _FleetSpec(Section):
    """How workers are shared out."""

    seeding: Annotated[float, Field(ge=0, allow_inf_nan=False)] | Literal["auto", "off"] = "auto"
    """How long the reserved engines generate at the start of a step while preemptible workers are there.

    Seconds; or `auto`: the manager learns it for each fleet size; or `off`: not at all.
    """
    share: float = Field(1.0, gt=0, allow_inf_nan=False)
    """The job's part of the preemptible workers, relative to the other jobs' shares."""

    @field_validator("seeding", mode="before")
    @classmethod
    def _off_is_no_boolean(cls, value: object) -> object:
        return off_is_no_boolean(value)


class RlElasticSpec(VersionsSpec, _FleetSpec):
    """How the job uses workers that come and go."""

    max_staleness: int = Field(0, ge=0, le=MAX_STALENESS)
    """How many weight versions may lie between making a token and training on it; 0 is strictly on-policy."""
    in_flight: InFlight = "recompute"
    """With `max_staleness` above 0, what becomes of samples that run when a worker gets new weights.

    `recompute`: they go on under these, with their KV cache made anew. `keep`: they go on with the cache that they
    have, so their tokens attend to what older weights made. `finish`: they end under the old weights first.
    """


class SftElasticSpec(VersionsSpec):
    """How the result is published. Workers only serve it: they are shared out as by default."""

    seeding: ClassVar[Literal["auto"]] = "auto"
    share: ClassVar[float] = 1.0
    in_flight: ClassVar[InFlight] = "recompute"


class EvalElasticSpec(_FleetSpec):
    """How the evaluation uses workers. There is one version, and it is whole."""

    weights: ClassVar[Literal["full"]] = "full"
    max_staleness: ClassVar[int] = 0
    in_flight: ClassVar[InFlight] = "recompute"


class EvalSpec(Section):
    """Evaluation on held-out prompts, generated beside the training samples of the same step."""

    every: int = Field(10, ge=1)
    samples: int = Field(256, ge=1)
    """How many completions in all, spread evenly over the evaluation prompts."""
    pass_reward: float = Field(1.0, allow_inf_nan=False)
    """The least reward of a completion that passes, for `eval/pass@k`."""
