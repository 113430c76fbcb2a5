"""Decide whether a job's model is a folder or a Hugging Face id, and suggest folders for a mistyped path."""

from __future__ import annotations

import difflib
import re
from pathlib import Path

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
