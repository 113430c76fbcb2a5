"""Full disks, told apart from other errors of writing files."""

from __future__ import annotations

import errno

from rlboost.shared.errors import DiskFull, Fatal

_ERRNOS = frozenset({errno.ENOSPC, errno.EDQUOT})
_IN_TEXT = tuple(f"os error {number}" for number in _ERRNOS)
"""How errors of safetensors, which have no number, name the operating system's error."""


def is_full(error: BaseException) -> bool:
    """Return True if the error says that a disk, or a user's share of it, has no space left."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno in _ERRNOS
    return any(text in str(error) for text in _IN_TEXT)


def write_error(cause: BaseException, text: str) -> DiskFull | Fatal:
    """Return the error for a write that failed: whether the caller may wait for space, or must give up."""
    return (DiskFull if is_full(cause) else Fatal)(text)
