"""A directory that one process uses at a time."""

from __future__ import annotations

import fcntl
from io import FileIO
from pathlib import Path

from shared.errors import ConfigError


def hold(directory: Path) -> FileIO:
    """Take a directory, made where it is missing, until the returned file is closed or the process ends.

    Raises:
        ConfigError: it cannot be used, or another process uses it.

    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        lock = FileIO(directory / "lock", "w")
    except OSError as error:
        raise ConfigError(f"directory {directory}: {error.strerror}; name one that can be written") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        lock.close()
        raise ConfigError(f"directory {directory} is in use by another process: name one for each") from error
    return lock
