"""The tests of containers need a Docker engine."""

from __future__ import annotations

import shutil
import subprocess

import pytest


@pytest.fixture(scope="session", autouse=True)
def _engine() -> None:
    if (
        shutil.which("docker") is None
        or subprocess.run(["docker", "info"], capture_output=True, check=False).returncode != 0
    ):
        pytest.skip("no Docker engine answers")
