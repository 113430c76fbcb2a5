"""A job whose versions travel as deltas: workers build them, verify them, and serve them."""

from __future__ import annotations

import re
from contextlib import closing
from pathlib import Path

import pytest

from rlboost.shared.weights.wire import NONCE_FILE
from tests.support.black_box import Observer, black_box
from tests.support.small_job import check, small_job

pytestmark = pytest.mark.timeout(600)


def test_workers_pull_deltas_and_the_job_completes(tmp_path: Path) -> None:
    spec = small_job(steps=4, elastic={"weights": "delta"})
    # What is usual for large models: few of the rounded values move in a step.
    spec["optimizer"]["lr"], spec["trainer"]["dtype"] = 1e-6, "bfloat16"
    with black_box(tmp_path / "state", workers=1) as box:
        # Without it the workers are on other machines, as far as they know.
        (tmp_path / "state" / "weights" / NONCE_FILE).unlink()
        job_id = box.submit(spec)
        with closing(Observer(box.redis_url, job_id)) as observer:
            box.until_completed(job_id)
        check(box, job_id, observer, spec)
        logs = "".join(log.read_text() for log in (tmp_path / "state" / "logs").glob("worker*.log"))
        pulls = [line for line in logs.splitlines() if "weights_pulled" in line]
        rebuilt = [int(found) for line in pulls for found in re.findall(r"chunks_delta\D+(\d+)", line)]
        assert rebuilt, logs[-2000:]
        assert sum(rebuilt) > 0
        assert "delta_failed" not in logs
        (model,) = [model for model in box.get("/v1/weights")["models"] if model["job_id"] == job_id]
        first, *_, last = model["versions"]
        assert (first["version"], first["pinned"], first["bytes_delta"]) == (0, True, None)
        assert 0 < last["bytes_delta"] < last["bytes_full"]
        assert last["holders"]
