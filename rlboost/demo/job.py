"""The demo's job: the Countdown example with its own job file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rlboost.examples import countdown as countdown_example
from rlboost.shared.errors import ConfigError
from rlboost.shared.job import spec as job_spec
from rlboost.shared.job.file import load

GOAL = 0.70
"""Held-out accuracy that the full job reaches; runs ended at 0.75 to 0.88."""

_EVALUATIONS = 2
"""Number of evaluations during a short run."""


def countdown(steps: int | None, seed: int) -> tuple[dict[str, Any], float | None]:
    """Return the job and its target accuracy, None if it is too short for one.

    Args:
        steps: training steps; None for the job file's number.
        seed: determines the order of the prompts, and the samples.

    Raises:
        ConfigError: the example's files are missing.

    """
    folder = Path(str(countdown_example.__file__)).parent
    file = folder / "job.yaml"
    if not file.exists():
        raise ConfigError(f"{file} is missing: install rlboost again")
    raw = load(str(file))
    full: int = raw["steps"]
    # The job file names paths in a checkout; installed, the example is elsewhere.
    raw["model"] = str(folder / Path(raw["model"]).name)
    for part in ("train", "eval"):
        raw["data"][part] = str(folder / Path(raw["data"][part]).name)
    raw["steps"] = steps or full
    # A short run is a prefix of the full run, including its learning-rate schedule.
    raw["optimizer"]["decay"] *= min(1.0, raw["steps"] / full)
    raw["eval"]["every"] = max(1, min(raw["eval"]["every"], raw["steps"] // _EVALUATIONS))
    raw["trainer"]["seed"] = seed
    job: dict[str, Any] = json.loads(job_spec.to_json(job_spec.parse(raw)))
    return job, GOAL if raw["steps"] >= full else None
