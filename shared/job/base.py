"""The keys that all jobs have, and the jobs that no trainer of the service runs."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from rlboost.shared.ids import MAX_STEPS
from rlboost.shared.job.fleet import ExternalElasticSpec, SamplingSpec, ServedElasticSpec
from rlboost.shared.job.training import TrainerSpec
from rlboost.shared.validation import Section

Kind = Literal["rl", "sft", "dpo", "eval", "external", "served"]


class BaseJob(Section):
    """The keys that all jobs have."""

    purpose: ClassVar[str]
    """What such a job does, for the error about a key that does not apply."""

    kind: Kind
    """`rl`: reinforcement learning. `sft`: supervised fine-tuning on completions that the data has. `dpo`: preference
    optimization on pairs of completions that the data has. `eval`: one evaluation of the model, which stays as it is.
    `external`: a trainer of your own publishes weights and requests samples."""
    name: str = Field("job", min_length=1, max_length=64, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Name of the job; its id is the name and a random suffix."""
    model: str = Field(min_length=1)
    """Folder or Hugging Face id of the model that the job starts from."""


class UntrainedJob(BaseJob):
    """A job that the trainer service does not run: only what workers do for it belongs to this system."""

    steps: ClassVar[int] = MAX_STEPS
    """The most that a trainer of its own may report."""
    environment: ClassVar[None] = None
    agent: ClassVar[None] = None
    trainer: ClassVar[TrainerSpec] = TrainerSpec()
    sampling: ClassVar[SamplingSpec] = SamplingSpec()
    """How the model is sampled where a request does not say."""


class ExternalJob(UntrainedJob):
    """A job of a trainer outside of this system, which publishes weights and requests samples over HTTP."""

    purpose: ClassVar[str] = "is trained by a trainer of your own, over HTTP"

    kind: Literal["external"] = "external"
    elastic: ExternalElasticSpec = ExternalElasticSpec()
    """How the job uses workers."""
    pause_after_s: float = Field(300.0, ge=10, le=86_400)
    """Seconds without a trainer after which the job is paused, so that it holds no workers."""


class ServedJob(UntrainedJob):
    """A model that a job names under `models`. It is served while that job runs, whose trainer publishes it."""

    purpose: ClassVar[str] = "serves a model"

    kind: Literal["served"] = "served"
    """No file has it: the manager derives these jobs."""
    name: str = Field(max_length=97)
    """Names of the job and of the model, joined by a dot."""
    job: str
    """Id of that job."""
    elastic: ServedElasticSpec = ServedElasticSpec()


def served_id(job_id: str, model: str) -> str:
    """Return the id of the job that serves a model of a job."""
    return f"{job_id}.{model}"
