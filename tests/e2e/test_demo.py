"""`rlboost demo`, in its short form, and stopped in the middle."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest

from rlboost.report import load
from tests.support.black_box import start_forked

pytestmark = pytest.mark.timeout(600)


def test_a_short_demo_makes_its_preemptions_and_its_report(tmp_path: Path) -> None:
    state, log = tmp_path / "state", tmp_path / "log"
    process = start_forked("demo", "--state", str(state), "--steps", "4", "--out", str(tmp_path / "out"), log=log)
    assert process.wait(540) == 0, log.read_text()
    record = load(state / "record.json")
    assert record.job["state"] == "completed"
    assert (record.applied("kill"), record.applied("notice"), record.applied("join")) == (1, 1, 2)
    assert record.audit["requested"] == record.audit["delivered"] > 0
    assert record.cpu_s["trainer"] > 0
    assert {event.kind for event in record.job_events} >= {
        "job_state_changed",
        "worker_lost",
        "worker_left",
        "samples_migrated",
    }
    ended = [event.fields for event in record.job_events if event.kind == "step_ended"]
    assert [event["step"] for event in ended] == [*range(5)]
    assert sum(sum(event["tokens"].values()) for event in ended) == record.audit["tokens_delivered"]
    assert record.samples
    assert "Every guarantee held" in (tmp_path / "out/index.html").read_text(encoding="utf-8")


@pytest.mark.long
def test_autoscaled_demo_starts_the_spot_workers_that_shorten_its_steps(tmp_path: Path) -> None:
    """Without preemptions, each change of the fleet's size is autoscaling's. The only worker may join after the job."""
    state, log = tmp_path / "state", tmp_path / "log"
    options = ("--steps", "8", "--workers", "1", "--autoscale", "3", "--no-chaos")
    process = start_forked("demo", "--state", str(state), *options, log=log)
    assert process.wait(540) == 0, log.read_text()
    record = load(state / "record.json")
    scaled = [event for event in record.job_events if event.kind == "fleet_scaled"]
    assert scaled, log.read_text()
    assert scaled[0].fields["before"] <= 1
    assert 1 < scaled[-1].fields["workers"] <= 3
    later = [seen for seen in record.observations if seen.at > scaled[-1].at]
    ready = [sum((one.role, one.state) == ("preemptible", "ready") for one in seen.workers) for seen in later]
    assert max(ready) == scaled[-1].fields["workers"]


def test_a_signal_stops_everything(tmp_path: Path) -> None:
    state, log = tmp_path / "state", tmp_path / "log"
    process = start_forked("demo", "--state", str(state), log=log)
    limit = time.monotonic() + 300
    while "the job is running" not in log.read_text():
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < limit, log.read_text()
        time.sleep(0.2)
    pids = [entry["pid"] for entry in json.loads((state / "processes.json").read_text())]
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130, log.read_text()
    assert "Traceback" not in log.read_text()
    assert len(pids) == 8
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
