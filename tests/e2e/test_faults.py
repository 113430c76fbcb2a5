"""`make chaos`, shortened: faults of every kind that this machine permits, and each sample exactly once."""

from __future__ import annotations

import os
from typing import get_args

import pytest

from benchmarks.chaos.__main__ import run
from benchmarks.chaos.schedule import Kind
from tests.support.redis_server import executable

MINUTES = 1.5


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_job_survives_faults_of_every_kind() -> None:
    if executable() is None and not os.environ.get("CI"):
        pytest.skip("no redis-server")
    result = run(MINUTES, 20251021, set(get_args(Kind)), every_s=5.0, steps=20, workers=2)
    assert result["faults"] > 8
    assert result["requested"] == result["delivered"] > 0
