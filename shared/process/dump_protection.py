"""Hides the secrets of this process from other processes of its user."""

from __future__ import annotations

import ctypes
import sys

_PR_SET_DUMPABLE = 4


def protect_process_memory() -> None:
    """Make this process's environment and memory readable by root only, and dump no core; Linux only.

    Programs that it executes are readable again.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
