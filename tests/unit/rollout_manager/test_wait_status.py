"""What a job waits for, as `status`, `ps`, `top` and `--follow` show it: every stall is named, with its beginning."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest
from prometheus_client import REGISTRY

from rlboost.services.rollout_manager.domain import wait_status
from rlboost.services.rollout_manager.domain.apply_messages import apply_message
from rlboost.services.rollout_manager.domain.effects import Now
from rlboost.services.rollout_manager.domain.wait_status import (
    OVERDUE_S,
    TRAINER_SILENCE_S,
    job_phase,
    job_wait_status,
    overdue_waits,
)
from rlboost.services.rollout_manager.domain.world import World
from rlboost.shared import progress
from rlboost.shared.errors import BusUnavailable
from rlboost.shared.messages import (
    Event,
    JobReport,
    JobState,
    UseVersion,
    Wait,
    WorkerHeartbeat,
    WorkerJoined,
    WorkerLeft,
)
from rlboost.shared.messages.workers import WorkerState
from rlboost.shared.streams import names
from rlboost.shared.streams.bus import START, Delete, Renew
from tests.support.builders import job_created, samples_of, trainer_status
from tests.support.eventually import eventually
from tests.support.manager_rig import ManagerRig
from tests.support.worker_manager import JOB
from tests.support.worker_rig import Rig

NOW = Now(mono=1.0, wall=1000.0)


def wait_of_queued(*states: JobState) -> dict[str, Any]:
    """Return what a pending job waits for; the jobs before it have these states."""
    world = World(lease_s=2.0)
    for number, state in enumerate(states):
        apply_message(world, job_created(f"j-{number}", number), f"{2 * number + 1}-0", NOW)
        apply_message(world, JobReport(job_id=f"j-{number}", state=state, step=0), f"{2 * number + 2}-0", NOW)
    apply_message(world, job_created("queued", len(states)), "99-0", NOW)
    wait = job_wait_status(world.jobs, world.fleet, world.jobs["queued"])
    assert wait is not None
    return wait


def test_a_job_queued_after_a_paused_one_names_it_and_both_ways_out() -> None:
    wait = wait_of_queued("completed", "paused")
    assert wait["for"] == "the trainer, which holds j-1 (paused)"
    assert "'rlboost resume j-1'" in wait["because"]
    assert "'rlboost cancel j-1'" in wait["because"]


def test_a_job_queued_after_running_ones_names_all() -> None:
    wait = wait_of_queued("running", "running")
    assert wait["for"] == "a trainer; they hold j-0 (running), j-1 (running)"
    assert "rlboost" not in wait["because"]


def test_a_job_that_no_trainer_took_points_to_its_events() -> None:
    wait = wait_of_queued()
    assert wait["for"] == "a trainer to take the job"
    assert wait["because"].startswith("no trainer has taken it: check 'rlboost ps'; 'rlboost logs queued'")


# --- stalls of a running job ------------------------------------------------------------------------------------------


class Running:
    """A running job whose trainer waits for samples."""

    def __init__(self) -> None:
        self.world = World(lease_s=2.0)
        apply_message(self.world, job_created("j", 0), "1-0", NOW)
        apply_message(self.world, JobReport(job_id="j", state="running", step=0), "2-0", NOW)
        self.progress = self.world.jobs["j"].progress
        self.renew(NOW.wall)

    def renew(self, at: float) -> None:
        because = "7 of 8 samples have arrived"
        waiting = Wait(subject="samples of step 3", because=because, since=990.0, limit_s=60.0, kind="samples")
        self.progress.on_trainer_status(trainer_status(waiting=waiting, at=at), at)

    def join(self, worker: str, state: WorkerState, waiting: Wait | None = None) -> None:
        joined = WorkerJoined(
            worker=worker, role="preemptible", kind="k", slots=4, host="h", pid=1, price_per_hour=0.0, at=1.0
        )
        heartbeat = WorkerHeartbeat(
            worker=worker,
            state=state,
            job_id="j",
            version=0,
            running=0,
            pending=0,
            tokens_per_s=35.0,
            at=1.0,
            waiting=waiting,
        )
        apply_message(self.world, joined, "3-0", NOW)
        apply_message(self.world, heartbeat, "4-0", NOW)

    def wait(self, after_s: float = 0.0) -> dict[str, Any]:
        """Return what the job waits for once the lease was read again, unchanged."""
        self.progress.on_trainer_status(self.progress.trainer, NOW.wall + after_s)
        wait = job_wait_status(self.world.jobs, self.world.fleet, self.world.jobs["j"])
        assert wait is not None
        return wait


def test_trainer_that_does_not_renew_is_waited_for_since_its_last_renewal() -> None:
    running = Running()
    assert running.wait(after_s=TRAINER_SILENCE_S)["for"] == "samples of step 3"
    wait = running.wait(after_s=TRAINER_SILENCE_S + 0.1)
    assert (wait["for"], wait["since"]) == ("the trainer", NOW.wall)
    running.progress.on_trainer_status(None, NOW.wall + 60.0)
    assert running.wait(after_s=90.0)["since"] == NOW.wall
    running.renew(NOW.wall + 91.0)
    assert running.wait(after_s=91.0)["for"] == "samples of step 3"


def test_trainer_is_not_blamed_before_its_lease_was_read() -> None:
    world = World(lease_s=2.0)
    apply_message(world, job_created("j", 0), "1-0", NOW)
    apply_message(world, JobReport(job_id="j", state="running", step=0), "2-0", NOW)
    assert job_wait_status(world.jobs, world.fleet, world.jobs["j"]) is None


def test_stall_without_a_worker_says_why_the_last_one_is_gone() -> None:
    running = Running()
    running.progress.stalled_since_unix_s = 995.0
    assert running.wait()["because"].endswith("there is no worker; start one with 'rlboost worker join'")
    running.join("w-1", "pulling")
    reason = "failed: the disk of the cache is full: free some space"
    apply_message(running.world, WorkerLeft(worker="w-1", reason=reason, at=1.0), "5-0", NOW)
    wait = running.wait()
    assert (wait["for"], wait["since"]) == ("a worker that is ready with this job's weights", 995.0)
    assert wait["since"] + wait["limit_s"] == 990.0 + 60.0, "when the trainer fails the job"
    assert f"there is no worker (w-1 left: {reason})" in wait["because"]


def test_stall_does_not_show_the_limit_of_another_wait_of_the_trainer() -> None:
    running = Running()
    running.progress.stalled_since_unix_s = 995.0
    rewards = Wait(subject="the rewards", because="a group", since=990.0, limit_s=60.0, kind="rewards")
    running.progress.on_trainer_status(trainer_status(waiting=rewards, at=NOW.wall), NOW.wall)
    assert running.wait()["limit_s"] is None


def test_stall_names_the_longest_wait_of_a_worker() -> None:
    running = Running()
    running.progress.stalled_since_unix_s = 995.0
    slow = Wait(subject="the weight store at http://s", because="pull version 3 of job j", since=991.0, limit_s=600.0)
    running.join("w-1", "pulling", slow.model_copy(update={"since": 993.0}))
    running.join("w-2", "pulling", slow)
    running.join("w-3", "joining")
    assert running.wait()["because"] == (
        "samples are queued and no worker can take them: 1 joining, 2 pulling; "
        "w-2 waits for the weight store at http://s (pull version 3 of job j)"
    )


def test_wait_for_samples_shows_who_generates_and_how_fast() -> None:
    running = Running()
    running.join("w-1", "ready")
    worker = running.world.fleet.workers["w-1"]
    worker.assigned_version = ("j", 3)
    worker.samples = samples_of(1)
    wait = running.wait()
    assert wait["because"] == "7 of 8 samples have arrived; in flight: 1 on w-1 (35 tokens/s)"
    assert (wait["since"], wait["limit_s"]) == (990.0, 60.0)
    worker.samples = samples_of(1200)
    assert running.wait()["because"] == "7 of 8 samples have arrived; in flight: 1,200 on 1 worker (35 tokens/s)"


# --- waits that last too long -----------------------------------------------------------------------------------------


def overdue(world: World, wall: float) -> list[tuple[str, str]]:
    """Return the jobs and subjects of the waits that are overdue at this moment."""
    return [(job, wait["for"]) for job, wait in overdue_waits(world.jobs, world.fleet, Now(mono=1.0, wall=wall))]


def test_stall_that_lasts_too_long_is_reported_once_and_the_next_one_again() -> None:
    running = Running()
    worker = [("j", "a worker that is ready with this job's weights")]
    for since in (1000.0, 2000.0):
        running.progress.stalled_since_unix_s = since
        running.renew(since + OVERDUE_S)
        assert overdue(running.world, since + OVERDUE_S) == []
        running.renew(since + OVERDUE_S + 1.0)
        assert overdue(running.world, since + OVERDUE_S + 1.0) == worker
        assert overdue(running.world, since + OVERDUE_S + 2.0) == []


def test_missing_trainer_is_reported_and_a_wait_with_a_limit_is_not() -> None:
    running = Running()
    late = NOW.wall + OVERDUE_S + 1.0
    running.renew(late)
    assert overdue(running.world, late) == [], "the trainer itself ends its wait for samples"
    running.progress.on_trainer_status(None, late + OVERDUE_S + 1.0)
    assert overdue(running.world, late + OVERDUE_S + 1.0) == [("j", "the trainer")]


def test_pending_job_is_reported_unless_it_is_queued_for_the_trainer_of_another() -> None:
    world = World(lease_s=2.0)
    apply_message(world, job_created("first", 0), "1-0", NOW)
    apply_message(world, job_created("second", 1), "2-0", NOW)
    late = world.jobs["first"].record.created_at + OVERDUE_S + 1.0
    apply_message(world, JobReport(job_id="first", state="running", step=0), "3-0", NOW)
    assert overdue(world, late) == []
    apply_message(world, JobReport(job_id="first", state="completed", step=1), "4-0", NOW)
    assert overdue(world, late) == [("second", "a trainer to take the job")]
    assert overdue(world, late + 1.0) == []


# --- what the trainer does --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "latest", "last_s"),
    [
        ("training", {"time/step_s": 50.0, "time/publish_s": 8.0}, 42.0),
        ("training", {"time/step_s": 50.0}, 50.0),
        ("training", {}, None),
        ("publishing", {"time/step_s": 50.0, "time/publish_s": 8.0}, 8.0),
        ("publishing", {"time/step_s": 50.0}, None),
        ("finishing", {"time/step_s": 50.0, "time/publish_s": 8.0}, None),
    ],
)
def test_phase_shows_how_long_it_took_in_the_last_step(
    name: str, latest: dict[str, float], last_s: float | None
) -> None:
    running = Running()
    job = running.world.jobs["j"]
    job.record.latest = latest
    status = trainer_status(phase=name, step=3, phase_since=990.0)
    running.progress.on_trainer_status(status, NOW.wall)
    assert job_phase(job) == {"name": name, "step": 3, "since": 990.0, "last_s": last_s}
    job.record.step = 4
    ended = job_phase(job)
    assert ended is not None
    assert ended["last_s"] is None, "the metrics are those of this step"


def test_phase_is_unknown_without_a_trainer() -> None:
    running = Running()
    job = running.world.jobs["j"]
    status = trainer_status(step=3)
    running.progress.on_trainer_status(status, NOW.wall)
    assert job_phase(job) is not None
    running.progress.on_trainer_status(status, NOW.wall + TRAINER_SILENCE_S + 0.1)
    assert job_phase(job) is None
    running.progress.on_trainer_status(None, NOW.wall + 4.0)
    assert job_phase(job) is None
    running.progress.on_trainer_status(status, NOW.wall + 5.0)
    apply_message(running.world, JobReport(job_id="j", state="completed", step=4), "5-0", NOW)
    assert job_phase(job) is None


# --- what workers report ----------------------------------------------------------------------------------------------


async def test_heartbeat_has_the_oldest_wait() -> None:
    rig = Rig()
    await rig.connection.send_heartbeat()
    async with (
        rig.waits.on("the weight store", because="pull version 3", limit_s=60.0),
        rig.waits.on("Redis", because="a flush", limit_s=5.0),
    ):
        await rig.connection.send_heartbeat()
    without, waiting = await rig.manager.received(WorkerHeartbeat)
    assert without.waiting is None
    assert waiting.waiting is not None
    assert (waiting.waiting.subject, waiting.waiting.limit_s) == ("the weight store", 60.0)


async def test_worker_waits_for_its_engine_to_start_and_then_to_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_SHOWN_AFTER_S", 0.0)
    rig, may_start = Rig(), threading.Event()
    monkeypatch.setattr(rig.factory, "prepare", may_start.wait)
    running = asyncio.create_task(rig.worker.run({}), name="worker")
    worker = await rig.manager.joined(1)
    reasons = (
        f"it starts, then loads version 0 of job {JOB}",
        f"it loads version 1 of job {JOB}",
        f"it loads version 2 of job {JOB}: the last time took 0 s",
    )
    for version, because in enumerate(reasons):
        if version:
            rig.engine.may_load.clear()
        await rig.manager.send(worker, UseVersion(job_id=JOB, version=version))

        async def reported() -> Wait | None:
            return (await rig.manager.last_heartbeat(worker)).waiting

        wait = await eventually(reported)
        assert wait is not None
        assert (wait.subject, wait.kind, wait.because) == ("the inference engine", "engine", because)
        (rig.engine.may_load if version else may_start).set()
        await rig.manager.until(worker, "ready", version)
        assert (await rig.manager.last_heartbeat(worker)).waiting is None
    rig.stop.set()
    await running


# --- over REST --------------------------------------------------------------------------------------------------------


class System(ManagerRig):
    """Shows the job."""

    async def shown(self) -> dict[str, Any]:
        job: dict[str, Any] = (await self.http.get(f"/jobs/{self.job}")).json()
        return job


@pytest.fixture
async def system() -> AsyncIterator[System]:
    system = System(redis_limit_s=60.0)
    await system.start()
    await system.report("running")
    yield system
    await system.http.aclose()


async def test_status_shows_the_trainers_phase_and_wait_then_its_absence(system: System) -> None:
    lease = names.trainer_lease(system.job)
    waiting = Wait(subject="the rewards", because="a group", since=0.0, limit_s=5.0)
    await system.bus.transact([Renew(lease, trainer_status(waiting=waiting, phase_since=0.0).model_dump_json(), 60.0)])
    system.manager._trainers_checked_at = -math.inf
    await system.manager.turn()
    since = {"since": "1970-01-01T00:00:00+00:00"}
    shown = await system.shown()
    assert shown["waiting"] == waiting.public() | since
    assert shown["phase"] == {"name": "training", "step": 0, "last_s": None} | since
    await system.bus.transact([Delete(lease)])
    system.manager._trainers_checked_at = -math.inf
    await system.manager.turn()
    shown = await system.shown()
    assert (shown["waiting"]["for"], shown["phase"]) == ("the trainer", None)


async def test_trainer_whose_status_cannot_be_read_counts_as_silent(system: System) -> None:
    lease = names.trainer_lease(system.job)
    for value in (trainer_status().model_dump_json(), '{"phase": 1}', "not JSON"):
        await system.bus.transact([Renew(lease, value, 60.0)])
        system.manager._trainers_checked_at = -math.inf
        await system.manager.turn()
        assert system.manager.world.jobs[system.job].progress.trainer == trainer_status()


async def test_wait_that_lasts_too_long_is_counted_and_an_event(system: System) -> None:
    timeouts = REGISTRY.get_sample_value("rlboost_wait_timeouts_total") or 0.0
    system.manager.world.jobs[system.job].progress.stalled_since_unix_s = 1000.0
    await system.bus.transact([Renew(names.trainer_lease(system.job), trainer_status().model_dump_json(), 60.0)])
    for _ in range(2):
        system.manager._trainers_checked_at = -math.inf
        await system.manager.turn()
    assert REGISTRY.get_sample_value("rlboost_wait_timeouts_total") == timeouts + 1
    entries = await system.bus.read({names.job_events(system.job): START})
    kinds = [entry.message.kind for entry in entries if isinstance(entry.message, Event)]
    assert kinds.count("wait_limit_exceeded") == 1


async def test_status_names_redis_before_a_request_to_it_times_out(
    system: System, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wait_status, "LONG_TURN_S", 0.0)
    stop, answers = asyncio.Event(), asyncio.Event()

    async def paused(*_: object, **__: object) -> list[str | None]:
        await answers.wait()
        raise BusUnavailable("the fake broker was paused")

    monkeypatch.setattr(system.bus, "read_with_raw", paused)
    async with asyncio.TaskGroup() as group:
        running = group.create_task(system.manager.run(stop), name="manager")

        async def waiting() -> dict[str, Any] | None:
            wait: dict[str, Any] | None = (await system.shown())["waiting"]
            return wait if wait and wait["for"] == "Redis" else None

        assert "does not answer the manager" in (await eventually(waiting))["because"]
        stop.set()
        answers.set()
        await running
    assert system.manager.turn_began_at is None


async def test_status_during_a_redis_outage_names_redis(system: System) -> None:
    stop = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        running = group.create_task(system.manager.run(stop), name="manager")
        system.bus.down = True

        async def detail() -> str | None:
            answer = await system.http.get(f"/jobs/{system.job}")
            return str(answer.json()["detail"]) if answer.status_code == 503 else None

        shown = await eventually(detail)
        assert shown is not None
        assert shown.startswith("Redis does not answer the manager: ")
        system.bus.down = False
        await eventually(lambda: system.manager.leads)
        assert (await system.http.get(f"/jobs/{system.job}")).status_code == 200
        stop.set()
        await running
