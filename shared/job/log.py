"""The section of a job file about logging metrics to Weights & Biases and TensorBoard."""

from __future__ import annotations

from pydantic import Field

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
