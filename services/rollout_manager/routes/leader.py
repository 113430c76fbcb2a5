"""Routes that only the leading manager answers: a standby redirects to it."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from fastapi import Request

from rlboost.services.rollout_manager.app import Manager
from rlboost.services.rollout_manager.domain.jobs.record import Job
from rlboost.shared.errors import Fenced
from rlboost.shared.http.problem import Problem
from rlboost.shared.streams.bus import Op


def not_leading_reason(manager: Manager) -> str | None:
    """Return why this manager does not lead, None if it does."""
    if manager.leads:
        return None
    leader = manager.other_leader
    return f"standby; {leader.url} leads" if leader else manager.idle_reason or "the world is not recovered yet"


def leader_only(manager: Manager, token: str) -> Callable[[Request], Coroutine[Any, Any, None]]:
    """Return a dependency that redirects requests to the leader."""

    async def check(request: Request) -> None:
        if manager.leads:
            return
        leader = manager.other_leader
        if leader is None:
            raise _no_leader(manager.idle_reason or "no manager leads at present")
        if not leader.is_signed(token):
            raise _no_leader(
                f"the leader in Redis, {leader.url}, is not signed with this manager's token, so clients are not "
                "redirected: give all managers the same RLBOOST_TOKEN and the same version"
            )
        target = request.scope["raw_path"].decode() + "?" + request.scope["query_string"].decode()
        headers = {"Location": leader.url + target.removesuffix("?")}
        raise Problem(307, "Not the leader", f"{leader.url} leads: send the request there", headers=headers)

    return check


async def write(manager: Manager, ops: Sequence[Op]) -> None:
    """Apply a client's operations as the leader; raises `Problem` 503 if this manager does not lead."""
    try:
        await manager.write(ops)
    except Fenced as error:
        raise _no_leader(str(error)) from error


async def create_as_leader(manager: Manager, job: Job, command: Op) -> None:
    """Create a job as the leader; raises `Problem` 503 if this manager does not lead."""
    try:
        await manager.create_job(job, command)
    except Fenced as error:
        raise _no_leader(str(error)) from error


def _no_leader(reason: str) -> Problem:
    return Problem(503, "No leader", f"{reason}: try again", headers={"Retry-After": "1"})
