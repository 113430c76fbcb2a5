"""Processes that hang: a job says which one it waits for and since when, and the logs of all machines are in one."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

import pytest

from tests.support.black_box import BlackBox, black_box
from tests.support.small_job import small_job

EARLIER_S = 3.0
"""How long before the signal the last sign of life may be."""


@contextmanager
def stopped(box: BlackBox, *roles: str) -> Iterator[float]:
    """Stop all processes of roles meanwhile; yield when they were stopped."""
    pids = [process["pid"] for role in roles for process in box.processes(role)]
    try:
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        yield time.time()
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_job_names_each_process_that_hangs(tmp_path: Path) -> None:
    with black_box(tmp_path / "state", workers=1) as box:
        job = box.submit(small_job(steps=2000, seed=1))
        box.until_step(job, 2)

        def until_waits_for(what: str, began: float) -> None:
            def waits() -> bool:
                shown = box.get(f"/v1/jobs/{job}")["waiting"]
                if shown is None or shown["for"] != what:
                    return False
                return datetime.fromisoformat(shown["since"]).timestamp() > began - EARLIER_S

            box.until(waits, f"{job} waits for {what}")
            line = f"waiting for {what}"
            box.until(lambda: line in " ".join(box.command("top", "--once").split()), f"top shows {line!r}")

        with stopped(box, "trainer") as began:
            until_waits_for("the trainer", began)
        box.until_step(job, box.get(f"/v1/jobs/{job}")["step"] + 1)
        with stopped(box, "redis"):
            # As the job's wait, and once a request to it has timed out, as the reason of 503.
            answer = "does not answer the manager"
            box.until(lambda: answer in box.http.get(f"{box.url}/v1/jobs/{job}").text, "Redis is named")
        box.until_step(job, box.get(f"/v1/jobs/{job}")["step"] + 1)
        with stopped(box, "reserved", "preemptible") as began:
            until_waits_for("a worker that is ready with this job's weights", began)
        log = box.command("logs", job)
        for source, text in (("worker-1", "weights_loaded"), ("trainer", "job_claimed"), ("weight_store", "version_")):
            assert any(f" {source}" in line and text in line for line in log.splitlines()), log[-2000:]
        box.command("cancel", job)
