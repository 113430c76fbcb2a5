"""The whole system, real in every part, with a small Countdown job: whatever dies, nothing is lost or doubled."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.black_box import RLBOOST, ROOT, BlackBox, Observer, black_box

pytestmark = pytest.mark.timeout(900)


def job(**changes: Any) -> dict[str, Any]:
    spec: dict[str, Any] = yaml.safe_load((ROOT / "examples/countdown/job.yaml").read_text())
    spec["data"]["prompts_per_step"] = 8
    spec["trainer"]["checkpoint_every"] = 2
    spec["eval"] = {"every": 4, "samples": 16}
    return {**spec, **changes}


def check(box: BlackBox, job_id: str, observer: Observer, n_samples: int) -> dict[str, Any]:
    """What the audit says and what was read from the streams must agree."""
    observer.close()
    assert observer.check() == n_samples
    audit: dict[str, Any] = box.get(f"/v1/jobs/{job_id}/audit")
    delivered = sum(len(m[0]["tokens"]) // 4 for m in observer.finished.values())
    assert audit["requested"] == audit["delivered"] == n_samples
    assert not audit["dropped"]
    assert audit["tokens_delivered"] == delivered
    assert audit["tokens_generated"] == delivered + sum(audit["tokens_made_again"].values())
    return audit


def samples_of(spec: dict[str, Any]) -> int:
    evaluations = sum(1 for step in range(spec["steps"] + 1) if step % 4 == 0 or step == spec["steps"])
    return int(spec["steps"] * 8 * 8 + evaluations * 16)


def state_of(box: BlackBox, pid: int) -> str | None:
    return next((w["state"] for w in box.get("/v1/workers") if w["pid"] == pid), None)


def test_a_job_survives_the_death_of_every_process(tmp_path: Path) -> None:
    spec = job(steps=12)
    with black_box(tmp_path / "state", workers=2) as box:
        job_id = box.submit(spec)
        observer = Observer(box.redis_url, job_id)
        try:
            box.until_step(job_id, 1)
            for role in ("preemptible", "manager", "trainer", "weight_store", "redis", "reserved"):
                box.until_busy(job_id)
                box.kill(role)
            box.until_busy(job_id)
            box.kill("preemptible", signal.SIGTERM)
            command = [*RLBOOST, "worker", "join", "--url", box.url, "--token", box.token]
            with (tmp_path / "joined.log").open("wb") as log:
                joined = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log, env={**os.environ})
            try:
                box.until_completed(job_id)
                box.until(lambda: state_of(box, joined.pid) == "ready", "the worker that joined by hand is ready")
            finally:
                joined.terminate()
                assert joined.wait(20) == 0
        finally:
            observer.close()
        audit = check(box, job_id, observer, samples_of(spec))
        assert audit["preemptions"]["without_notice"] >= 2
        rows = box.get(f"/v1/jobs/{job_id}/metrics")
        assert [row["step"] for row in rows] == list(range(13))
        assert all(p["restarts"] >= 1 for p in box.processes() if p["role"] in {"manager", "trainer", "redis"})


def test_without_spot_workers_the_same_job_completes(tmp_path: Path) -> None:
    spec = job(steps=3)
    with black_box(tmp_path / "state", workers=0) as box:
        job_id = box.submit(spec)
        observer = Observer(box.redis_url, job_id)
        try:
            box.until_completed(job_id)
        finally:
            observer.close()
        audit = check(box, job_id, observer, samples_of(spec))
        assert audit["migrations"] == 0
        assert {w["role"] for w in box.get("/v1/workers")} == {"reserved"}
