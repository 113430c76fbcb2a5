"""Two jobs on one device that their trainers use in turns, while the trainer that has it is killed."""

from __future__ import annotations

import json
import os
import signal
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
import redis

from rlboost.shared.streams.names import JOB_TRAINERS, device_lease
from tests.support.black_box import BlackBox, Observer, black_box
from tests.support.small_job import check, small_job

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

STEPS = 8
MOST_OTHERS = 20
"""Jobs during which the one that hangs must fail."""


def kill_holder(box: BlackBox, bus: redis.Redis, victims: dict[str, str]) -> str:
    """SIGKILL the trainer that has the device, if it runs one of these jobs' first trainer; return its name.

    Args:
        box: the system.
        bus: its Redis.
        victims: job -> name of the trainer that may be killed.

    """
    killed = ""

    def sent() -> bool:
        nonlocal killed
        held: Any = bus.get(device_lease("trainers"))
        holder = json.loads(held or '{"job": "", "trainer": ""}')
        if victims.get(holder["job"], "none") != holder["trainer"]:
            return False
        for process in box.processes("trainer"):
            if process["name"] == holder["trainer"]:
                with suppress(ProcessLookupError):
                    os.kill(process["pid"], signal.SIGKILL)
                    killed = holder["trainer"]
        return bool(killed)

    box.until(sent, "a trainer has the device", every_s=0.01)
    return killed


def test_killed_holder_frees_the_device_and_nothing_is_lost(tmp_path: Path) -> None:
    """The second job trains in two ranks."""
    specs = [small_job(steps=STEPS, seed=1), small_job(steps=STEPS, seed=2)]
    specs[1]["trainer"]["data_parallel"] = 2
    with (
        black_box(tmp_path / "state", time_share=True, trainers=2, workers=2) as box,
        closing(redis.Redis.from_url(box.redis_url)) as bus,
    ):
        jobs = [box.submit(spec) for spec in specs]
        observers = [Observer(box.redis_url, job) for job in jobs]
        with closing(observers[0]), closing(observers[1]):
            for job in jobs:
                box.until_step(job, 1)
                box.command_job(job, "pause")  # so that none is done before both have trained
            found: Any = bus.hgetall(JOB_TRAINERS)
            trainers = {job.decode(): trainer.decode() for job, trainer in found.items()}
            assert set(trainers.values()) == {"trainer-1", "trainer-2"}
            for job in jobs:
                box.command_job(job, "resume")
            first = kill_holder(box, bus, trainers)
            left = {job: trainer for job, trainer in trainers.items() if trainer != first}
            kill_holder(box, bus, left)
            for job, observer, spec in zip(jobs, observers, specs, strict=True):
                box.until_completed(job, within_s=600)
                check(box, job, observer, spec)
        rows = [row for job in jobs for row in box.get(f"/v1/jobs/{job}/metrics")]
        assert all("time/device_wait_s" in row for row in rows)
        assert max(row["time/device_wait_s"] for row in rows) > 0, "both had work at the same time"
        assert not bus.exists(device_lease("trainers"))


def test_job_that_never_gives_the_device_up_fails_and_the_other_completes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLBOOST_TRAINER_DEVICE_CALL_LIMIT_S", "5")
    hanging = small_job(steps=2)
    hanging["algorithm"] = {"group_size": 8, "loss": "tests.support.losses:hang"}
    spec = small_job(steps=2)
    with black_box(tmp_path / "state", time_share=True, trainers=2, workers=2) as box:
        stuck = box.submit(hanging)
        state, others = "", 0
        while state != "failed":  # it may hold a device that no other job needs
            job = box.submit(spec)
            with closing(Observer(box.redis_url, job)) as observer:
                box.until_completed(job, within_s=600)
                check(box, job, observer, spec)
            state, others = box.get(f"/v1/jobs/{stuck}")["state"], others + 1
            assert others < MOST_OTHERS
        error = box.get(f"/v1/jobs/{stuck}")["error"]
        assert (
            "its trainer died 3 times without a finished step in between: a call held the device for more than" in error
        )
