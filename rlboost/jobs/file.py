"""Resolve a job file for submission: defaults filled in, validated, local paths absolute."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from rlboost.shared.data.rows import exists_locally
from rlboost.shared.errors import ConfigError
from rlboost.shared.job import spec as job_spec


def resolved(file: str, raw: dict[str, Any]) -> dict[str, Any]:
    """Return the resolved job of a file; see `complete`.

    Raises:
        ConfigError: names the file and each invalid field.

    """
    try:
        return complete(raw)
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from error


def complete(raw: dict[str, Any]) -> dict[str, Any]:
    """Return the resolved job of a mapping, every default filled in.

    Model and data paths are relative to the current folder. The trainer may run in another folder, so existing paths
    become absolute; others stay, as they may be a Hugging Face id or a path on the trainer's machine.

    Raises:
        ConfigError: names each invalid field.

    """
    spec = job_spec.parse(raw)
    job: dict[str, Any] = json.loads(job_spec.to_json(spec))
    if spec.adapter is not None:  # it names the model as the job file does
        job["lora"] = spec.adapter.model_dump(mode="json")
    teacher = job["algorithm"]["teacher"] if spec.held_teacher else None
    reward = job.get("reward") or {}
    named = [job, teacher, *(job.get("models") or {}).values(), reward, *(reward.get("functions") or ())]
    for section in named:
        if section and section.get("model"):
            section["model"] = _absolute(section["model"])
    sets = (job.get("eval") or {}).get("sets", {}).values()
    for section, key in ((job["data"], "train"), (job["data"], "eval"), *((one, "data") for one in sets)):
        if (given := section.get(key)) is not None:
            section[key] = _absolute(given) if isinstance(given, str) else [_absolute(one) for one in given]
    return job


def as_yaml(job: dict[str, Any]) -> str:
    """Format a job as a YAML job file."""
    return yaml.safe_dump(job, sort_keys=False, default_flow_style=None, width=120)


def _absolute(path: str) -> str:
    return str(Path(path).expanduser().absolute()) if exists_locally(path) else path
