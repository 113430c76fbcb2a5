"""Processes and user code that hang: a job names soon what it waits for; the logs of all machines are in one."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from tests.support.black_box import ROOT, BlackBox, black_box
from tests.support.small_job import small_job

NAMED_WITHIN_S = 5.0
"""How soon a job names a stall."""
ALLOWANCE_S = 10.0
"""In addition: other tests share two cores with this one."""
EARLIER_S = 10.0
"""How long before the signal the last sign of life may be, which comes every second unless the machine is busy."""
STEP_S = 60.0
"""The longest step. What a step waits for may not answer before the step comes to it, or after it began to wait."""
LASTING_S = 1.5
"""Each step waits for a shorter time."""


@contextmanager
def stopped(box: BlackBox, *roles: str) -> Iterator[float]:
    """Stop all processes of roles meanwhile; yield when they were stopped."""
    pids = [process["pid"] for role in roles for process in box.processes(role)]
    assert pids
    try:
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        yield time.time()
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


@contextmanager
def closed(gate: Path) -> Iterator[float]:
    """Let the reward function block meanwhile; yield when that began."""
    gate.unlink()
    try:
        yield time.time()
    finally:
        gate.touch()


def gated_job(folder: Path, gate: Path) -> dict[str, Any]:
    """Return a long job whose reward function blocks while `gate` does not exist."""
    spec = small_job(steps=2000, seed=1)
    rows = [json.loads(line) for line in (ROOT / spec["data"]["train"]).read_text().splitlines()]
    spec["data"]["train"] = str(folder / "train.jsonl")
    Path(spec["data"]["train"]).write_text("".join(json.dumps(row | {"gate": str(gate)}) + "\n" for row in rows))
    spec["reward"] = {"function": "tests.support.reward_functions:lengths_when_open", "timeout_s": 300}
    return spec


def printed(box: BlackBox, *commands: tuple[str, ...]) -> list[str]:
    """Run commands at once, which may fail; return what each prints, errors included, in one line."""
    processes = [box.start(*command) for command in commands]
    texts = []
    for process in processes:
        with process:
            texts.append(" ".join("".join(process.communicate(timeout=60)).split()))
    return texts


@pytest.mark.long
@pytest.mark.timeout(900)
def test_job_names_each_stall_within_seconds(tmp_path: Path) -> None:
    gate = tmp_path / "rewards-may-be-computed"
    gate.touch()
    with black_box(tmp_path / "state", workers=1) as box:
        job = box.submit(gated_job(tmp_path, gate))
        views = ("status", job), ("top", "--once")
        box.until_step(job, 2)

        def check_named(what: str, began: float, *, in_step: bool = False) -> None:
            since = 0.0

            def names() -> bool:
                nonlocal since
                (shown,) = box.get("/v1/jobs")
                wait = shown["waiting"]
                if wait is None or what not in f"waiting for {wait['for']} because {wait['because']}":
                    return False
                since = datetime.fromisoformat(wait["since"]).timestamp()
                return began - (STEP_S if in_step else EARLIER_S) < since < time.time() - LASTING_S

            box.until(names, f"{job} says {what!r}")
            after_s = time.time() - (max(began, since) if in_step else began)
            assert after_s < NAMED_WITHIN_S + ALLOWANCE_S, f"{what!r} after {after_s:.1f} s"
            for text in printed(box, *views):
                assert what in text

        def check_continues() -> None:
            box.until_step(job, box.get(f"/v1/jobs/{job}")["step"] + 1)

        with stopped(box, "trainer") as began:
            check_named("waiting for the trainer because", began)
        check_continues()
        with stopped(box, "weight_store") as began:
            # The trainer waits for it to upload a version, or a worker to load one.
            check_named("the weight store at", began, in_step=True)
        check_continues()
        with closed(gate) as began:
            check_named("waiting for the rewards because", began, in_step=True)
        check_continues()
        with stopped(box, "redis") as began:
            # As the job's wait, and once a request to Redis has timed out, as the reason of 503, which commands print
            # after retries of 10 s.
            answer, limit_s = "does not answer the manager", NAMED_WITHIN_S + ALLOWANCE_S
            box.until(lambda: answer in box.http.get(f"{box.url}/v1/jobs").text, "Redis is named", limit_s)
            for text in printed(box, *views):
                assert answer in text
        check_continues()
        with stopped(box, "reserved", "preemptible") as began:
            check_named("waiting for a worker that is ready with this job's weights because", began)
        log = box.command("logs", job)
        for source, text in (("worker-1", "weights_loaded"), ("trainer", "job_claimed"), ("weight_store", "version_")):
            assert any(f" {source}" in line and text in line for line in log.splitlines()), log[-2000:]
        box.command("cancel", job)
