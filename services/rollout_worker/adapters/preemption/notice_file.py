"""Preemption notices by a local file, for schedulers that can write a file and nothing else."""

from __future__ import annotations

import stat
from pathlib import Path

from rlboost.services.rollout_worker.domain.preemption import Notice, RebalanceRecommendation, file_notice
from rlboost.shared.errors import Retryable

_MAX_CHARS = 64
"""Characters: enough for a number."""


class NoticeFile:
    """`NoticeSource` of a local file. Checking it takes microseconds, so it happens in the event loop."""

    name = "file"

    def __init__(self, path: Path) -> None:
        self._path = path

    async def is_available(self) -> bool:
        """Return True: the file is polled wherever it is configured."""
        return True

    async def poll(self) -> Notice | RebalanceRecommendation | None:
        """See `NoticeSource`."""
        try:
            content = _read(self._path)
        except OSError as error:
            raise Retryable(f"cannot check {self._path}: {error.strerror}") from error
        return None if content is None else file_notice(str(self._path), content)

    async def acknowledge(self, notice: Notice) -> None:
        """Do nothing: a file needs no acknowledgment."""


def _read(path: Path) -> str | None:
    """Return the start of the file, empty if it cannot be read; None if it does not exist."""
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return None
    if not stat.S_ISREG(mode):
        return ""
    try:
        with path.open(errors="replace") as file:
            return file.read(_MAX_CHARS)
    except OSError:
        return ""
