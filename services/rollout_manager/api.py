"""The REST API: routes over the manager's world and the bus."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Collection, Iterable
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Body, Depends, FastAPI, Header
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute

from rlboost.services.rollout_manager.access.token_table import TokenTable
from rlboost.services.rollout_manager.app import Manager
from rlboost.services.rollout_manager.domain.jobs.record import Job, QuarantinedJob
from rlboost.services.rollout_manager.domain.jobs.wait_status import job_phase, job_wait_status, redis_wait
from rlboost.services.rollout_manager.fleet_scaler import FleetScaler
from rlboost.services.rollout_manager.routes.fleet import add_fleet
from rlboost.services.rollout_manager.routes.history import add_events, add_history, find_job, readable_job
from rlboost.services.rollout_manager.routes.leader import create_as_leader, leader_only, not_leading_reason, write
from rlboost.services.rollout_manager.routes.scrape_targets import ScrapeTarget, scrape_targets
from rlboost.services.rollout_manager.routes.timestamps import iso_times
from rlboost.services.rollout_manager.routes.tokens import add_token_routes
from rlboost.services.rollout_manager.routes.weights import weights_overview
from rlboost.services.rollout_manager.settings import Settings
from rlboost.shared.errors import BusUnavailable, StoreUnavailable
from rlboost.shared.http.authentication import needs
from rlboost.shared.http.documented import GUARDED_ERRORS, Responses, problems
from rlboost.shared.http.guard import Guard
from rlboost.shared.http.problem import Problem
from rlboost.shared.http.server import ErrorFormat, create_app
from rlboost.shared.http.token_signature import metrics_path, peer_key
from rlboost.shared.ids import MAX_JOBS, new_token
from rlboost.shared.job.command_signature import signed
from rlboost.shared.job.spec import InvalidJob, JobSpec, parse
from rlboost.shared.job.spec import to_json as spec_to_json
from rlboost.shared.messages import JobCommand, JobState
from rlboost.shared.streams import names
from rlboost.shared.streams.bus import Append, Bus

JOB_COMMANDS_MAX_LEN = 100_000
IDEMPOTENCY_TTL_S = 24 * 3600.0
IDEMPOTENCY_KEY_CHARACTERS = 255

Action = Literal["pause", "resume", "cancel"]
_STATES: dict[Action, JobState] = {"pause": "paused", "resume": "running", "cancel": "cancelled"}
"""The state that a command leads to."""


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

    """
    token = settings.token.get_secret_value()
    tokens = TokenTable(bus, token, settings.join_token.get_secret_value())
    guard = Guard(tokens.authenticate)
    router = guard.router(
        prefix="/v1", responses=GUARDED_ERRORS | _STANDBY, dependencies=[Depends(leader_only(manager, token))]
    )
    _add_jobs(router, manager, bus, token)
    add_history(router, manager, bus)
    add_events(router, manager, bus)
    add_fleet(router, manager, settings, scaler or FleetScaler(manager, bus, settings))
    _add_weights(router, manager, bus, settings)
    _add_scrape_targets(router, manager, bus, metrics_path(peer_key(token)))
    add_token_routes(router, manager, tokens)
    own_paths = {route.path.split("/")[2] for route in router.routes if isinstance(route, APIRoute)}
    for add_routes in extensions:
        add_routes(router, manager, bus, settings)
    error_format = error_format_for_other_paths(own_paths) if error_format_for_other_paths else None
    app = create_app(
        "RLBoost", guard=guard, not_ready_reason=lambda: not_leading_reason(manager), error_format=error_format
    )
    app.include_router(router)
    return app


# --- jobs -------------------------------------------------------------------------------------------------------------


def _add_jobs(router: APIRouter, manager: Manager, bus: Bus, token: str) -> None:
    creating = asyncio.Lock()  # two requests with one idempotency key may be concurrent

    @router.post("/jobs", status_code=201, tags=["jobs"], responses=problems(409))
    @needs("job")
    async def create_job(
        raw: Annotated[dict[str, Any], Body()],
        idempotency_key: Annotated[str | None, Header(max_length=IDEMPOTENCY_KEY_CHARACTERS)] = None,
    ) -> JSONResponse:
        """Create a job from a job file as JSON; a repeated `Idempotency-Key` returns the same job."""
        spec = _validated(raw)
        job_id = f"{spec.name}-{new_token(3)}"
        if idempotency_key:
            created = names.job_created(idempotency_key)
            await bus.acquire(created, job_id, IDEMPOTENCY_TTL_S)
            job_id = (await bus.lease_values([created]))[0] or job_id
        async with creating:
            if quarantined := manager.world.quarantined.get(job_id):  # created by an earlier request with the same key
                return JSONResponse({"id": quarantined.id, "state": quarantined.state}, 201)
            job = manager.world.jobs.get(job_id) or await _create(manager, bus, token, job_id, spec)
        return JSONResponse({"id": job.id, "state": job.state}, 201)

    @router.get("/jobs", tags=["jobs"])
    @needs("read")
    async def list_jobs() -> list[dict[str, Any]]:
        """Return every job, oldest first: state, step, current phase and wait, error."""
        jobs: list[Job | QuarantinedJob] = [*manager.world.jobs.values(), *manager.world.quarantined.values()]
        jobs.sort(key=lambda job: job.no)
        return [_public(manager, job) for job in jobs]

    @router.get("/jobs/{job_id}", tags=["jobs"], responses=problems(404))
    @needs("read")
    async def show_job(job_id: str) -> dict[str, Any]:
        """Return one job: state, step, metrics of its last step, current phase and wait, error."""
        return _public(manager, find_job(manager, job_id))

    @router.get("/jobs/{job_id}/spec", tags=["jobs"], responses=_JOB)
    @needs("read")
    async def job_file(job_id: str) -> dict[str, Any]:
        """Return the job's resolved job file."""
        found: dict[str, Any] = json.loads(spec_to_json(readable_job(manager, job_id).spec))
        return found

    newest = NewestCommands(lambda: manager.world.jobs)
    for action in _STATES:
        _add_action(router, manager, token, action, newest)


class NewestCommands:
    """The newest command of each job that was commanded."""

    def __init__(self, jobs: Callable[[], Collection[str]]) -> None:
        """Start without commands; `jobs` returns the ids of the jobs that exist."""
        self._jobs = jobs
        self.by_job: dict[str, Action] = {}

    def add(self, job_id: str, action: Action) -> None:
        """Replace a job's newest command, and forget those of jobs that no longer exist."""
        self.by_job[job_id] = action
        for forgotten in self.by_job.keys() - set(self._jobs()):
            del self.by_job[forgotten]


def _add_action(router: APIRouter, manager: Manager, token: str, action: Action, newest: NewestCommands) -> None:
    """Add the route of an action.

    A client may repeat a command for days: what has already had its effect is not written to the stream again.
    """
    path, name, meaning = f"/jobs/{{job_id}}/{action}", f"{action}_job", f"{action.capitalize()} the job."

    @router.post(path, status_code=202, tags=["jobs"], name=name, description=meaning, responses=_JOB)
    @needs("job")
    async def act(job_id: str) -> dict[str, Any]:
        job = readable_job(manager, job_id)
        if not job.allows(action):
            raise Problem(409, "Conflict", f"job {job_id} is {job.state}: it cannot {action}")
        if not (newest.by_job.get(job.id) == action and job.state == _STATES[action]):
            command = JobCommand(command_id=new_token(8), action=action, job_id=job.id, job_no=job.no)
            await write(manager, [Append(names.JOB_COMMANDS, signed(command, token), JOB_COMMANDS_MAX_LEN)])
            newest.add(job.id, action)
        return {"id": job.id, "state": job.state}


def _validated(raw: dict[str, Any]) -> JobSpec:
    try:
        return parse(raw)
    except InvalidJob as error:
        fields = [{"field": field, "error": text} for field, text in error.fields]
        raise Problem(422, "Invalid job", str(error), errors=fields) from error


async def _create(manager: Manager, bus: Bus, token: str, job_id: str, spec: JobSpec) -> Job:
    no = await bus.increment(names.JOB_COUNTER)
    if no >= MAX_JOBS:
        detail = f"this system has had {no} jobs, the most it can number: start a new one with an empty Redis"
        raise Problem(409, "Too many jobs", detail)
    job = Job(job_id, no, spec, created_at=time.time())
    command = JobCommand(
        command_id=new_token(8), action="create", job_id=job_id, job_no=no, spec_json=spec_to_json(spec)
    )
    await create_as_leader(manager, job, Append(names.JOB_COMMANDS, signed(command, token), JOB_COMMANDS_MAX_LEN))
    return manager.world.jobs.get(job_id, job)


def _public(manager: Manager, job: Job | QuarantinedJob) -> dict[str, Any]:
    phase = waiting = None
    if isinstance(job, Job) and not job.ended:
        phase = job_phase(manager.world, job)
        waiting = redis_wait(manager.turn_began_at, time.time()) or job_wait_status(manager.world, job)
    return iso_times({**job.public(), "phase": phase, "waiting": waiting})


# --- weights ----------------------------------------------------------------------------------------------------------


def _add_weights(router: APIRouter, manager: Manager, bus: Bus, settings: Settings) -> None:
    @router.get("/weights", tags=["weights"])
    @needs("read")
    async def weights() -> dict[str, Any]:
        """Return the versions of every job's weights, oldest first, and the workers that serve them to others."""
        url, token = settings.weight_store_url, settings.token.get_secret_value()
        try:
            return await weights_overview(bus, url, token, manager.world.fleet.workers.values())
        except StoreUnavailable as error:
            raise Problem(503, "No weight store", f"{error}: start it, then try again") from error
        except BusUnavailable as error:
            raise Problem(503, "No Redis", f"{error}: try again") from error


# --- Prometheus -------------------------------------------------------------------------------------------------------


def _add_scrape_targets(router: APIRouter, manager: Manager, bus: Bus, path: str) -> None:
    @router.get("/scrape-targets", tags=["health"])
    @needs("read")
    async def targets() -> list[ScrapeTarget]:
        """Return the addresses of the workers' metrics, for Prometheus's HTTP service discovery."""
        return await scrape_targets(bus, manager.world.fleet.workers, path)
