"""Finds the files of a source of data: one, several in a list, those that match a pattern, or those in a folder."""

from __future__ import annotations

import re
from glob import glob, has_magic
from pathlib import Path
from typing import Annotated

from pydantic import BeforeValidator

from rlboost.shared.errors import ConfigError

AGENT_ROWS = "agent:rows"
"""Names the rows that the job's agent has itself."""
FILE_KINDS = (".jsonl", ".jsonl.gz", ".parquet")
_SPLIT = re.compile(
    r"(?:^|[\W_\d])(?:train|training|test|testing|eval|evaluation|valid|validation|val|dev)(?:[\W_\d]|$)", re.IGNORECASE
)
"""What Hugging Face datasets take for the name of a split in a file's name."""


def _checked(value: object) -> object:
    given = value if isinstance(value, list | tuple) else (value,)
    if not given or not all(isinstance(one, str) and one for one in given):
        raise ValueError("give the name of a file, a folder, a pattern or a dataset, or a list of such names")
    return value


Source = Annotated[str | tuple[str, ...], BeforeValidator(_checked)]
"""Where rows are: a name, or several whose rows follow each other."""


def names_of(source: Source) -> tuple[str, ...]:
    """Return a source's names as a tuple."""
    return (source,) if isinstance(source, str) else tuple(source)


def format_source(source: Source) -> str:
    """Return a source as text for a message."""
    return ", ".join(names_of(source))


def exists_locally(name: str) -> bool:
    """Return True if a file or folder of this name exists, or files match it as a pattern."""
    return Path(name).expanduser().exists() or bool(_matches(name))


def shards(name: str) -> list[str]:
    """Return the files of one name, sorted by name: `part-2` before `part-10`.

    A name that is neither a pattern nor a folder of shards is returned as it is. A folder is one of shards if it has
    only files of `FILE_KINDS`, ignoring names that begin with `.` or `_`, and no file is named after a split (train,
    test, ...).

    Raises:
        ConfigError: a pattern matches nothing, or a folder cannot be read.

    """
    path = Path(name).expanduser()
    if path.is_dir():
        return _in_folder(name, path) or [name]
    if path.exists() or not has_magic(name):
        return [name]
    if found := _matches(name):
        return found
    raise ConfigError(f"{name}: no file matches: correct the pattern, or name files that the trainer can read")


def _matches(name: str) -> list[str]:
    if not has_magic(name):
        return []
    found = glob(str(Path(name).expanduser()), recursive=True)  # noqa: PTH207 - Path.glob takes no absolute pattern
    return sorted((one for one in found if Path(one).is_file()), key=_order)


def _in_folder(name: str, folder: Path) -> list[str]:
    try:
        files = [file for file in folder.iterdir() if not file.name.startswith((".", "_"))]
    except OSError as error:
        raise ConfigError(f"{name}: {error.strerror or error}: name a folder that the trainer can read") from error
    if all(file.is_file() and file.name.endswith(FILE_KINDS) and not _SPLIT.search(file.name) for file in files):
        return sorted(map(str, files), key=_order)
    return []


def _order(name: str) -> tuple[list[str | int], str]:
    parts = re.split(r"(\d+)", name)
    return [int(part) if i % 2 else part for i, part in enumerate(parts)], name
