"""The keys that all jobs have, those of all that the trainer service runs, and the jobs that it does not run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal, NamedTuple, Self

from pydantic import Field, model_validator

from rlboost.shared.data.rows import AGENT_ROWS, names_of
from rlboost.shared.ids import MAX_STEPS
from rlboost.shared.job.algorithm import TeacherSpec
from rlboost.shared.job.data import DataSpec, Rows
from rlboost.shared.job.fleet import (
    ExternalElasticSpec,
    HeldOutSet,
    ModelSpec,
    SamplingSpec,
    ServedElasticSpec,
    held_out_sets,
)
from rlboost.shared.job.reward import AgentSpec
from rlboost.shared.job.training import TrainerSpec
from rlboost.shared.process.modules import is_installed, pip_install
from rlboost.shared.validation import Section

# --- The section about logging metrics to other tools -----------------------------------------------------------------


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


class MlflowSpec(Section):
    """A run of MLflow. MLFLOW_TRACKING_URI and credentials are read from the trainer's environment."""

    experiment: str = Field(min_length=1)
    """Experiment of the run; it is created if it does not exist."""
    tags: dict[str, str] = Field(default_factory=dict)
    """Tags of the run."""


class SwanlabSpec(Section):
    """A run of SwanLab. SWANLAB_API_KEY and SWANLAB_MODE are read from the trainer's environment."""

    project: str = Field(min_length=1)
    """Project of the run."""
    workspace: str | None = None
    """Owner of the project; by default the owner of the API key."""
    group: str | None = None
    """Group of the run."""
    tags: tuple[str, ...] = ()
    """Tags of the run."""


class LogSpec(Section):
    """Where the run's metrics are logged, in addition to `metrics.jsonl`."""

    wandb: WandbSpec | None = None
    """Log to Weights & Biases."""
    mlflow: MlflowSpec | None = None
    """Log to MLflow."""
    swanlab: SwanlabSpec | None = None
    """Log to SwanLab."""
    tensorboard: bool = False
    """Write event files to the run's folder `tensorboard/`."""
    samples: int = Field(0, ge=0, le=64)
    """Samples of each step, of different prompts, that Weights & Biases, MLflow and SwanLab get as a table."""

    @property
    def trackers(self) -> dict[str, Section]:
        """Return the sections of enabled trackers, which run in a process of their own, by name."""
        return {name: section for name in TRACKERS if (section := getattr(self, name)) is not None}

    @model_validator(mode="after")
    def _shows_samples(self) -> Self:
        if self.samples and not self.trackers:
            raise ValueError("log.samples: only wandb, mlflow and swanlab show samples: enable one, or remove it")
        return self


class Tracker(NamedTuple):
    """What a tracker needs on the trainer's machine."""

    extra: str
    """The extra of this package that installs its library."""
    environment: tuple[str, ...]
    """Variables that say where it logs, and as whom. Their values may be secrets."""


TRACKERS = {
    "wandb": Tracker("logs", ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL")),
    "mlflow": Tracker(
        "mlflow",
        ("MLFLOW_TRACKING_URI", "MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN"),
    ),
    "swanlab": Tracker("swanlab", ("SWANLAB_API_KEY", "SWANLAB_MODE")),
}
"""The trackers by name, which is also that of their library."""


def missing_log_libraries(spec: LogSpec) -> list[str]:
    """Return one line per enabled library that is not installed; imports nothing."""
    extras = {name: TRACKERS[name].extra for name in spec.trackers} | (
        {"tensorboard": "logs"} if spec.tensorboard else {}
    )
    return [
        f"log.{name} needs {name}: install it with: {pip_install(extra)}"
        for name, extra in extras.items()
        if not is_installed(name)
    ]


# --- Jobs -------------------------------------------------------------------------------------------------------------


Kind = Literal["rl", "sft", "dpo", "reward", "eval", "external", "served"]


class BaseJob(Section):
    """The keys that all jobs have."""

    purpose: ClassVar[str]
    """What such a job does, for the error about a key that does not apply."""

    kind: Kind
    """`rl`: reinforcement learning. `sft`: supervised fine-tuning on completions that the data has. `dpo`: preference
    optimization on pairs of completions that the data has. `reward`: a reward model from such pairs, or from labels.
    `eval`: one evaluation of the model, which stays as it is. `external`: a trainer of your own publishes weights and
    requests samples."""
    name: str = Field("job", min_length=1, max_length=64, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Name of the job; its id is the name and a random suffix."""
    model: str = Field(min_length=1)
    """Folder or Hugging Face id of the model that the job starts from."""


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

    @property
    def teacher_model(self) -> str:
        """Return the folder or id of the job's teacher; empty if it has none."""
        return ""

    @property
    def held_teacher(self) -> str:
        """Return the folder or id of a teacher that the trainer's devices hold; empty if workers serve it."""
        return ""

    @property
    def served_teacher(self) -> str:
        """Return the name of a teacher that workers serve; empty if workers serve none."""
        return ""

    @property
    def held_out(self) -> tuple[HeldOutSet, ...]:
        """Return the sets that the job is evaluated on."""
        return held_out_sets(self.data, getattr(self, "eval", None), getattr(self, "sampling", SamplingSpec()))

    @property
    def rows(self) -> tuple[Rows, ...]:
        """Return all sources of rows."""
        return (*self.data.rows, *(one.rows for one in self.held_out if one.name))

    @model_validator(mode="after")
    def _has_the_agent_of_its_rows(self) -> Self:
        for rows in self.rows:
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


def served_jobs(job_id: str, spec: BaseJob) -> dict[str, ServedJob]:
    """Return the jobs that serve the models of a job, by id: they follow from its file alone."""
    models: Mapping[str, ModelSpec] = getattr(spec, "models", {})
    return {
        served_id(job_id, name): ServedJob(
            name=f"{spec.name}.{name}",
            model=model.model,
            job=job_id,
            elastic=ServedElasticSpec(share=model.share, max_dollars=model.max_dollars),
        )
        for name, model in models.items()
    }
