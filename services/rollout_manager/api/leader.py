"""What all routes share: who answers, what a handler uses, and how times are shown.

Only the leading manager answers; a standby redirects to it. Handlers are functions of their modules, which `Routes`
adds to the guarded router of an app, and get what they use as dependencies: a recovery replaces the manager's world, so
they look its owners up in each request.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Depends, Request

from rlboost.services.rollout_manager.access import Write
from rlboost.services.rollout_manager.domain.jobs import Job, Jobs
from rlboost.services.rollout_manager.domain.workers import Fleet
from rlboost.services.rollout_manager.loop import Manager
from rlboost.services.rollout_manager.settings import Settings
from rlboost.shared.errors import Fenced
from rlboost.shared.http.access import Scope, needs
from rlboost.shared.http.problem import Problem
from rlboost.shared.streams.bus import Bus

_Endpoint = TypeVar("_Endpoint", bound=Callable[..., Any])
_Result = TypeVar("_Result")


class Routes:
    """The routes of one module, as declared at its import."""

    def __init__(self) -> None:
        self._routes: list[tuple[str, Callable[..., Any], dict[str, Any]]] = []

    def __call__(
        self, method: str, path: str, scope: Scope, tag: str, **options: Any
    ) -> Callable[[_Endpoint], _Endpoint]:
        """Declare that a function answers these requests, which need a token of this scope."""

        def declare(endpoint: _Endpoint) -> _Endpoint:
            self._routes.append((path, needs(scope)(endpoint), {"methods": [method], "tags": [tag], **options}))
            return endpoint

        return declare

    def add_to(self, router: APIRouter) -> None:
        """Add the routes to a guarded router, which an included router would not guard."""
        for path, endpoint, options in self._routes:
            router.add_api_route(path, endpoint, **options)


# --- dependencies -----------------------------------------------------------------------------------------------------


def of_app(name: str) -> Any:
    """Return the dependency on what `build` has stored in the app's state under a name."""

    async def read(request: Request) -> Any:
        return getattr(request.app.state, name)

    return Depends(read)


TheManager = Annotated[Manager, of_app("manager")]
TheBus = Annotated[Bus, of_app("bus")]
TheSettings = Annotated[Settings, of_app("settings")]


async def _fleet(manager: TheManager) -> Fleet:
    return manager.world.fleet


async def _job(job_id: str, manager: TheManager) -> Job:
    return find_job(manager.world.jobs, job_id)


async def _write(manager: TheManager) -> Write:
    return lambda ops: as_leader(manager.write(ops))


TheFleet = Annotated[Fleet, Depends(_fleet)]
AsLeader = Annotated[Write, Depends(_write)]
"""Applies a client's operations as the leader; raises `Problem` 503 if this manager does not lead."""
OneJob = Annotated[Job, Depends(_job)]
"""The job in the path; the request fails with 404 if there is none."""


def find_job(jobs: Jobs, job_id: str) -> Job:
    """Return a job; raises `Problem` if there is none."""
    job = jobs.get(job_id)
    if job is None:
        raise Problem(404, "No such job", f"there is no job {job_id!r}: list them with 'rlboost ps' or GET /v1/jobs")
    return job.record


# --- leader -----------------------------------------------------------------------------------------------------------


def not_leading_reason(manager: Manager) -> str | None:
    """Return why this manager does not lead, None if it does."""
    if manager.leads:
        return None
    leader = manager.other_leader
    return f"standby; {leader.url} leads" if leader else manager.idle_reason or "the world is not recovered yet"


async def leader_only(request: Request, manager: TheManager, settings: TheSettings) -> None:
    """Redirect a request to the leader, unless this manager leads."""
    if manager.leads:
        return
    leader = manager.other_leader
    if leader is None:
        raise _no_leader(manager.idle_reason or "no manager leads at present")
    if not leader.is_signed(settings.token.get_secret_value()):
        raise _no_leader(
            f"the leader in Redis, {leader.url}, is not signed with this manager's token, so clients are not "
            "redirected: give all managers the same RLBOOST_TOKEN and the same version"
        )
    target = request.scope["raw_path"].decode() + "?" + request.scope["query_string"].decode()
    headers = {"Location": leader.url + target.removesuffix("?")}
    raise Problem(307, "Not the leader", f"{leader.url} leads: send the request there", headers=headers)


async def as_leader(writing: Awaitable[_Result]) -> _Result:
    """Await a client's write; raises `Problem` 503 if this manager does not lead."""
    try:
        return await writing
    except Fenced as error:
        raise _no_leader(str(error)) from error


def _no_leader(reason: str) -> Problem:
    return Problem(503, "No leader", f"{reason}: try again", headers={"Retry-After": "1"})


# --- times ------------------------------------------------------------------------------------------------------------


_TIMES = ("created_at", "started_at", "finished_at", "joined_at", "last_heartbeat_at", "since", "finishes_at")


def iso_time(unix_s: float, timespec: str = "auto") -> str:
    """Return a time as ISO 8601 text in UTC; for `timespec` see `datetime.isoformat`."""
    return datetime.fromtimestamp(unix_s, UTC).isoformat(timespec=timespec)


def iso_times(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields with their times as ISO 8601 text instead of Unix seconds, also within a phase or a wait."""
    shown = dict(fields)
    for name in ("phase", "waiting"):
        if shown.get(name):
            shown[name] = iso_times(shown[name])
    for name in _TIMES:
        if isinstance(shown.get(name), float | int):
            shown[name] = iso_time(shown[name])
    return shown
