"""Resolve a job file for submission: defaults filled in, validated, local paths absolute."""

from __future__ import annotations

import difflib
import json
import re
from pathlib import Path
from typing import Any

import yaml

from rlboost.shared.data.shards import exists_locally
from rlboost.shared.errors import ConfigError
from rlboost.shared.job import spec as job_spec

# --- Decide whether a job's model is a folder or a Hugging Face id, and suggest folders for a mistyped path -----------


_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_SUGGESTED = 3
_SIMILAR = 0.5


def is_hub_id(model: str) -> bool:
    """Return True if a model that is no folder here may be a Hugging Face id.

    It is a path if it is absolute, starts with `.` or `~`, has more or fewer parts than `owner/name`, or is in a folder
    that exists.
    """
    return _HUB_ID.fullmatch(model) is not None and model[0] not in ".~" and not Path(model).parent.exists()


def nearest(model: str) -> str:
    """Return a clause that names the folders most like a missing one, or what its nearest existing parent contains."""
    missing = Path(model).expanduser()
    parent = next(folder for folder in missing.parents if folder.exists())
    name = missing.relative_to(parent).parts[0]
    try:
        folders = sorted(entry.name for entry in parent.iterdir() if entry.is_dir() and entry.name[0] != ".")
    except OSError:  # no folder, or not ours to read
        return ""
    similar = difflib.get_close_matches(name, folders, _SUGGESTED, _SIMILAR)
    if similar:
        return f"did you mean {' or '.join(str(parent / found) for found in similar)}?"
    more = ", ..." if len(folders) > _SUGGESTED else ""
    return f"{parent}/ has {', '.join(folders[:_SUGGESTED])}{more}" if folders else f"{parent}/ has no folder"


# --- The job file -----------------------------------------------------------------------------------------------------


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
    job["model"] = _absolute(job["model"])
    for key in ("train", "eval"):
        if (given := job["data"].get(key)) is not None:
            job["data"][key] = _absolute(given) if isinstance(given, str) else [_absolute(one) for one in given]
    return job


def as_yaml(job: dict[str, Any]) -> str:
    """Format a job as a YAML job file."""
    return yaml.safe_dump(job, sort_keys=False, default_flow_style=None, width=120)


def _absolute(path: str) -> str:
    return str(Path(path).expanduser().absolute()) if exists_locally(path) else path
