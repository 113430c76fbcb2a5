"""Two jobs: at once, on one fleet of spot workers; and one after another that kills its trainer."""

from __future__ import annotations

from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

from tests.support.black_box import BlackBox, Observer, black_box
from tests.support.small_job import check, small_job

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]


def reassigned(box: BlackBox, job: str) -> list[dict[str, Any]]:
    """Return the events in which the job got a worker, up to now."""
    changes = [event["fields"] for event in box.events(job, follow=False) if event["kind"] == "worker_reassigned"]
    return [change for change in changes if change["job_id"] == job]


def makers(observer: Observer) -> set[str]:
    """Return the workers that have generated what was delivered so far."""
    return {worker for bodies in list(observer.finished.values()) for body in bodies for worker, _, _ in body["spans"]}


def workers_of(box: BlackBox, job: str) -> list[dict[str, Any]]:
    workers = box.get("/v1/workers")
    return [one for one in workers if (one["role"], one["state"], one["job_id"]) == ("preemptible", "ready", job)]


def test_two_jobs_share_the_spot_workers_and_lose_nothing(tmp_path: Path) -> None:
    specs = [small_job(steps=16, seed=1, elastic={"share": 2.0}), small_job(steps=6, seed=2)]
    with black_box(tmp_path / "state", trainers=2, reserved=2, workers=3) as box, ExitStack() as stack:

        def begin(spec: dict[str, Any]) -> tuple[str, Observer]:
            job = box.submit(spec)
            observer = stack.enter_context(closing(Observer(box.redis_url, job)))
            box.until_step(job, 1)
            return job, observer

        # Until the second begins, all spot workers are the first one's.
        first, of_first = one = begin(specs[0])
        box.until(lambda: len(workers_of(box, first)) == 3, "all spot workers serve the first job")
        second, of_second = other = begin(specs[1])
        begun = [one, other]
        assert [box.get(f"/v1/jobs/{job}")["state"] for job in (first, second)] == ["running", "running"]
        box.until(lambda: bool(reassigned(box, second)), "the second job gets a worker of the first one")

        def shared() -> bool:
            return any(worker.startswith("worker-") for worker in makers(of_first) & makers(of_second))

        box.until(shared, "a spot worker has generated for both")
        for role in ("trainer", "preemptible", "manager"):
            box.until_busy(second)
            box.kill(role)
        for (job, observer), spec in zip(begun, specs, strict=True):
            box.until_completed(job)
            check(box, job, observer, spec)
        assert first in {change["before"] for change in reassigned(box, second)}
        own = [{worker for worker in makers(observer) if worker.startswith("reserved-")} for _, observer in begun]
        assert all(own)
        assert own[0].isdisjoint(own[1])


def test_job_that_kills_its_trainer_fails_and_the_next_one_runs(tmp_path: Path) -> None:
    spec = small_job(steps=2)
    spec["algorithm"] = {"group_size": 8, "loss": "tests.support.losses:segfault"}
    with black_box(tmp_path / "state", workers=1) as box:
        killer = box.submit(spec)
        job = box.submit(small_job(steps=2))
        box.until(lambda: box.get(f"/v1/jobs/{killer}")["state"] == "failed", "the job fails")
        assert (
            "its trainer died 3 times without a finished step in between: killed by SIGSEGV."
            in (box.get(f"/v1/jobs/{killer}")["error"])
        )
        box.until_completed(job)
