"""The soak of benchmarks/soak.py, shortened: memory follows work in flight, not history."""

from __future__ import annotations

import os
import sys

import pytest

from benchmarks.soak import is_flat, run, slope_per_hour
from tests.support.redis_server import executable

MINUTES = 0.7


@pytest.mark.long
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.timeout(180)
def test_memory_stays_flat_while_jobs_end_and_workers_come_and_go() -> None:
    if executable() is None and not os.environ.get("CI"):
        pytest.skip("no redis-server")
    result = run(MINUTES)
    assert result["manager_flat"], result
    assert result["redis_flat"], result
    assert result["jobs"] > 2, "no job ended: nothing was soaked"
    assert result["workers_gone"] > 5
    assert result["dead_letters"] == 0, result


def test_growing_memory_is_not_flat() -> None:
    leak = [100e6 + 1e6 * i for i in range(60)]
    assert not is_flat(leak)
    assert is_flat([100e6 + (i % 7) * 1e6 for i in range(60)])


def test_the_slope_of_a_leak_is_found_in_its_noise() -> None:
    seconds = [float(i) for i in range(600)]
    slope, error = slope_per_hour(seconds, [50e6 + 1000.0 * s + (s * 7919 % 13) * 1e4 for s in seconds])
    assert abs(slope - 3.6e6) < 3 * error < 1e6
