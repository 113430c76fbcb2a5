"""What `rlboost top` reads and draws, without a system and without a terminal."""

from __future__ import annotations

import io
from typing import Any

import httpx
import pytest
from rich.console import Console

from rlboost.client import Client
from rlboost.shared.page import STATIC
from rlboost.top import (
    JOBS_SHOWN,
    PARTS,
    Difference,
    JobSnapshot,
    Snapshot,
    SnapshotReader,
    View,
    fleet_text,
    last_step_time,
)
from tests.support.fake_rest import FakeRest, job, ok

SCALING: dict[str, Any] = {
    "workers": "auto",
    "limited_by": None,
    "reason": None,
    "dollars_per_hour": 0,
    "max_dollars_per_hour": None,
    "pools": [],
}
FLEET: dict[str, Any] = {
    "present": 2,
    "reserved": 0,
    "by_state": {"ready": 1, "pulling": 1},
    "tokens_per_s": 1234.5,
    "target_workers": None,
    "worth_of_one_more": None,
    "autoscaling": SCALING,
}
FREE = {"dollars": 0.0, "dollars_per_step": None, "reserved_only": None}
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


def snapshot(jobs: list[JobSnapshot], workers: list[dict[str, Any]], **fleet: Any) -> Snapshot:
    return Snapshot(AT, "http://127.0.0.1:8700", FLEET | fleet, jobs, 0, workers)


def step(number: int, wait_s: float, **metrics: float) -> dict[str, float]:
    return {"step": number - 1, "time/step_s": wait_s + 2.0, "time/wait_s": wait_s, "time/train_s": 2.0} | metrics


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
        rest.on(
            f"GET /v1/jobs/{record['id']}/cost", ok({"dollars": 0.0, "dollars_per_step": None, "reserved_only": None})
        )
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
    rest.on("GET /v1/jobs/j-1/cost", ok({"dollars": 1.5, "dollars_per_step": 0.75, "reserved_only": None}))
    rest.on("GET /v1/jobs/j-1/audit", ok({"preemptions": {"with_notice": 2, "without_notice": 1}}))
    reader = SnapshotReader()
    reader.read(client(rest))
    (seen,) = reader.read(client(rest)).jobs
    asked = [request.url.params["from_step"] for request in rest.requests if request.url.path.endswith("/metrics")]
    assert asked == ["0", "2"]
    assert (seen.curve_name, seen.curve) == ("reward/mean", [0.1, 0.2, 0.3])
    assert (seen.dollars, seen.preemptions) == (1.5, 3)


def test_view_shows_what_a_job_does_and_waits_for_and_what_it_costs() -> None:
    wait = {"for": "samples", "because": "3 of 8 are there", "since": "2026-01-01T00:00:00+00:00", "limit_s": 600.0}
    phase = {"name": "training", "step": 2, "since": "2026-01-01T00:00:18+00:00", "last_s": 50.0}
    shown = running(waiting=wait)
    shown.preemptions = 1
    lines = drawn(snapshot([shown], [worker("w-1")]), width=100)
    assert "j-1  running  step 2 of 3  about 2 s left (2 s a step)  $0.50 ($0.25 a step)  1 preemption" in lines
    assert "  reward/mean ▁█ 0 -> 1" in lines
    waiting = "waiting for samples because 3 of 8 are there (60 s so far, 10 min at most)"
    assert f"  {waiting}" in lines
    doing = "training step 3, for 42 s (the last took 50 s)"
    assert f"  {doing}" in drawn(snapshot([running(phase=phase)], []))
    assert f"  {doing}; {waiting}" in drawn(snapshot([running(phase=phase, waiting=wait)], []), width=140)
    assert lines[-1].split() == ["w-1", "spot", "torch-cpu", "ready", "3", "4", "0", "617", "$0.40", "j-1"]


def test_view_shows_how_far_the_wait_of_a_worker_is_where_there_is_room() -> None:
    wait = {"for": "the store", "because": "pull version 3: 1 GB of 3 GB", "since": "2026-01-01T00:00:00+00:00"}
    workers = [worker("w-0"), worker("w-1", "pulling", waiting=wait)]
    line = "  w-1 is waiting for the store because pull version 3: 1 GB of 3 GB (60 s so far)"
    assert line in drawn(snapshot([], workers), width=100)
    height = len(drawn(snapshot([], workers), width=100)) + 1
    assert line in drawn(snapshot([], workers), width=100, height=height)
    assert line not in drawn(snapshot([], workers), width=100, height=height - 2)


# --- details: the last step, the fleet, the reserved workers alone ----------------------------------------------------

STEP = (
    "step 6 took 10 s: waiting for samples 80 %, training 20 %. That is 6.0 s longer than the median of the 5 steps "
    "before, mostly waiting for samples (6.0 s longer)"
)
RESERVED_ONLY = {"seconds": 7200.0, "dollars": 1.0, "break_even_price_per_hour": None}
ALONE = (
    "the reserved workers alone would have taken about 2 h and cost $1.00: with spot workers the job is 50 % cheaper"
)
WORTH = {"job_id": "j-1", "tokens_per_hour": 5e5, "dollars_per_hour": 2.0, "price_per_hour": 1.5}


def test_last_step_time_says_why_it_took_longer_as_the_page_does() -> None:
    rows = [step(n, 2.0) for n in range(1, 6)]
    usual = last_step_time(rows, 6)
    assert usual is not None
    assert usual.text() == "step 5 took 4.0 s: waiting for samples 50 %, training 50 %"
    slow = last_step_time([*rows, step(6, 8.0), {"step": 6, "time/step_s": 99.0, "eval/pass@1": 1.0}], 6)
    assert slow is not None
    assert slow.text() == STEP
    assert slow.parts["waiting for samples"] == 8.0
    quick = last_step_time([*rows, step(6, 0.5)], 6)
    assert quick is not None
    assert quick.difference == Difference(5, -1.5, "waiting for samples", -1.5)
    assert last_step_time(rows[:0], 6) is None


def test_parts_of_a_step_are_those_of_the_page() -> None:
    page = (STATIC / "facts.js").read_text()
    for metric, name in PARTS:
        assert f'["{metric}", "{name}", ' in page


def test_snapshot_has_the_last_step_the_evaluation_and_the_cost_without_spot_workers(rest: FakeRest) -> None:
    rows = [step(n, 2.0, **({"eval/pass@1": n / 10} if n % 2 else {})) for n in range(1, 6)]
    waits = {"turns/model_s": 30.0, "turns/outside_s": 12.0}
    cost = {"dollars": 0.5, "dollars_per_step": 0.1, "reserved_only": RESERVED_ONLY}
    rest.on("GET /v1/jobs", ok([job("running", 5, steps=9)]), ok([job("running", 6, steps=9)]))
    rest.on("GET /v1/jobs/j-1/metrics", ok(rows), ok([step(6, 8.0, **waits)]))
    rest.on("GET /v1/jobs/j-1/cost", ok(cost))
    rest.on("GET /v1/jobs/j-1/audit", ok({"preemptions": {}}))
    reader = SnapshotReader()
    reader.read(client(rest))
    (seen,) = reader.read(client(rest)).public()["jobs"]
    assert seen["last_step"] == {
        "step": 6,
        "seconds": 10.0,
        "parts": {
            "reserved workers generate": 0.0,
            "waiting for samples": 8.0,
            "training": 2.0,
            "publishing weights": 0.0,
            "other": 0.0,
        },
        "difference": {"steps": 5, "seconds": 6.0, "part": "waiting for samples", "part_seconds": 6.0},
        "conversation": (30.0, 12.0),
    }
    assert (seen["evaluation_name"], seen["evaluation"]) == ("eval/pass@1", [0.1, 0.3, 0.5])
    assert seen["reserved_only"] == RESERVED_ONLY


@pytest.mark.parametrize(
    ("row", "name"),
    [
        ({"eval/math/pass@1": 0.5, "eval/aime/pass@1": 0.1, "eval/aime/reward_mean": 0.2}, "eval/math/pass@1"),
        ({"eval/math/pass@1": 0.5, "eval/pass@1": 0.1}, "eval/pass@1"),
        ({"eval/code/loss": 0.5, "eval/code/perplexity": 1.6, "loss": 1.0}, "eval/code/perplexity"),
        ({"eval/reward/format/mean": 0.5, "loss": 1.0}, ""),
    ],
)
def test_evaluation_of_a_job_with_sets_is_that_of_the_first(rest: FakeRest, row: dict[str, float], name: str) -> None:
    rest.on("GET /v1/jobs", ok([job("running", 5, steps=9)]))
    rest.on("GET /v1/jobs/j-1/metrics", ok([step(1, 2.0, **row)]))
    rest.on("GET /v1/jobs/j-1/cost", ok({"dollars": 0.5, "dollars_per_step": 0.1, "reserved_only": None}))
    rest.on("GET /v1/jobs/j-1/audit", ok({"preemptions": {}}))
    (seen,) = SnapshotReader().read(client(rest)).public()["jobs"]
    assert (seen["evaluation_name"], seen["evaluation"]) == (name, [row[name]] if name else [])


def test_fleet_text_has_target_worth_price_and_autoscaling() -> None:
    pool = {"kind": "h100", "target": 3, "max_workers": 8, "error": None}
    scaling = SCALING | {"dollars_per_hour": 6.3, "max_dollars_per_hour": 10.0, "pools": [pool]}
    text = fleet_text(FLEET | {"target_workers": 5, "worth_of_one_more": WORTH, "autoscaling": scaling})
    assert text == (
        "up to 5 spot workers would shorten the steps; one more would generate 500,000 more tokens per hour, worth "
        "$2.00, and costs $1.50; all workers cost $6.30 per hour of at most $10.00; autoscaling (auto): 3 of at most 8 "
        "h100"
    )
    stuck = SCALING | {"limited_by": "max_workers", "pools": [pool | {"target": None, "error": "no quota"}]}
    assert fleet_text(FLEET | {"target_workers": 1, "autoscaling": stuck}) == (
        "more than 1 spot worker would not shorten the steps; autoscaling (auto): - of at most 8 h100, limited by "
        "max_workers, provider: no quota"
    )
    mixed = SCALING | {"reason": "3 x L4: 31 % cheaper per token than A10G", "pools": [pool, pool]}
    assert fleet_text(FLEET | {"autoscaling": mixed}).endswith("; 3 x L4: 31 % cheaper per token than A10G")
    none = {"target_workers": 0, "worth_of_one_more": WORTH | {"tokens_per_hour": 0.2}}
    assert fleet_text(FLEET | none) == (
        "spot workers would not shorten the steps; one more would generate no more tokens per hour"
    )
    assert fleet_text(FLEET) == ""


def test_finished_jobs_leave_room_for_all_workers(rest: FakeRest) -> None:
    ended = [JobSnapshot(job("completed", id=f"old-{i}")) for i in range(5)]
    workers = [worker(f"w-{i}") for i in range(5)]
    lines = drawn(snapshot([running(), *ended], workers), height=16)
    assert len(lines) < 16
    assert all(any(line.startswith(f"w-{i}") for line in lines) for i in range(5))
    assert any("more job" in line for line in lines)
    assert any(line.startswith("old-0") for line in drawn(snapshot(ended, workers * 9), height=24)), "never no job"


def test_view_has_details_whole_or_not_at_all_and_leaves_workers_a_third() -> None:
    shown = running()
    shown.evaluation_name, shown.evaluation = "eval/pass@1", [0.1, 0.5]
    shown.last_step = last_step_time([*(step(n, 2.0) for n in range(1, 6)), step(6, 8.0)], 6)
    shown.reserved_only = RESERVED_ONLY
    whole = snapshot([shown], [worker(f"w-{i}") for i in range(20)], target_workers=5)
    details = ("up to 5 spot workers would shorten the steps", STEP, ALONE)

    def seen(height: int | None) -> tuple[list[bool], list[str]]:
        lines = drawn(whole, height=height)
        text = " ".join(" ".join(lines).split())
        return [detail in text for detail in details], lines

    assert seen(None)[0] == [True, True, True]
    present, lines = seen(24)
    assert present == [True, True, True]
    assert "  reward/mean ▁█ 0 -> 1  eval/pass@1 0.1 -> 0.5" in lines
    assert sum("spot" in line and "ready" in line for line in lines) >= 7
    order = []
    for height in range(24, 8, -1):
        present, lines = seen(height)
        assert len(lines) <= height
        order.append(sum(present))
        assert present == [True] * sum(present) + [False] * (3 - sum(present)), "the last ones are left out first"
        assert ("took 10 s" in " ".join(lines)) is present[1]
    assert order == sorted(order, reverse=True)
    assert order[-1] == 0


def test_view_of_an_ended_job_has_no_last_step() -> None:
    ended = JobSnapshot(job("completed", 6), last_step=last_step_time([step(6, 8.0)], 6), reserved_only=RESERVED_ONLY)
    text = " ".join(" ".join(drawn(snapshot([ended], []))).split())
    assert "step 6 took" not in text
    assert "the reserved workers alone" in text


@pytest.mark.parametrize(("width", "height"), [(40, 12), (80, 24), (120, 40), (200, 10)])
@pytest.mark.parametrize("n_workers", [3, 50])
def test_view_fits_every_terminal(width: int, height: int, n_workers: int) -> None:
    wait = {"for": "the store", "because": "pull " * 30, "since": "2026-01-01T00:00:00+00:00"}
    jobs = [running(id=f"job-{i}", warnings=["w" * 30 + " x" * 60]) for i in range(6)]
    for each in jobs:
        each.last_step, each.reserved_only = last_step_time([step(6, 8.0)], 6), RESERVED_ONLY
    workers = [worker(f"w-{i}", waiting=wait) for i in range(n_workers)]
    lines = drawn(snapshot(jobs, workers, target_workers=5), width, height)
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
