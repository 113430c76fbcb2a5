"""The REST routes of the fleet: joining, listing, draining and scaling workers, their weights and their metrics."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Collection, Iterable
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal
from urllib.parse import urlsplit

from fastapi import Header
from pydantic import BaseModel, ConfigDict, Field

from rlboost.services.rollout_manager.access import (
    JoinAddresses,
    JoinAnswer,
    JoinRequest,
    check_protocol,
    join,
    join_addresses,
)
from rlboost.services.rollout_manager.api.leader import (
    AsLeader,
    Routes,
    TheBus,
    TheFleet,
    TheManager,
    TheSettings,
    iso_time,
    iso_times,
    of_app,
)
from rlboost.services.rollout_manager.domain.effects import Effect, Now
from rlboost.services.rollout_manager.domain.money import worth_of_one_more
from rlboost.services.rollout_manager.domain.windows import target_workers
from rlboost.services.rollout_manager.domain.workers import Worker
from rlboost.services.rollout_manager.domain.world import World
from rlboost.services.rollout_manager.fleet_loops import FleetScaler
from rlboost.shared.errors import BusUnavailable, ConfigError, Fatal, StoreUnavailable
from rlboost.shared.http.access import metrics_path, peer_key
from rlboost.shared.http.problem import Problem, problems
from rlboost.shared.messages import Drain
from rlboost.shared.messages.codec import PROTOCOL_HEADER, UNNUMBERED
from rlboost.shared.streams import names
from rlboost.shared.streams.bus import Append, Bus
from rlboost.shared.weights.peers.directory import list_peers

if TYPE_CHECKING:
    from rlboost.shared.weights.client import StoreClient
    from rlboost.shared.weights.rest_models import ModelInfo


# --- Prometheus -------------------------------------------------------------------------------------------------------


class ScrapeTarget(BaseModel):
    """One worker."""

    targets: list[str]
    """Its host and port."""
    labels: dict[str, str]


async def scrape_targets(bus: Bus, workers: Collection[str], path: str) -> list[ScrapeTarget]:
    """Return the present workers that have an address which this machine can reach.

    Args:
        bus: has the addresses, as workers report them.
        workers: ids of the present workers.
        path: URL path of the workers' metrics, see `metrics_path`.

    Raises:
        BusUnavailable: Redis does not answer.

    """
    here = socket.gethostname()
    peers = [peer for peer in await list_peers(bus) if peer.host == here or not peer.is_loopback]
    urls = {peer.name: urlsplit(peer.url) for peer in peers if peer.name in workers}
    return [
        ScrapeTarget(
            targets=[url.netloc], labels={"instance": name, "__scheme__": url.scheme, "__metrics_path__": path}
        )
        for name, url in urls.items()
    ]


# --- weights ----------------------------------------------------------------------------------------------------------


_LIMIT_S = 5.0


async def list_models(url: str, token: str) -> tuple[ModelInfo, ...]:
    """Return every job's weight versions.

    Raises:
        StoreUnavailable: the weight store does not answer, or not as expected.

    """
    client_class = await asyncio.to_thread(_import_client)
    try:
        async with asyncio.timeout(_LIMIT_S), client_class(url, token) as client:
            return (await client.models()).models
    except (StoreUnavailable, ConfigError, Fatal, TimeoutError) as error:
        raise StoreUnavailable(str(error) or f"{url} does not answer") from error


def _import_client() -> type[StoreClient]:
    # Importing it at the top would make starting a manager, and a takeover by one, a seventh slower.
    from rlboost.shared.weights.client import StoreClient  # noqa: PLC0415 - see above

    return StoreClient


async def weights_overview(bus: Bus, store_url: str, token: str, workers: Iterable[Worker]) -> dict[str, Any]:
    """Return all versions, oldest first, and the workers that serve weights to others.

    Raises:
        StoreUnavailable: the weight store does not answer.
        BusUnavailable: Redis does not answer.

    """
    models = await list_models(store_url, token)
    holders: dict[tuple[str, int], list[str]] = {}
    for worker in workers:
        if worker.version >= 0:
            for served in ((worker.job_id, worker.version), *worker.alongside.items()):
                holders.setdefault(served, []).append(worker.id)
    peers = [{"name": peer.name, "url": peer.url, "host": peer.host} for peer in await list_peers(bus)]
    return {"store_url": store_url, "models": [_public(model, holders) for model in models], "peers": peers}


def _public(model: ModelInfo, holders: dict[tuple[str, int], list[str]]) -> dict[str, Any]:
    versions = [
        {
            "version": version.version,
            "bytes_full": version.n_bytes,
            "bytes_delta": version.delta_bytes,
            "committed_at": iso_time(version.committed_at),
            "pinned": version.pinned,
            "digest": version.digest,
            "holders": sorted(holders.get((model.job_id, version.version), [])),
        }
        for version in model.versions
    ]
    return {"job_id": model.job_id, "versions": versions}


# --- routes -----------------------------------------------------------------------------------------------------------


class Scale(BaseModel):
    """The number of spot workers."""

    model_config = ConfigDict(extra="forbid")

    workers: Annotated[int, Field(ge=0)] | Literal["auto"]
    """`auto`: the number worth having, within the limits of the pools and of dollars."""


Scaler = Annotated[FleetScaler, of_app("scaler")]
Protocol = Annotated[int, Header(alias=PROTOCOL_HEADER)]
ROUTES = Routes()


@ROUTES("POST", "/join", "worker", "fleet", responses=problems(409))
async def join_fleet(
    body: JoinRequest, manager: TheManager, settings: TheSettings, write: AsLeader, protocol: Protocol = UNNUMBERED
) -> JoinAnswer:
    """Give a worker that joins its identity, and the addresses of the other services."""
    check_protocol(protocol, body.name)
    return await join(body, manager.identities, settings, write)


@ROUTES("GET", "/join", "worker", "fleet", responses=problems(409))
async def addresses(settings: TheSettings, protocol: Protocol = UNNUMBERED) -> JoinAddresses:
    """Return the addresses that a worker which joins connects to; nothing joins."""
    check_protocol(protocol)
    return join_addresses(settings)


@ROUTES("GET", "/workers", "read", "fleet")
async def workers(fleet: TheFleet) -> list[dict[str, Any]]:
    """Return every worker: role, state, version, samples, throughput, memory."""
    return [iso_times(worker.public()) for worker in (*fleet.workers.values(), *fleet.gone.values())]


@ROUTES("POST", "/workers/{worker_id}/drain", "admin", "fleet", status_code=202, responses=problems(404))
async def drain(worker_id: str, manager: TheManager, write: AsLeader) -> dict[str, str]:
    """Have the worker hand off its samples and exit."""
    if worker_id not in manager.world.fleet.workers:
        detail = f"there is no worker {worker_id!r}: list them with 'rlboost worker list' or GET /v1/workers"
        raise Problem(404, "No such worker", detail)
    reason = "requested over REST"
    await write([Append(names.worker_commands(worker_id), Drain(reason=reason))])
    manager.at_next_turn(partial(_mark_draining, worker_id, reason))
    return {"id": worker_id, "state": "draining"}


@ROUTES("GET", "/fleet", "read", "fleet")
async def fleet(manager: TheManager, scaler: Scaler) -> dict[str, Any]:
    """Return counts of workers, throughput, workers worth having, the worth of one more, and autoscaling.

    `worth_of_one_more` is null until a step was measured; `preemptions_per_hour` is of one worker of each kind.
    """
    return fleet_overview(manager.world, scaler, have_users=manager.identities.have_users)


@ROUTES("POST", "/fleet/scale", "admin", "fleet", responses=problems(409))
async def scale(body: Scale, scaler: Scaler, write: AsLeader) -> dict[str, Any]:
    """Set the number of spot workers, or let it follow the number worth having (`auto`)."""
    if not scaler.has_pools:
        detail = (
            "this manager cannot start workers: set RLBOOST_MANAGER_POOLS, or start with 'rlboost up --autoscale N'"
        )
        raise Problem(409, "No pools", detail)
    await scaler.set_workers(None if body.workers == "auto" else body.workers, write)
    return {"workers": body.workers}


@ROUTES("GET", "/weights", "read", "weights")
async def weights(bus: TheBus, settings: TheSettings, fleet: TheFleet) -> dict[str, Any]:
    """Return the versions of every job's weights, oldest first, and the workers that serve them to others."""
    url, token = settings.weight_store_url, settings.token.get_secret_value()
    try:
        return await weights_overview(bus, url, token, fleet.workers.values())
    except StoreUnavailable as error:
        raise Problem(503, "No weight store", f"{error}: start it, then try again") from error
    except BusUnavailable as error:
        raise Problem(503, "No Redis", f"{error}: try again") from error


@ROUTES("GET", "/scrape-targets", "read", "health")
async def targets(bus: TheBus, settings: TheSettings, fleet: TheFleet) -> list[ScrapeTarget]:
    """Return the addresses of the workers' metrics, for Prometheus's HTTP service discovery."""
    return await scrape_targets(bus, fleet.workers, metrics_path(peer_key(settings.token.get_secret_value())))


def _mark_draining(worker_id: str, reason: str, world: World, now: Now) -> list[Effect]:
    worker = world.fleet.workers.get(worker_id)
    if worker is None or worker.drain_commanded:
        return []
    return world.fleet.on_drain_commanded(worker, now, reason)


def fleet_overview(world: World, scaler: FleetScaler, *, have_users: bool) -> dict[str, Any]:
    """Return the document of `GET /fleet`; `have_users` says whether each worker has a Redis user of its own."""
    workers = list(world.fleet.workers.values())
    preemptible = [worker for worker in workers if not worker.reserved]
    return {
        "present": len(preemptible),
        "reserved": len(workers) - len(preemptible),
        "by_state": {state: sum(w.state == state for w in workers) for state in sorted({w.state for w in workers})},
        "tokens_per_s": sum(worker.tokens_per_s for worker in workers),
        "target_workers": target_workers(job.record.window_tuner for job in world.jobs.active()),
        "worth_of_one_more": worth_of_one_more(world.jobs, world.fleet),
        "preemptions_per_hour": {
            kind: world.fleet.preemptions_per_s(kind) * 3600.0
            for kind in sorted({worker.joined.kind for worker in preemptible})
        },
        "autoscaling": scaler.public(),
        "worker_redis_users": "on" if have_users else "off",
    }
