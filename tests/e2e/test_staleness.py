"""A job that runs ahead of its trainer: no token older than it may be, whatever dies."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.black_box import black_box
from tests.support.small_job import check, small_job

pytestmark = pytest.mark.timeout(600)

STALENESS = 2


@pytest.mark.long
def test_samples_are_generated_ahead_and_never_older_than_allowed(tmp_path: Path) -> None:
    spec = small_job(steps=6, elastic={"max_staleness": STALENESS})
    with black_box(tmp_path / "state", workers=2) as box:
        with box.begun_on_spot(spec, 2) as (job_id, observer):
            for step, role in ((2, "preemptible"), (4, "trainer")):
                box.until_step(job_id, step)
                box.until_busy(job_id)
                box.kill(role)
            box.until_completed(job_id)
        audit = check(box, job_id, observer, spec)
        assert audit["preemptions"]["without_notice"] >= 1
        late = {step - version for step, version in observer.versions()}
        assert late <= set(range(STALENESS + 1))
        assert max(late) > 0
        trained = [row for row in box.get(f"/v1/jobs/{job_id}/metrics") if "off_policy/staleness" in row]
        assert [row["step"] for row in trained] == list(range(spec["steps"]))
        staleness = [row["off_policy/staleness"] for row in trained]
        assert max(staleness) > 0
        assert all(0 <= value <= STALENESS for value in staleness)
        assert staleness[0] == 0
