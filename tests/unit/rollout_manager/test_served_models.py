"""The models that a job names: jobs of their own, which share its state, its reserved workers and its window."""

from __future__ import annotations

from typing import Any

import pytest

from rlboost.services.rollout_manager.domain.apply_messages import apply_message
from rlboost.services.rollout_manager.domain.decide import Demand, decide, fair_shares
from rlboost.services.rollout_manager.domain.effects import Deliver, Now, Send
from rlboost.services.rollout_manager.domain.jobs import Job
from rlboost.services.rollout_manager.domain.wait_status import job_wait_status
from rlboost.services.rollout_manager.domain.windows import StepSnapshot, Window
from rlboost.services.rollout_manager.domain.world import World
from rlboost.shared.job.base import served_jobs
from rlboost.shared.messages import (
    FINISH_STOP,
    Drain,
    JobCommand,
    JobReport,
    JobState,
    Message,
    Resume,
    SampleDropped,
    Suspend,
    UseVersion,
    WorkerEvent,
)
from rlboost.shared.streams import names
from rlboost.shared.streams.bus import START
from tests.support.builders import (
    group_id,
    group_requested,
    heartbeat,
    job_created,
    job_spec,
    token_frame,
    weights_committed,
    worker_joined,
)
from tests.support.jobs import job_file
from tests.support.manager_rig import ManagerRig

MODELS = {"judge": {"model": "judges/small"}}
JUDGE = "j.judge"


class Fleet:
    """A world with a job `j`, its judge, and one worker."""

    def __init__(self, role: str) -> None:
        self.world, self.mono, self._entries = World(lease_s=1e9), 1.0, 0
        spec = job_spec(models=MODELS)
        self.apply(job_created(spec=spec))
        for job_id, served in served_jobs("j", spec).items():
            self.world.jobs.add(Job(job_id, 2, served, created_at=0.0))
        self.apply(JobReport(job_id="j", state="running", step=0), worker_joined("w", role=role))
        self.apply(weights_committed(), weights_committed(JUDGE))
        self.serve("", state="joining")

    def apply(self, *messages: Message) -> None:
        for message in messages:
            self._entries += 1
            apply_message(self.world, message, f"{self._entries}-0", Now(self.mono, 1000.0 + self.mono))

    def decide(self) -> list[Message]:
        """Return what the worker is commanded after a while."""
        self.mono += 2.0
        sent = decide(self.world, Now(self.mono, 1000.0 + self.mono), [])
        return [e.message for e in sent if isinstance(e, Send) and isinstance(e.message, UseVersion | Resume | Suspend)]

    def serve(self, job_id: str, state: str = "ready") -> None:
        self.apply(heartbeat("w", job_id=job_id, version=0 if job_id else -1, state=state))

    def request(self, job_id: str) -> int:
        no = self.world.jobs[job_id].record.no
        group = group_id(job_no=no)
        self.apply(group_requested(group=group, job_id=job_id, n=1))
        return group

    def finish(self, sample: int) -> None:
        attempt = self.world.ledger.samples[sample].attempt
        self.apply(token_frame([(sample, attempt, 0, 2, 0, FINISH_STOP)], worker="w"))


def use(job_id: str) -> UseVersion:
    return UseVersion(job_id=job_id, version=0)


def test_only_worker_alternates_between_a_job_and_its_judge() -> None:
    fleet = Fleet("preemptible")
    sample = fleet.request("j")
    assert fleet.decide() == [use("j")]
    fleet.serve("j")
    fleet.decide()
    question = fleet.request(JUDGE)
    assert fleet.decide() == [], "training comes first"
    fleet.finish(sample)
    assert use(JUDGE) in [*fleet.decide(), *fleet.decide()]
    fleet.serve(JUDGE)
    fleet.decide()
    fleet.finish(question)
    fleet.apply(group_requested(group=group_id(1), job_id="j", n=1))
    assert use("j") in [*fleet.decide(), *fleet.decide()]


def test_reserved_worker_judges_before_it_is_suspended() -> None:
    fleet = Fleet("reserved")
    sample = fleet.request("j")
    assert fleet.decide() == [use("j"), Resume(step=0)]
    fleet.serve("j")
    fleet.decide()
    question = fleet.request(JUDGE)
    fleet.finish(sample)
    assert [*fleet.decide(), *fleet.decide()] == [use(JUDGE)]
    fleet.serve(JUDGE)
    fleet.decide()
    fleet.finish(question)
    assert [*fleet.decide(), *fleet.decide()] == [use("j"), Suspend(step=0)]


def test_window_reopens_for_a_question_that_comes_late() -> None:
    fleet = Fleet("reserved")
    sample = fleet.request("j")
    fleet.decide()
    fleet.serve("j")
    fleet.decide()
    fleet.finish(sample)
    assert Suspend(step=0) in [*fleet.decide(), *fleet.decide()]
    fleet.serve("j", state="suspended")
    fleet.decide()
    fleet.request(JUDGE)
    assert [*fleet.decide(), *fleet.decide()] == [use(JUDGE), Resume(step=0)]


def test_job_without_a_budget_leaves_no_worker_to_an_idle_judge() -> None:
    fleet = Fleet("preemptible")
    fleet.request("j")
    assert fleet.decide() == [use("j")]
    fleet.serve("j")
    fleet.world.jobs["j"].audit.cost.budget_reached = True
    sent = decide(fleet.world, Now(9.0, 1009.0), [])
    assert [effect.message for effect in sent if isinstance(effect, Send) and isinstance(effect.message, Drain)]
    assert fleet.world.jobs["j"].progress.fleet.preemptible == 0, "reserved workers generate"


def test_reserved_workers_answer_what_spot_workers_are_no_longer_paid_for() -> None:
    window = Window(0, 0.0, phase="ended")
    counts: dict[str, Any] = {"requested": 8, "reserved": 1, "reserved_awake": 0}
    counts |= {"preemptible": 1, "preemptible_ready": 1}
    assert window.advance(StepSnapshot(1.0, 0, of_models=2, **counts)) is None, "a spot worker does"
    assert window.advance(StepSnapshot(1.0, 3, of_models=2, unpaid=2, **counts)) is None, "samples come first"
    assert window.advance(StepSnapshot(1.0, 0, of_models=2, unpaid=2, **counts)) == "reopen"
    assert window.uses_reserved(preemptible=1)


def test_judge_gets_its_share_of_several_workers() -> None:
    demands = [Demand("j", 1.0, 100, 50), Demand(JUDGE, 0.5, 100, 50)]
    assert [fair_shares(demands, n, batch_cap=8.0) for n in (1, 2, 3, 6)] == [
        {"j": 1, JUDGE: 0},
        {"j": 2, JUDGE: 0},
        {"j": 2, JUDGE: 1},
        {"j": 4, JUDGE: 2},
    ]
    few = [demands[0], Demand(JUDGE, 0.5, 4, 4)]
    assert fair_shares(few, 6, batch_cap=8.0) == {"j": 5, JUDGE: 1}, "no more than it can fill"


def test_questions_that_no_worker_can_answer_are_dropped_with_the_reason() -> None:
    fleet = Fleet("preemptible")
    question = fleet.request(JUDGE)
    fleet.decide()
    assert fleet.world.fleet.workers["w"].job == JUDGE
    refused = {"version": 0, "reason": "no such architecture"}
    fleet.apply(WorkerEvent(worker="w", job_id=JUDGE, kind="weights_refused", at=1.0, fields=refused))
    effects = decide(fleet.world, Now(9.0, 1009.0), [])
    delivered = [effect.message for effect in effects if isinstance(effect, Deliver)]
    dropped = [message for message in delivered if isinstance(message, SampleDropped)]
    assert [(drop.sample, drop.reason) for drop in dropped] == [
        (question, "version 0 does not load on w: no such architecture")
    ]


def test_wait_of_a_pending_model_names_its_job() -> None:
    world = World(lease_s=1.0)
    spec = job_spec(models=MODELS)
    world.jobs.add(Job("j", 1, spec, created_at=0.0))
    world.jobs.add(Job(JUDGE, 2, served_jobs("j", spec)[JUDGE], created_at=0.0))
    wait = job_wait_status(world.jobs, world.fleet, world.jobs[JUDGE])
    assert wait is not None
    assert (wait["for"], wait["because"]) == ("its job", "a trainer takes j first")


@pytest.fixture
async def rig() -> ManagerRig:
    rig = ManagerRig()
    assert await rig.manager.try_lead()
    answer = await rig.http.post("/jobs", json={**job_file(), "models": MODELS})
    rig.job = answer.json()["id"]
    return rig


async def states(rig: ManagerRig) -> dict[str, Any]:
    return {job["id"].removeprefix(rig.job): job["state"] for job in (await rig.http.get("/jobs")).json()}


async def test_models_have_the_state_of_their_job(rig: ManagerRig) -> None:
    assert await states(rig) == {"": "pending", ".judge": "pending"}
    each: tuple[JobState, ...] = ("running", "paused", "completed")
    for state in each:
        await rig.report(state)
        assert await states(rig) == {"": state, ".judge": state}
    assert await rig.manager.try_lead(), "it rebuilds its world"
    assert await states(rig) == {"": "completed", ".judge": "completed"}


async def test_version_of_a_model_is_known_to_a_leader_whose_stream_has_lost_it(rig: ManagerRig) -> None:
    await rig.bus.append(names.WEIGHTS_COMMITTED, weights_committed(rig.job, version=7))
    assert await rig.manager.try_lead(), "it rebuilds its world"
    assert rig.manager.world.jobs.committed_version(f"{rig.job}.judge") == 0


async def test_model_of_a_job_is_commanded_with_it_only(rig: ManagerRig) -> None:
    answer = await rig.http.post(f"/jobs/{rig.job}.judge/cancel")
    assert answer.status_code == 409
    assert f"is a model of job {rig.job} and cancelled with it: cancel that job" in answer.text
    assert (await rig.http.post(f"/jobs/{rig.job}/cancel")).status_code == 202
    await rig.manager.turn()
    assert await states(rig) == {"": "cancelled", ".judge": "cancelled"}


async def test_cost_of_a_job_names_those_of_its_models(rig: ManagerRig) -> None:
    cost = (await rig.http.get(f"/jobs/{rig.job}/cost")).json()
    assert cost["models"] == [{"job_id": f"{rig.job}.judge", "dollars": 0.0, "hours": 0.0, "tokens": 0}]


@pytest.fixture
async def team() -> ManagerRig:
    rig = ManagerRig()
    assert await rig.manager.try_lead()
    file = {name: value for name, value in job_file().items() if name != "reward"}
    policies = {"verifier": {"model": "m"}}
    answer = await rig.http.post("/jobs", json={**file, "agent": {"function": "a:b"}, "policies": policies})
    assert answer.status_code == 201, answer.text
    rig.job = answer.json()["id"]
    return rig


async def commands(rig: ManagerRig, stream: str) -> list[tuple[str, str]]:
    entries = await rig.bus.read({stream: START})
    return [(entry.message.action, entry.message.job_id) for entry in entries if isinstance(entry.message, JobCommand)]


async def test_trainers_are_commanded_to_take_each_policy_of_a_job(team: ManagerRig) -> None:
    jobs = [team.job, f"{team.job}.verifier"]
    assert await commands(team, names.JOB_COMMANDS) == [("create", job) for job in jobs]
    assert await states(team) == {"": "pending", ".verifier": "pending"}
    assert (await team.http.get(f"/jobs/{jobs[1]}/spec")).json()["agent"]["leader"] == team.job


async def test_policy_of_a_job_is_commanded_with_it_only(team: ManagerRig) -> None:
    jobs = [team.job, f"{team.job}.verifier"]
    answer = await team.http.post(f"/jobs/{jobs[1]}/cancel")
    assert answer.status_code == 409
    assert f"is a policy of job {team.job} and cancelled with it: cancel that job" in answer.text
    for action in ("pause", "resume", "cancel"):
        assert (await team.http.post(f"/jobs/{team.job}/{action}")).status_code == 202
        await team.manager.turn()
    expected = [(action, job) for action in ("pause", "resume", "cancel") for job in jobs]
    assert await commands(team, names.JOB_CONTROLS) == expected


async def test_policy_whose_job_has_failed_can_be_cancelled(team: ManagerRig) -> None:
    await team.report("failed")
    assert (await team.http.post(f"/jobs/{team.job}.verifier/cancel")).status_code == 202


async def test_deadline_of_a_policy_is_refused_as_that_of_its_job() -> None:
    rig = ManagerRig()
    assert await rig.manager.try_lead()
    file = {name: value for name, value in job_file().items() if name != "reward"} | {"agent": {"function": "a:b"}}
    verifier = {"model": "m", "elastic": {"finish_by": "2100-01-01T00:00:00Z"}}
    answer = await rig.http.post("/jobs", json={**file, "policies": {"verifier": verifier}})
    assert answer.status_code == 409
    assert "elastic.finish_by needs a manager that can start workers" in answer.text
