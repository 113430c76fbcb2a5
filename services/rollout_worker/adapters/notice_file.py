"""A file whose appearance says that this machine will be taken away: for whatever can write one and nothing else."""

from __future__ import annotations

import stat
from pathlib import Path

from services.rollout_worker.domain.notices import Advice, Notice, file_notice
from shared.errors import Retryable

_READ = 64
"""Characters: enough for a number."""


class NoticeFile:
    """A file on a local disk: one look takes microseconds, so it is done in the event loop."""

    name = "file"

    def __init__(self, path: Path) -> None:
        self._path = path

    async def found(self) -> bool:
        """See `NoticeSource`: it is looked for wherever somebody has named it."""
        return True

    async def ask(self) -> Notice | Advice | None:
        """See `NoticeSource`."""
        try:
            content = _look(self._path)
        except OSError as error:
            raise Retryable(f"cannot look for {self._path}: {error.strerror}") from error
        return None if content is None else file_notice(str(self._path), content)

    async def acknowledge(self, notice: Notice) -> None:
        """See `NoticeSource`: nobody waits for it."""


def _look(path: Path) -> str | None:
    """Return the beginning of the file, empty where it cannot be read; None while it is not there."""
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return None
    if not stat.S_ISREG(mode):
        return ""
    try:
        with path.open(errors="replace") as file:
            return file.read(_READ)
    except OSError:
        return ""
