"""Folders in which tensors lie on their way to somewhere else, gone in the end, though their process be killed."""

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


class Aside(tempfile.TemporaryDirectory[str]):
    """A folder that is locked while its process lives, so that no other process's `clear` removes it."""

    def __init__(self, folder: Path | None) -> None:
        """Make one in `folder`, in the machine's place for such files where it is None."""
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
        self._unlock: Callable[[], object] = lambda: None
        while True:
            super().__init__(prefix=_PREFIX, dir=folder)
            try:
                self._unlock = weakref.finalize(self, os.close, _lock(Path(self.name)))
            except (BlockingIOError, FileNotFoundError):
                super().cleanup()  # another process has found it before it was locked
            except OSError:
                return  # no locks on this file system: nobody removes anything there, either
            else:
                return

    def __enter__(self) -> Path:  # type: ignore[override]
        return Path(super().__enter__())

    def cleanup(self) -> None:
        """Remove it."""
        super().cleanup()
        self._unlock()


def clear(folder: Path) -> None:
    """Remove what processes have left in `folder` that were killed; what belongs to one that lives stays."""
    for left in folder.glob(f"{_PREFIX}*"):
        try:
            lock = _lock(left)
        except OSError:
            continue
        try:
            with contextlib.suppress(FileNotFoundError):  # its owner has found it locked, and removes it too
                shutil.rmtree(left)
        finally:
            os.close(lock)


def _lock(folder: Path) -> int:
    """Lock a folder until the returned descriptor is closed or the process ends.

    Raises:
        BlockingIOError: somebody else has locked it.
        FileNotFoundError: it is gone.

    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        folder.stat()
    except OSError:
        os.close(descriptor)
        raise
    return descriptor
