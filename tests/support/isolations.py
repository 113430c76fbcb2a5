"""Skips tests of an isolation that this machine does not have."""

from __future__ import annotations

import os
import shutil
from functools import lru_cache

import pytest

from rlboost.rewards.sandbox import Isolation, run_with

NO_BUBBLEWRAP = "bubblewrap is not installed"
"""A reason for a skipped test that `.ci/no_skips.py` accepts."""


def require(isolation: Isolation) -> None:
    """Skip the test if the isolation does not work here; fail in CI unless bubblewrap is not installed."""
    if isolation is Isolation.BUBBLEWRAP and shutil.which("bwrap") is None:
        pytest.skip(NO_BUBBLEWRAP)
    if problem := _problem(isolation):
        (pytest.fail if "CI" in os.environ else pytest.skip)(f"{isolation}: {problem}")


@lru_cache(maxsize=3)
def _problem(isolation: Isolation) -> str:
    ran = run_with(isolation, "")
    return "" if ran.completed else ran.errors or f"exit code {ran.code}"
