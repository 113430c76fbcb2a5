"""Scratch directories for tensors in transit, removed even if their process is killed."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import weakref
from collections.abc import Callable
from pathlib import Path

_PREFIX = "tensors-"


def flock_directory(directory: Path) -> int:
    """Lock a directory until the returned descriptor is closed or the process ends.

    Raises:
        BlockingIOError: another process has locked it.
        FileNotFoundError: it does not exist any more.

    """
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        directory.stat()
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


class ScratchDir(tempfile.TemporaryDirectory[str]):
    """A temporary directory, locked while its process lives so that `remove_stale` of other processes spares it."""

    def __init__(self, folder: Path | None, lock: Callable[[Path], int] = flock_directory) -> None:
        """Create it.

        Args:
            folder: the parent directory, created if missing; the system's temporary directory if None.
            lock: locks the directory; see `flock_directory`.

        """
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
        self._unlock: Callable[[], object] = lambda: None
        while True:
            super().__init__(prefix=_PREFIX, dir=folder)
            try:
                self._unlock = weakref.finalize(self, os.close, lock(Path(self.name)))
            except (BlockingIOError, FileNotFoundError):
                super().cleanup()  # `remove_stale` of another process took it before it was locked
            except OSError:
                return  # this file system has no locks, so `remove_stale` removes nothing either
            else:
                return

    def __enter__(self) -> Path:  # type: ignore[override]
        return Path(super().__enter__())

    def cleanup(self) -> None:
        """Remove the directory."""
        super().cleanup()
        self._unlock()


def remove_stale(folder: Path) -> None:
    """Remove the scratch directories in `folder` whose processes are dead."""
    for directory in folder.glob(f"{_PREFIX}*"):
        try:
            descriptor = flock_directory(directory)
        except OSError:
            continue
        try:
            with contextlib.suppress(FileNotFoundError):  # its owner removes it at the same time
                shutil.rmtree(directory)
        finally:
            os.close(descriptor)
