"""The section of a job file about where its metrics are shown, beside the run's folder."""

from __future__ import annotations

from importlib.util import find_spec

from pydantic import Field

from shared.validation import Section


class WandbSpec(Section):
    """A run of Weights & Biases. Its key and mode are in the trainer's environment: WANDB_API_KEY, WANDB_MODE."""

    project: str = Field(min_length=1)
    entity: str | None = None
    """Whose project; None: the key's own."""
    group: str | None = None
    tags: tuple[str, ...] = ()


class LogSpec(Section):
    """Where rows of the run log go, beside `metrics.jsonl`."""

    wandb: WandbSpec | None = None
    tensorboard: bool = False
    """Event files in the run's folder `tensorboard/`."""


def lacking(spec: LogSpec) -> list[str]:
    """Return what is asked for and not installed here, one line a library; nothing is imported."""
    asked = {"wandb": spec.wandb is not None, "tensorboard": spec.tensorboard}
    return [
        f"log.{name} needs {name}: install it with: pip install 'rlboost[logs]'"
        for name, wanted in asked.items()
        if wanted and find_spec(name) is None
    ]
