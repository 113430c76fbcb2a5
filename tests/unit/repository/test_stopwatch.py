"""What a test that promises seconds counts, where other work has the processors, too."""

from __future__ import annotations

import itertools
import time
from pathlib import Path

import pytest

from tests.support import stopwatch
from tests.support.stopwatch import Stopwatch


@pytest.fixture
def pressure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Linux's file, not there yet; each look at the clock finds it five seconds later."""
    clock = itertools.count(100, 5)
    monkeypatch.setattr(time, "monotonic", lambda: float(next(clock)))
    monkeypatch.setattr(stopwatch, "_PRESSURE", tmp_path / "cpu")
    return tmp_path / "cpu"


def say(pressure: Path, stalled_s: float) -> None:
    numbers = f"avg10=0.00 avg60=0.00 avg300=0.00 total={int(stalled_s * 1e6)}"
    pressure.write_text(f"some {numbers}\nfull {numbers.rpartition('=')[0]}=0\n")


def test_time_in_which_something_waited_for_a_processor_is_left_out(pressure: Path) -> None:
    say(pressure, 70.0)
    counted = Stopwatch()
    assert counted.read() == 5.0
    say(pressure, 73.0)
    assert counted.read() == 10.0 - 3.0
    say(pressure, 99.0)
    assert counted.read() == 0.0


def test_stopwatch_without_pressure_files_counts_all_time(pressure: Path) -> None:
    counted = Stopwatch()
    assert counted.read() == 5.0
    pressure.mkdir()  # there, and refuses to be read
    assert counted.read() == 10.0
