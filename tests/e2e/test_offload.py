"""`elastic.seeding: auto`: the window is measured, remembered for the size of the fleet, and used."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from tests.support.black_box import Observer, black_box
from tests.support.small_job import check, small_job

pytestmark = pytest.mark.timeout(600)

WORKERS = 2


@pytest.mark.long
def test_learned_window_is_reused_and_a_target_fleet_is_reported(tmp_path: Path) -> None:
    spec = small_job(steps=5, elastic={"seeding": "auto"})
    with black_box(tmp_path / "state", workers=WORKERS) as box:
        job_id = box.submit(spec)
        box.command_job(job_id, "pause")
        with closing(Observer(box.redis_url, job_id)) as observer:
            # A worker that comes late would leave too few steps to a fleet of this size.
            box.until_spot_ready(WORKERS)
            assert box.get("/v1/fleet")["target_workers"] is None
            box.command_job(job_id, "resume")
            box.until(lambda: box.get("/v1/fleet")["target_workers"] is not None, "a fleet is target_workers")
            box.until_completed(job_id)
        check(box, job_id, observer, spec)
        events = [
            event for event in box.events(job_id) if event["kind"] in {"seeding_started", "seeding_window_updated"}
        ]
        first, *later = [event["fields"] for event in events if event["kind"] == "seeding_started"]
        assert (first["source"], first["window_s"]) == ("first", None)
        learnt = [event["fields"] for event in events if event["kind"] == "seeding_window_updated"]
        remembered = {seen["step"]: seen["window_s"] for seen in learnt if seen["remembered_for"] == WORKERS}
        used = [began for began in later if began["source"] == "memory" and began["fleet"] == WORKERS]
        assert used
        for began in used:
            assert began["window_s"] == remembered[max(step for step in remembered if step < began["step"])]
