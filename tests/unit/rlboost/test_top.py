"""What `rlboost top` reads and draws, without a system and without a terminal."""

from __future__ import annotations

import io
from typing import Any

import httpx
import pytest
from rich.console import Console

from rlboost.client import Client
from rlboost.top.snapshot import JOBS_SHOWN, JobSnapshot, Snapshot, SnapshotReader
from rlboost.top.view import View
from tests.support.fake_rest import FakeRest, job, ok, problem

FLEET = {"present": 2, "reserved": 0, "by_state": {"ready": 1, "pulling": 1}, "tokens_per_s": 1234.5}
AT = 1_767_225_600.0  # 2026-01-01T00:00:00Z


def worker(name: str, state: str = "ready", **fields: Any) -> dict[str, Any]:
    return {
        "id": f"{name}-abc123",
        "role": "preemptible",
        "kind": "torch-cpu",
        "state": state,
        "weight_version": 3,
        "running": 4,
        "pending": 0,
        "tokens_per_s": 617.25,
        "price_per_hour": 0.4,
        "joined_at": "2026-01-01T00:00:00+00:00",
        "job_id": "j-1",
    } | fields


def running(**fields: Any) -> JobSnapshot:
    return JobSnapshot(job("running", 2, **fields), "reward/mean", [0.0, 1.0], [{"time/step_s": 2.0}], 0.5, 0.25)


def snapshot(jobs: list[JobSnapshot], workers: list[dict[str, Any]]) -> Snapshot:
    return Snapshot(AT, "http://127.0.0.1:8700", FLEET, jobs, 0, workers)


def drawn(shown: Snapshot, width: int = 80, height: int | None = None, **fields: Any) -> list[str]:
    out = io.StringIO()
    console = Console(file=out, width=width, highlight=False, markup=False)
    console.print(View(shown, AT + 60, height, **fields))
    return [line.rstrip() for line in out.getvalue().splitlines()]


def client(rest: FakeRest) -> Client:
    return Client("http://manager", "t", retry_for_s=0.0, transport=rest)


@pytest.fixture
def rest() -> FakeRest:
    rest = FakeRest()
    rest.on("GET /v1/fleet", ok(FLEET))
    rest.on("GET /v1/workers", ok([worker("w-1"), worker("w-2", "lost")]))
    return rest


def test_snapshot_has_active_jobs_first_and_present_workers(rest: FakeRest) -> None:
    ended = [job("completed", id=f"old-{i}") for i in range(JOBS_SHOWN)]
    rest.on("GET /v1/jobs", ok([job("pending"), *ended]))
    for record in ended:
        rest.on(f"GET /v1/jobs/{record['id']}/metrics", ok([]))
        rest.on(f"GET /v1/jobs/{record['id']}/cost", ok({"dollars": 0.0, "dollars_per_step": None}))
        rest.on(f"GET /v1/jobs/{record['id']}/audit", ok({"preemptions": {}}))
    seen = SnapshotReader().read(client(rest))
    assert [shown.record["id"] for shown in seen.jobs] == ["j-1", *(f"old-{i}" for i in range(JOBS_SHOWN - 1, 0, -1))]
    assert seen.hidden_jobs == 1
    assert [shown["id"] for shown in seen.workers] == ["w-1-abc123"]


def test_reader_asks_only_for_new_steps(rest: FakeRest) -> None:
    rest.on("GET /v1/jobs", ok([job("running", 2)]))
    rest.on(
        "GET /v1/jobs/j-1/metrics",
        ok([{"step": 0, "reward/mean": 0.1}, {"step": 1, "reward/mean": 0.2}]),
        ok([{"step": 2, "reward/mean": 0.3}]),
    )
    rest.on("GET /v1/jobs/j-1/cost", ok({"dollars": 1.5, "dollars_per_step": 0.75}))
    rest.on("GET /v1/jobs/j-1/audit", ok({"preemptions": {"with_notice": 2, "without_notice": 1}}))
    reader = SnapshotReader()
    reader.read(client(rest))
    (seen,) = reader.read(client(rest)).jobs
    asked = [request.url.params["from_step"] for request in rest.requests if request.url.path.endswith("/metrics")]
    assert asked == ["0", "2"]
    assert (seen.curve_name, seen.curve) == ("reward/mean", [0.1, 0.2, 0.3])
    assert (seen.dollars, seen.preemptions) == (1.5, 3)


def test_snapshot_of_a_quarantined_job_has_no_cost(rest: FakeRest) -> None:
    rest.on("GET /v1/jobs", ok([job("failed", error="it is quarantined")]))
    rest.on("GET /v1/jobs/j-1/metrics", ok([]))
    rest.on("GET /v1/jobs/j-1/cost", problem(409, "Job quarantined", "it cannot be read"))
    (seen,) = SnapshotReader().read(client(rest)).jobs
    assert seen.dollars == 0.0


def test_view_shows_what_a_job_waits_for_and_what_it_costs() -> None:
    wait = {"for": "samples", "because": "3 of 8 are there", "since": "2026-01-01T00:00:00+00:00", "limit_s": 600.0}
    shown = running(waiting=wait)
    shown.preemptions = 1
    lines = drawn(snapshot([shown], [worker("w-1")]), width=100)
    assert "j-1  running  step 2 of 3  about 2 s left (2 s a step)  $0.50 ($0.25 a step)  1 preemption" in lines
    assert "  reward/mean ▁█ 0 -> 1" in lines
    assert "  waiting for samples because 3 of 8 are there (60 s so far, 10 min at most)" in lines
    assert lines[-1].split() == ["w-1", "spot", "torch-cpu", "ready", "3", "4", "0", "617", "$0.40", "j-1"]


def test_view_shows_how_far_the_wait_of_a_worker_is_where_there_is_room() -> None:
    wait = {"for": "the store", "because": "pull version 3: 1 GB of 3 GB", "since": "2026-01-01T00:00:00+00:00"}
    workers = [worker("w-0"), worker("w-1", "pulling", waiting=wait)]
    line = "  w-1 is waiting for the store because pull version 3: 1 GB of 3 GB (60 s so far)"
    assert line in drawn(snapshot([], workers), width=100)
    height = len(drawn(snapshot([], workers), width=100)) + 1
    assert line in drawn(snapshot([], workers), width=100, height=height)
    assert line not in drawn(snapshot([], workers), width=100, height=height - 2)


@pytest.mark.parametrize(("width", "height"), [(40, 12), (80, 24), (120, 40), (200, 10)])
@pytest.mark.parametrize("n_workers", [3, 50])
def test_view_fits_every_terminal(width: int, height: int, n_workers: int) -> None:
    wait = {"for": "the store", "because": "pull " * 30, "since": "2026-01-01T00:00:00+00:00"}
    jobs = [running(id=f"job-{i}", warnings=["w" * 30 + " x" * 60]) for i in range(6)]
    lines = drawn(snapshot(jobs, [worker(f"w-{i}", waiting=wait) for i in range(n_workers)]), width, height)
    assert len(lines) <= height
    assert max(map(len, lines)) <= width
    assert any("more worker" in line for line in lines) is (n_workers == 50)


def test_view_of_an_outage_shows_the_age_and_the_reason() -> None:
    lines = drawn(snapshot([], []), problem="connection refused")
    assert "the manager has not answered for 60 s: connection refused" in lines
    assert "no job: 'rlboost run JOB.yaml' starts one" in lines


def test_view_without_a_terminal_has_no_colors() -> None:
    assert not any("\x1b" in line for line in drawn(snapshot([running(warnings=["careful"])], [worker("w-1")])))


def test_long_curve_is_averaged_over_the_whole_run() -> None:
    shown = running()
    shown.curve = [0.0] * 1000 + [1.0] * 1000
    (line,) = [line for line in drawn(snapshot([shown], [])) if "reward/mean" in line]
    low, high = line.count("▁"), line.count("█")
    assert low > 20
    assert low == high


def test_client_error_of_the_first_read_is_raised() -> None:
    rest = FakeRest()
    rest.on("GET /v1/jobs", httpx.ConnectError("refused"))
    with pytest.raises(Exception, match="does not answer"):
        SnapshotReader().read(client(rest))
