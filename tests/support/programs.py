"""Programs that only root can install, such as those of Debian's packages."""

from __future__ import annotations

import shutil
import subprocess

import pytest


def require_program(name: str) -> str:
    """Return the path of a program; without it skip the test, for a reason that `.ci/no_skips.py` accepts."""
    path = shutil.which(name)
    if path is None:
        pytest.skip(f"{name} is not installed")
    return path


def output_of(*command: str) -> tuple[int, str]:
    """Run a program; return its exit code and all that it writes."""
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    return done.returncode, done.stdout
