"""The section of a job file about logging metrics to other tools."""

from __future__ import annotations

from typing import NamedTuple, Self

from pydantic import Field, model_validator

from rlboost.shared.process.modules import is_installed, pip_install
from rlboost.shared.validation import Section


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
    """Experiment of the run; it is created if there is none of this name."""
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
