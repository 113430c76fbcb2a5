"""An exclusive lock on a directory."""

from __future__ import annotations

import fcntl
from io import FileIO
from pathlib import Path

from rlboost.shared.errors import ConfigError


class DirectoryInUse(ConfigError):
    """Another process holds the lock."""


def lock_directory(directory: Path) -> FileIO:
    """Create a directory if needed and lock it until the returned file is closed or the process ends.

    Raises:
        ConfigError: it is not writable.
        DirectoryInUse: another process holds the lock.

    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        lock = FileIO(directory / "lock", "w")
    except OSError as error:
        raise ConfigError(f"directory {directory}: {error.strerror}; set a directory that is writable") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        lock.close()
        raise DirectoryInUse(
            f"directory {directory} is in use by another process: give each process its own directory"
        ) from error
    return lock
