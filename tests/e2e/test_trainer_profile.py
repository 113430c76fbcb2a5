"""A profile of a running job, asked for by the command line and read where the trainer says that it is."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from tests.support.black_box import black_box
from tests.support.small_job import small_job

pytestmark = pytest.mark.timeout(600)


def test_profile_of_two_steps_is_where_its_event_says(tmp_path: Path) -> None:
    with black_box(tmp_path / "state", workers=1) as box:
        job_id = box.submit({**small_job(steps=4), "eval": None})
        box.command_job(job_id, "pause")  # so that it is not done before it is asked
        assert box.command("profile", job_id, "--steps", "2").startswith(f"{job_id} will record its next 2 steps: ")
        box.command_job(job_id, "resume")
        box.until_completed(job_id)
        logs = box.command("logs", job_id)
        (trace,) = (box.state / "runs" / job_id).glob("profile/step-*/rank-*.json.gz")
    (written,) = [line for line in logs.splitlines() if "profile_written" in line]
    assert str(trace.parent) in written
    with gzip.open(trace) as file:
        names = {event["name"] for event in json.load(file)["traceEvents"]}
    assert "aten::mm" in names
