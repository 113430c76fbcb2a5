"""Where the time from a worker's start to its first token went."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from rlboost.services.rollout_worker.life import StartupTimer, process_age_s


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_phases_add_up_to_the_age_of_the_process(clock: Clock) -> None:
    startup = StartupTimer(age_s=2.0, clock=clock)
    startup.end("import")
    took = {"join": 1.0, "version": 0.5, "pull": 4.0, "load": 3.0, "parity": 0.5, "assignment": 0.25}
    for lap, seconds in took.items():
        clock.now += seconds
        startup.end(lap)  # type: ignore[arg-type]
    clock.now += 0.125
    with capture_logs() as logs:
        startup.on_flush(0)
        startup.on_flush(3)
        startup.on_flush(9)
    (line,) = logs
    assert line["event"] == "first_token"
    laps = {key: value for key, value in line.items() if key.endswith("_s") and key != "after_s"}
    assert laps == {
        "import_s": 2.0,
        "join_s": 1.0,
        "version_s": 0.5,
        "pull_s": 4.0,
        "load_s": 3.0,
        "parity_s": 0.5,
        "assignment_s": 0.25,
        "step_s": 0.125,
    }
    assert line["after_s"] == sum(laps.values())


def test_repeated_phase_counts_toward_the_next(clock: Clock) -> None:
    startup = StartupTimer(clock=clock)
    for lap in ("pull", "load", "pull", "load", "assignment"):
        clock.now += 1.0
        startup.end(lap)
    with capture_logs() as logs:
        startup.on_flush(1)
    assert (logs[0]["pull_s"], logs[0]["load_s"], logs[0]["assignment_s"], logs[0]["after_s"]) == (1.0, 1.0, 3.0, 5.0)


def test_process_age_of_a_new_process() -> None:
    began = time.monotonic()
    program = "from rlboost.services.rollout_worker.life import process_age_s; print(process_age_s())"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert 0.0 < float(done.stdout) < time.monotonic() - began + 0.05


def test_process_age_without_proc_is_0(tmp_path: Path) -> None:
    assert process_age_s(tmp_path / "none") == 0.0
