"""The demo's job: the Countdown example, as its own job file describes it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import examples
from shared import jobspec
from shared.errors import ConfigError

GOAL = 0.70
"""Held-out accuracy that the job reaches in its own number of steps; runs ended at 0.75 to 0.88."""

_EVALUATIONS = 2
"""A short run is evaluated so often on its way."""


def countdown(steps: int | None, seed: int) -> tuple[dict[str, Any], float | None]:
    """Return the job, and the accuracy to ask of it: None where it is too short for that.

    Args:
        steps: of training; as the job file says when None.
        seed: of the order of the prompts and of the samples.

    Raises:
        ConfigError: the example's files are not there.

    """
    root = Path(str(examples.__file__)).parents[1]
    file = root / "examples/countdown/job.yaml"
    if not file.exists():
        raise ConfigError(f"{file} is missing: the demo runs from a checkout, installed with 'pip install -e'")
    raw = jobspec.load(str(file))
    full: int = raw["steps"]
    raw["model"] = str(root / raw["model"])
    for part in ("train", "eval"):
        raw["data"][part] = str(root / raw["data"][part])
    raw["steps"] = steps or full
    # A short run is the beginning of the full one, its learning rate included.
    raw["optimizer"]["decay"] *= min(1.0, raw["steps"] / full)
    raw["eval"]["every"] = max(1, min(raw["eval"]["every"], raw["steps"] // _EVALUATIONS))
    raw["trainer"]["seed"] = seed
    job: dict[str, Any] = json.loads(jobspec.to_json(jobspec.parse(raw)))
    return job, GOAL if raw["steps"] >= full else None
