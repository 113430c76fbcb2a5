"""A job file made ready to be sent: overrides applied, validated, local paths absolute."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from shared import jobspec
from shared.errors import ConfigError
from shared.shards import is_here


def resolved(file: str, raw: dict[str, Any]) -> dict[str, Any]:
    """Return the whole job that was read from a file, as `complete` does.

    Raises:
        ConfigError: naming the file and each wrong field.

    """
    try:
        return complete(raw)
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from error


def complete(raw: dict[str, Any]) -> dict[str, Any]:
    """Return the whole job that a mapping describes, every default filled in.

    Paths of the model and the data are relative to the current folder. The trainer may run in another one, so those
    that exist are made absolute; others are left, as they may be a Hugging Face id or a path on the trainer's machine.

    Raises:
        ConfigError: naming each wrong field.

    """
    spec = jobspec.parse(raw)
    job: dict[str, Any] = json.loads(jobspec.to_json(spec))
    job["model"] = _absolute(job["model"])
    for key in ("train", "eval"):
        if (given := job["data"].get(key)) is not None:
            job["data"][key] = _absolute(given) if isinstance(given, str) else [_absolute(one) for one in given]
    return job


def as_yaml(job: dict[str, Any]) -> str:
    """Return a job as a YAML job file."""
    return yaml.safe_dump(job, sort_keys=False, default_flow_style=None, width=120)


def _absolute(path: str) -> str:
    return str(Path(path).expanduser().absolute()) if is_here(path) else path
