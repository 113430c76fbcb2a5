"""The REST API: routes over the manager's world and the bus."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Awaitable, Callable, Collection, Iterable
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from fastapi import APIRouter, Body, Depends, FastAPI, Header, Query, Request
from fastapi.responses import FileResponse, JSONResponse
from fastapi.routing import APIRoute
from fastapi.staticfiles import StaticFiles
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from rlboost.services.rollout_manager.access import TokenTable
from rlboost.services.rollout_manager.api import external, fleet, history
from rlboost.services.rollout_manager.api import tokens as access_tokens
from rlboost.services.rollout_manager.api.leader import (
    AsLeader,
    OneJob,
    Routes,
    TheBus,
    TheManager,
    TheSettings,
    as_leader,
    find_job,
    iso_times,
    leader_only,
    not_leading_reason,
    of_app,
)
from rlboost.services.rollout_manager.domain.jobs import Job
from rlboost.services.rollout_manager.domain.wait_status import job_phase, job_wait_status, redis_wait
from rlboost.services.rollout_manager.fleet_loops import FleetScaler
from rlboost.services.rollout_manager.loop import Manager
from rlboost.services.rollout_manager.ports import FindModelFolder, TokenizationError
from rlboost.services.rollout_manager.session_offers import Named, SessionOffers
from rlboost.services.rollout_manager.settings import Settings
from rlboost.shared.http.access import signed
from rlboost.shared.http.guard import Guard, principal_of
from rlboost.shared.http.problem import GUARDED_ERRORS, Problem, Responses, problems
from rlboost.shared.http.server import ErrorFormat, create_app
from rlboost.shared.ids import MAX_JOBS, new_token
from rlboost.shared.job.agent import MAX_REWARDS, SessionId, turn_of_answer
from rlboost.shared.job.base import ServedJob, served_id, served_jobs
from rlboost.shared.job.spec import AnyJob, InvalidJob, RlJob, parse_any, policy_jobs
from rlboost.shared.job.spec import to_json as spec_to_json
from rlboost.shared.messages import JobCommand, SessionRewarded
from rlboost.shared.page import STATIC
from rlboost.shared.streams import names
from rlboost.shared.streams.bus import Append, Bus, HashSet, Op
from rlboost.shared.user_code import MAX_REWARD

# --- web page ---------------------------------------------------------------------------------------------------------
#
# Static files without data: the page reads the REST API with the token that its user gives.


_HEADERS = {
    # Texts of jobs, such as completions, are untrusted: only the page's own scripts may run.
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cache-Control": "no-cache",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


def add_page(app: FastAPI) -> None:
    """Serve the page at `/` and its files below `/page`; neither needs a token."""

    @app.get("/", include_in_schema=False)
    async def page() -> FileResponse:
        return FileResponse(STATIC / "index.html", headers=_HEADERS)

    app.mount("/page", StaticFiles(directory=STATIC), name="page")


# --- app --------------------------------------------------------------------------------------------------------------


JOB_CONTROLS_MAX_LEN = 100_000
MAX_BODY_BYTES = 1 << 20
"""Limit on one request's body, above any job file: parsing one blocks the manager's loop."""
IDEMPOTENCY_TTL_S = 24 * 3600.0
IDEMPOTENCY_KEY_CHARACTERS = 255

MAX_PROFILED_STEPS = 10
"""Steps of one profile."""

Action = Literal["pause", "resume", "cancel"]
_DONE: dict[Action, str] = {"pause": "paused", "resume": "resumed", "cancel": "cancelled"}


_STANDBY: Responses = {307: {"description": "a standby manager: the leader's address is in `Location`"}}
_JOB = problems(404, 409)

Extension = Callable[[APIRouter, Manager, Bus, Settings], None]
"""Adds routes to the API."""


def build(
    manager: Manager,
    bus: Bus,
    settings: Settings,
    extensions: Iterable[Extension] = (),
    error_format_for_other_paths: Callable[[Collection[str]], ErrorFormat] | None = None,
    scaler: FleetScaler | None = None,
    find_model_folder: FindModelFolder | None = None,
) -> FastAPI:
    """Return the manager's HTTP app.

    Args:
        manager: answers requests while it leads.
        bus: the broker.
        settings: the manager's.
        extensions: add routes under `/v1`.
        error_format_for_other_paths: takes the first parts of this module's paths under `/v1`; returns the format of
            the errors of all other routes.
        scaler: decides the number of spot workers; one without a provider when None.
        find_model_folder: finds the folders of models; without it each is a path.

    """
    tokens = TokenTable(bus, settings.token.get_secret_value(), settings.join_token.get_secret_value())
    guard = Guard(tokens.authenticate)
    router = guard.router(
        prefix="/v1",
        max_body_bytes=MAX_BODY_BYTES,
        responses=GUARDED_ERRORS | _STANDBY,
        dependencies=[Depends(leader_only)],
    )
    for module in (sys.modules[__name__], history, external, fleet, access_tokens):
        module.ROUTES.add_to(router)
    own_paths = {route.path.split("/")[2] for route in router.routes if isinstance(route, APIRoute)}
    for add_routes in extensions:
        add_routes(router, manager, bus, settings)
    error_format = error_format_for_other_paths(own_paths) if error_format_for_other_paths else None
    app = create_app(
        "RLBoost", guard=guard, not_ready_reason=lambda: not_leading_reason(manager), error_format=error_format
    )
    app.state.manager, app.state.bus, app.state.settings, app.state.tokens = manager, bus, settings, tokens
    app.state.offers = SessionOffers(manager, bus, settings.token.get_secret_value())
    app.state.scaler = scaler or FleetScaler(manager, bus, settings)
    app.state.followers = history.EventFollowers(bus)
    app.state.creating = asyncio.Lock()
    app.state.find_model_folder = find_model_folder or _path
    app.state.external_reads = asyncio.Semaphore(external.MAX_READS)
    app.include_router(router)
    return app


# --- jobs -------------------------------------------------------------------------------------------------------------


ROUTES = Routes()


@ROUTES("POST", "/jobs", "job", "jobs", status_code=201, responses=problems(409))
async def create_job(
    raw: Annotated[dict[str, Any], Body()],
    request: Request,
    manager: TheManager,
    bus: TheBus,
    settings: TheSettings,
    idempotency_key: Annotated[str | None, Header(max_length=IDEMPOTENCY_KEY_CHARACTERS)] = None,
) -> JSONResponse:
    """Create a job from a job file as JSON; a repeated `Idempotency-Key` returns the same job.

    Refused with 409 if that job has another file.
    """
    spec = _validated(raw)
    for one in (spec, *policy_jobs("", spec).values()):
        _check_deadline(one, settings)
    job_id = f"{spec.name}-{new_token(3)}"
    if idempotency_key:
        created = names.job_created(idempotency_key)
        await bus.acquire(created, job_id, IDEMPOTENCY_TTL_S)
        job_id = (await bus.lease_values([created]))[0] or job_id
    async with request.app.state.creating:  # two requests with one idempotency key may be concurrent
        known = manager.world.jobs.get(job_id)  # created by an earlier request with the same key
        if known and known.record.is_file_readable and known.record.spec != spec:
            detail = f"this Idempotency-Key has created job {job_id} from another job file: use a new key"
            raise Problem(409, "Another job file", detail)
        token = settings.token.get_secret_value()
        job = known.record if known else await _create(manager, bus, token, job_id, spec)
    return JSONResponse({"id": job.id, "state": job.state}, 201)


def _check_deadline(spec: AnyJob, settings: Settings) -> None:
    """Refuse a deadline that is over, or that this manager can do nothing for."""
    finish_by = getattr(spec.elastic, "finish_by", None)
    if finish_by is None:
        return
    if not settings.pools:
        detail = (
            "elastic.finish_by needs a manager that can start workers: set RLBOOST_MANAGER_POOLS, start with 'rlboost "
            "up --autoscale N', or remove it"
        )
        raise Problem(409, "No pools", detail)
    if finish_by.timestamp() <= time.time():
        raise Problem(422, "Deadline over", f"elastic.finish_by: {finish_by.isoformat()} is over: give a later time")


@ROUTES("GET", "/jobs", "read", "jobs")
async def list_jobs(manager: TheManager) -> list[dict[str, Any]]:
    """Return every job, oldest first: state, step, current phase and wait, error."""
    jobs = sorted((job.record for job in manager.world.jobs.values()), key=lambda job: job.no)
    return [_public(manager, job) for job in jobs]


@ROUTES("GET", "/jobs/{job_id}", "read", "jobs", responses=problems(404))
async def show_job(job: OneJob, manager: TheManager) -> dict[str, Any]:
    """Return one job: state, step, metrics of its last step, current phase and wait, error."""
    return _public(manager, job)


@ROUTES("GET", "/jobs/{job_id}/spec", "read", "jobs", responses=_JOB)
async def job_file(job: OneJob) -> dict[str, Any]:
    """Return the job's resolved job file."""
    if not job.is_file_readable:
        raise Problem(409, "Unreadable job", job.error)
    found: dict[str, Any] = json.loads(spec_to_json(job.spec))
    return found


async def _path(_: str, model: str) -> str:
    return model


@ROUTES("GET", "/jobs/{job_id}/tokenizer", "worker", "jobs", responses=_JOB)
async def tokenizer(job: OneJob, find: Annotated[FindModelFolder, of_app("find_model_folder")]) -> FileResponse:
    """Return the `tokenizer.json` of the job's model, with which workers follow the grammars of structured outputs."""
    try:
        file = Path(await find(job.id, job.spec.model)) / "tokenizer.json"
    except TokenizationError as error:
        raise Problem(404, "No tokenizer", str(error)) from error
    if not await asyncio.to_thread(file.is_file):
        raise Problem(404, "No tokenizer", f"there is no file {file} on the manager's machine")
    return FileResponse(file, media_type="application/json")


async def _act(
    job: OneJob, manager: TheManager, settings: TheSettings, write: AsLeader
) -> Callable[[Action], Awaitable[dict[str, Any]]]:
    async def act(action: Action) -> dict[str, Any]:
        agent = job.spec.agent if isinstance(job.spec, RlJob) else None
        owner = job.spec.job if isinstance(job.spec, ServedJob) else agent.leader if agent is not None else ""
        if manager.world.jobs.get_active(owner) is not None:
            what = "policy" if agent is not None else "model"
            detail = f"{job.id} is a {what} of job {owner} and {_DONE[action]} with it: {action} that job"
            raise Problem(409, "Conflict", detail)
        if not job.allows(action):
            raise Problem(409, "Conflict", f"job {job.id} is {job.state}: it cannot be {_DONE[action]}")
        policies = [served_id(job.id, name) for name in (job.spec.policies if isinstance(job.spec, RlJob) else ())]
        found = [job, *(one.record for one in map(manager.world.jobs.get, policies) if one is not None)]
        due = [one for one in found if not one.ended and one.newest_control != action]
        if due and not job.ended:  # a client may repeat an action for days
            await write([control(one, action, settings.token.get_secret_value()) for one in due])
        return {"id": job.id, "state": job.state}

    return act


Act = Annotated[Callable[[Action], Awaitable[dict[str, Any]]], Depends(_act)]
"""Commands the trainer of the job in the path."""


@ROUTES("POST", "/jobs/{job_id}/pause", "job", "jobs", status_code=202, responses=_JOB)
async def pause_job(act: Act) -> dict[str, Any]:
    """Pause the job."""
    return await act("pause")


@ROUTES("POST", "/jobs/{job_id}/resume", "job", "jobs", status_code=202, responses=_JOB)
async def resume_job(act: Act) -> dict[str, Any]:
    """Resume the job."""
    return await act("resume")


@ROUTES("POST", "/jobs/{job_id}/cancel", "job", "jobs", status_code=202, responses=_JOB)
async def cancel_job(act: Act) -> dict[str, Any]:
    """Cancel the job."""
    return await act("cancel")


@ROUTES("POST", "/jobs/{job_id}/profile", "job", "jobs", status_code=202, responses=_JOB)
async def profile_job(
    job: OneJob, write: AsLeader, steps: Annotated[int, Body(ge=1, le=MAX_PROFILED_STEPS, embed=True)] = 1
) -> dict[str, Any]:
    """Have the trainer record traces of its next steps with torch.profiler, into the job's folder."""
    if job.ended or job.spec.kind in {"external", "served", "eval"}:
        what = f"is {job.state}" if job.ended else f"is of kind {job.spec.kind}"
        raise Problem(409, "Conflict", f"job {job.id} {what}: the trainer service trains nothing to profile")
    await write([HashSet(names.job_profile(job.id), {"steps": str(steps)})])
    return {"id": job.id, "state": job.state, "steps": steps}


def control(job: Job, action: Action, token: str) -> Op:
    """Return the operation that commands the job's trainer."""
    command = JobCommand(command_id=new_token(8), action=action, job_id=job.id, job_no=job.no)
    return Append(names.JOB_CONTROLS, signed(command, token), JOB_CONTROLS_MAX_LEN)


def _validated(raw: dict[str, Any]) -> AnyJob:
    json.dumps(raw, ensure_ascii=False).encode()  # the guard rejects what Redis could not store
    try:
        return parse_any(raw)
    except InvalidJob as error:
        fields = [{"field": field, "error": text} for field, text in error.fields]
        raise Problem(422, "Invalid job", str(error), errors=fields) from error


async def _create(manager: Manager, bus: Bus, token: str, job_id: str, spec: AnyJob) -> Job:
    no = await _number(manager, bus)
    job = Job(job_id, no, spec, created_at=time.time())
    models = [
        Job(served, await _number(manager, bus), served_spec, created_at=job.created_at)
        for served, served_spec in served_jobs(job_id, spec).items()
    ]
    policies = [
        Job(policy, await _number(manager, bus), policy_spec, created_at=job.created_at)
        for policy, policy_spec in policy_jobs(job_id, spec).items()
    ]
    # Trainers of the service take the jobs that are commanded; an external one attaches to a job that exists.
    trained = () if spec.kind == "external" else (job, *policies)
    commands = [
        JobCommand(
            command_id=new_token(8), action="create", job_id=one.id, job_no=one.no, spec_json=spec_to_json(one.spec)
        )
        for one in trained
    ]
    ops = [Append(names.JOB_COMMANDS, signed(command, token)) for command in commands]
    await as_leader(manager.create_job(job, ops, [*models, *policies]))
    known = manager.world.jobs.get(job_id)
    return known.record if known else job


async def _number(manager: Manager, bus: Bus) -> int:
    """Return the number of the next job."""
    no = await bus.increment(names.JOB_COUNTER)
    while manager.world.jobs.numbered(no) is not None:  # Redis has lost its data since that job was numbered
        no = await bus.increment(names.JOB_COUNTER)
    if no >= MAX_JOBS:
        detail = f"this system has had {no} jobs, the most it can number: start a new one with an empty Redis"
        raise Problem(409, "Too many jobs", detail)
    return no


def _public(manager: Manager, job: Job) -> dict[str, Any]:
    phase = waiting = finishes_at = None
    if not job.ended:
        entry = manager.world.jobs[job.id]
        finishes_at = entry.progress.finishes_at
        phase = job_phase(entry)
        waiting = redis_wait(manager.turn_began_at, time.time()) or job_wait_status(
            manager.world.jobs, manager.world.fleet, entry
        )
    return iso_times({**job.public(), "phase": phase, "waiting": waiting, "finishes_at": finishes_at})


# --- Sessions of remote agents ----------------------------------------------------------------------------------------
# What hosts that run agents call: taking sessions, renewing their leases, rewards.


MAX_SESSIONS = 1024
"""Of one request."""
MAX_WAIT_S = 60.0
MAX_TEXT = 4096

Offers = Annotated[SessionOffers, of_app("offers")]


def _answer(text: str) -> str:
    turn_of_answer(text)
    return text


Answer = Annotated[str, AfterValidator(_answer)]


def _named(text: str) -> str:
    Named.parse(text)
    return text


class RenewBody(BaseModel):
    """The sessions that a host runs."""

    model_config = ConfigDict(extra="forbid")

    sessions: Annotated[list[Annotated[str, AfterValidator(_named)]], Field(max_length=MAX_SESSIONS)]


class RewardBody(BaseModel):
    """The end of a session."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    reward: float | None = Field(None, ge=-MAX_REWARD, le=MAX_REWARD)
    rewards: Annotated[
        dict[Answer, Annotated[float, Field(ge=-MAX_REWARD, le=MAX_REWARD)]], Field(max_length=MAX_REWARDS)
    ] = Field({}, description="`id` of an answer: reward of the training row that ends with it, in place of `reward`")
    cost: float = Field(0.0, ge=0, le=MAX_REWARD, description="of the session, such as dollars; not part of the reward")
    infrastructure: str | None = Field(
        None, min_length=1, max_length=MAX_TEXT, description="why it has none; another session begins in its place"
    )

    @model_validator(mode="after")
    def _one_end(self) -> Self:
        if (self.reward is None) == (self.infrastructure is None):
            raise ValueError("give either reward, a finite number, or infrastructure: why there is none")
        if self.rewards and self.reward is None:
            raise ValueError("rewards: a session without a reward has none for its answers: leave them out")
        return self


@ROUTES("POST", "/jobs/{job_id}/sessions/next", "agent", "agents", responses=problems(404, 409, 410))
async def next_sessions(
    job_id: str,
    http: Request,
    manager: TheManager,
    offers: Offers,
    count: Annotated[int, Query(ge=1, le=MAX_SESSIONS)] = 1,
    wait: Annotated[float, Query(ge=0, le=MAX_WAIT_S, description="seconds until an empty answer")] = 30.0,
) -> list[dict[str, Any]]:
    """Take sessions of a job with a remote agent, each for one run of the agent; its id or name names the job."""
    job = _job_named(manager, job_id)
    agent = getattr(job.spec, "agent", None)
    if agent is None or not agent.remote:
        raise Problem(409, "No remote agent", f"job {job.id} offers no sessions: give it agent.remote: true")
    return await as_leader(offers.wait(job, count, wait, http.is_disconnected))


@ROUTES("POST", "/jobs/{job_id}/sessions/renew", "agent", "agents", responses=problems(404))
async def renew_sessions(job_id: str, body: RenewBody, manager: TheManager, offers: Offers) -> dict[str, list[str]]:
    """Renew the leases of the sessions that a host runs; returns those that are over, whose agents must end."""
    job, given = _job_named(manager, job_id), [Named.parse(text) for text in body.sessions]
    over = await as_leader(offers.renew(job, given))
    return {"over": list(map(str, over))}


@ROUTES("POST", "/sessions/{session}/reward", "session", "agents", status_code=204, responses=problems(409))
async def reward_session(session: str, body: RewardBody, http: Request, offers: Offers) -> None:
    """End a session with its own key, once; the same again is accepted."""
    subject = principal_of(http).subject
    if not subject or SessionId.parse(subject).subject != session:
        raise Problem(403, "Forbidden", "this needs the key of the session: a host gets it with the session")
    found = SessionId.parse(subject)
    rewarded = SessionRewarded(
        session=found.sample,
        start=found.start,
        reward=body.reward or 0.0,
        cost=body.cost,
        reason="" if body.infrastructure is None else "infrastructure",
        detail=body.infrastructure or "",
        rewards=tuple((turn_of_answer(answer), reward) for answer, reward in body.rewards.items()),
    )
    await as_leader(offers.reward(found, rewarded))


def _job_named(manager: TheManager, given: str) -> Job:
    """Return the job with this id, or else the newest of this name."""
    named = [job.record for job in manager.world.jobs.values() if job.record.spec.name == given]
    if given in manager.world.jobs or not named:
        return find_job(manager.world.jobs, given)
    return max(named, key=lambda job: job.no)
