"""Decide whether a job's model is a folder or a Hugging Face id, and suggest folders for a mistyped path."""

from __future__ import annotations

import difflib
import re
from pathlib import Path
from typing import Any

from rlboost.shared.errors import ConfigError
from rlboost.shared.model.folder import read_config
from rlboost.shared.process.modules import pip_install

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_SUGGESTED = 3
_SIMILAR = 0.5


def is_hub_id(model: str) -> bool:
    """Return True if a model that is no folder here may be a Hugging Face id.

    It is a path if it is absolute, starts with `.` or `~`, has more or fewer parts than `owner/name`, or is in a folder
    that exists.
    """
    return _HUB_ID.fullmatch(model) is not None and model[0] not in ".~" and not Path(model).parent.exists()


def config_of(model: str) -> dict[str, Any]:
    """Return the `config.json` of a folder, or of a Hugging Face id, whose other files are not downloaded.

    Raises:
        ConfigError: it is neither, or cannot be downloaded.

    """
    folder = Path(model).expanduser()
    if folder.is_dir():
        return read_config(folder)
    if not is_hub_id(model):
        found = nearest(model)
        raise ConfigError(f"there is no folder {model}, and it is no Hugging Face id{f': {found}' if found else ''}")
    try:
        from huggingface_hub import hf_hub_download  # noqa: PLC0415 - an extra, and quick without
        from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError  # noqa: PLC0415 - likewise
    except ImportError as error:
        raise ConfigError(f"{model}: downloading needs huggingface_hub: {pip_install('worker')}") from error
    try:
        return read_config(Path(hf_hub_download(model, "config.json")).parent)
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).partition("\n")[0]
        raise ConfigError(
            f"{model}: its config.json cannot be downloaded ({reason}): correct the id, set HF_TOKEN for a private "
            "one, or name a folder"
        ) from error


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
