"""A run with faults of six kinds and an undisturbed one of the same job: the same bits, by their records alone."""

from __future__ import annotations

import json
import os
import shutil
import signal
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import pytest

from tests.support.black_box import BlackBox, black_box
from tests.support.redis_server import executable
from tests.support.small_job import small_job

FAULTS = (
    ("preemptible", signal.SIGKILL),
    ("manager", signal.SIGKILL),
    ("trainer", signal.SIGKILL),
    ("preemptible", signal.SIGTERM),  # a notice: its samples migrate
    ("redis", signal.SIGKILL),
    ("weight_store", signal.SIGKILL),
)


def deterministic_job(steps: int) -> dict[str, Any]:
    job = small_job(steps, elastic={"weights": "delta"})
    job["trainer"]["deterministic"] = True
    job["sampling"]["max_tokens"] = 256
    return job


def disturb(box: BlackBox, job_id: str, n: int) -> int:
    """Do up to `n` faults while the job generates; return how many it was in time for.

    The trainer dies once per step at most: a job whose trainer dies three times within one step fails.
    """
    steps = 0
    for done, (role, number) in enumerate(islice(cycle(FAULTS), n)):
        if role == "trainer":
            steps += 1
            box.until_step(job_id, steps)
        if not box.until_busy(job_id):
            return done
        box.kill(role, number)
    return n


def verified(box: BlackBox, *runs: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(box.command("verify-run", *runs, "--json"))
    return found


def compare_with_faults(state: Path, steps: int, n_faults: int) -> None:
    if executable() is None and not os.environ.get("CI"):
        pytest.skip("no redis-server")
    with black_box(state, workers=2, autoscale=2) as box:
        box.command("scale", "2")
        calm = box.submit(deterministic_job(steps))
        box.until_completed(calm, 900)
        rough = box.submit(deterministic_job(steps))
        assert disturb(box, rough, n_faults) == n_faults, "the job was done before the last fault"
        audit = f"/v1/jobs/{rough}/audit"
        # On a fast machine the workers may have had no tokens when they were hit.
        while not box.get(audit)["tokens_saved"] and box.until_busy(rough):
            box.kill("preemptible", signal.SIGTERM)
        box.until_completed(rough, 900)
        assert box.get(audit)["tokens_saved"], "no sample went on with tokens of another worker"
    # The system is down: what follows needs the folders alone.
    found = verified(box, calm, rough)
    assert found["differences"] == {}, found
    assert [run["problems"] for run in found["runs"]] == [[], []]
    shown = box.command("verify-run", calm, rough, "--step", "1")
    assert f"identical: {steps + 1} steps" in shown
    assert "tokens by" in shown
    damaged = state / "runs" / rough
    shutil.copytree(damaged, state / "runs/damaged")
    file = state / "runs/damaged/record/step-000001.msgpack"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    with box.start("verify-run", "damaged") as process:
        out, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "record/step-000001.msgpack: it is not the file that was written; group" in out


@pytest.mark.timeout(900)
def test_run_with_faults_has_the_bits_of_an_undisturbed_one(tmp_path: Path) -> None:
    compare_with_faults(tmp_path, steps=6, n_faults=len(FAULTS))


@pytest.mark.long
@pytest.mark.timeout(2400)
def test_run_with_thirty_faults_has_the_bits_of_an_undisturbed_one(tmp_path: Path) -> None:
    compare_with_faults(tmp_path, steps=20, n_faults=30)
