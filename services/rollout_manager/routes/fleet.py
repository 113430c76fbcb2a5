"""The REST routes of the fleet: joining, listing, draining and scaling workers."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Header
from pydantic import BaseModel, ConfigDict, Field

from rlboost.services.rollout_manager.access.join import (
    JoinAddresses,
    JoinAnswer,
    JoinRequest,
    check_protocol,
    join,
    join_addresses,
)
from rlboost.services.rollout_manager.app import Manager
from rlboost.services.rollout_manager.domain.allocation.worth import worth_of_one_more
from rlboost.services.rollout_manager.domain.seeding.tuner import target_workers
from rlboost.services.rollout_manager.domain.world import World
from rlboost.services.rollout_manager.fleet_scaler import FleetScaler
from rlboost.services.rollout_manager.routes.leader import write
from rlboost.services.rollout_manager.routes.timestamps import iso_times
from rlboost.services.rollout_manager.settings import Settings
from rlboost.shared.http.authentication import needs
from rlboost.shared.http.documented import problems
from rlboost.shared.http.problem import Problem
from rlboost.shared.messages import Drain
from rlboost.shared.messages.protocol import PROTOCOL_HEADER, UNNUMBERED
from rlboost.shared.streams import names
from rlboost.shared.streams.bus import Append


class Scale(BaseModel):
    """The number of spot workers."""

    model_config = ConfigDict(extra="forbid")

    workers: Annotated[int, Field(ge=0)] | Literal["auto"]
    """`auto`: the number worth having, within the limits of the pools and of dollars."""


def add_fleet(router: APIRouter, manager: Manager, settings: Settings, scaler: FleetScaler) -> None:
    """Add the routes of the fleet."""

    @router.post("/join", tags=["fleet"], responses=problems(409))
    @needs("worker")
    async def join_fleet(
        body: JoinRequest, protocol: Annotated[int, Header(alias=PROTOCOL_HEADER)] = UNNUMBERED
    ) -> JoinAnswer:
        """Give a worker that joins its identity, and the addresses of the other services."""
        check_protocol(protocol)
        return await join(body, manager.identities, settings, partial(write, manager))

    @router.get("/join", tags=["fleet"], responses=problems(409))
    @needs("worker")
    async def addresses(protocol: Annotated[int, Header(alias=PROTOCOL_HEADER)] = UNNUMBERED) -> JoinAddresses:
        """Return the addresses that a worker which joins connects to; nothing joins."""
        check_protocol(protocol)
        return join_addresses(settings)

    @router.get("/workers", tags=["fleet"])
    @needs("read")
    async def workers() -> list[dict[str, Any]]:
        """Return every worker: role, state, version, samples, throughput, memory."""
        fleet = manager.world.fleet
        return [iso_times(worker.public()) for worker in (*fleet.workers.values(), *fleet.gone.values())]

    @router.post("/workers/{worker_id}/drain", status_code=202, tags=["fleet"], responses=problems(404))
    @needs("admin")
    async def drain(worker_id: str) -> dict[str, str]:
        """Have the worker hand off its samples and exit."""
        if worker_id not in manager.world.fleet.workers:
            detail = f"there is no worker {worker_id!r}: list them with 'rlboost worker list' or GET /v1/workers"
            raise Problem(404, "No such worker", detail)
        await write(manager, [Append(names.worker_commands(worker_id), Drain(reason="requested over REST"))])
        return {"id": worker_id, "state": "draining"}

    @router.get("/fleet", tags=["fleet"])
    @needs("read")
    async def fleet() -> dict[str, Any]:
        """Return counts of workers, throughput, workers worth having, the worth of one more, and autoscaling.

        `worth_of_one_more` is null until a step was measured; `preemptions_per_hour` is of one worker of each kind.
        """
        return fleet_overview(manager.world, scaler, have_users=manager.identities.have_users)

    @router.post("/fleet/scale", tags=["fleet"], responses=problems(409))
    @needs("admin")
    async def scale(body: Scale) -> dict[str, Any]:
        """Set the number of spot workers, or let it follow the number worth having (`auto`)."""
        if not scaler.has_pools:
            detail = (
                "this manager cannot start workers: set RLBOOST_MANAGER_POOLS, or start with 'rlboost up --autoscale N'"
            )
            raise Problem(409, "No pools", detail)
        await scaler.set_workers(None if body.workers == "auto" else body.workers, partial(write, manager))
        return {"workers": body.workers}


def fleet_overview(world: World, scaler: FleetScaler, *, have_users: bool) -> dict[str, Any]:
    """Return the document of `GET /fleet`; `have_users` says whether each worker has a Redis user of its own."""
    workers = list(world.fleet.workers.values())
    preemptible = [worker for worker in workers if not worker.reserved]
    return {
        "present": len(preemptible),
        "reserved": len(workers) - len(preemptible),
        "by_state": {state: sum(w.state == state for w in workers) for state in sorted({w.state for w in workers})},
        "tokens_per_s": sum(worker.tokens_per_s for worker in workers),
        "target_workers": target_workers(job.window_tuner for job in world.jobs.active()),
        "worth_of_one_more": worth_of_one_more(world),
        "preemptions_per_hour": {
            kind: world.fleet.preemptions_per_s(kind) * 3600.0
            for kind in sorted({worker.joined.kind for worker in preemptible})
        },
        "autoscaling": scaler.public(),
        "worker_redis_users": "on" if have_users else "off",
    }
