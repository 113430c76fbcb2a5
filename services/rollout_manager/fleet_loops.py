"""What the leader does for its fleet next to its loop: scales it, and renews its credentials."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import structlog

from rlboost.services.rollout_manager.domain.allocation import (
    Autoscaler,
    FleetTargets,
    fleet_view,
    present_workers,
    scale_fleet,
    workers_to_request,
)
from rlboost.services.rollout_manager.domain.effects import Effect, Now, Send
from rlboost.services.rollout_manager.domain.world import World
from rlboost.services.rollout_manager.loop import Manager
from rlboost.services.rollout_manager.ports import FleetProvider, ProviderFailed
from rlboost.services.rollout_manager.settings import Settings
from rlboost.shared.errors import BusUnavailable
from rlboost.shared.http.access import STORE_CREDENTIAL_LIFE_S, issue_store_credential
from rlboost.shared.messages import StoreCredential
from rlboost.shared.process.lifecycle import until_stop
from rlboost.shared.streams import names
from rlboost.shared.streams.bus import Bus, HashSet, Op

log = structlog.get_logger(__name__)

# --- credentials ------------------------------------------------------------------------------------------------------
#
# Renews the credentials with which workers download weights.
#
# Consumes: the fleet of the manager's world.
# Produces: credentials, which the manager's next turn sends: for each worker when it joins, and before half of the last
#     one's life is over; after a recovery for all workers, since it is unknown when they got theirs.
# Waits for: the next second.
# Ends when: the stop is set. A standby sends nothing.


_CHECK_INTERVAL_S = 1.0


class StoreCredentials:
    """Sends each worker of the fleet its credential.

    Args:
        manager: whose workers.
        token: the system's, which signs credentials.
        life_s: how long a credential is valid.
        clock: Unix seconds.

    """

    def __init__(
        self,
        manager: Manager,
        token: str,
        *,
        life_s: float = STORE_CREDENTIAL_LIFE_S,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._manager = manager
        self._token = token
        self._life_s = life_s
        self._clock = clock
        self._world: World | None = None
        self._sent_at: dict[str, float] = {}
        """Worker -> when its last credential was issued."""

    async def run(self, stop: asyncio.Event) -> None:
        """Renew credentials until the stop."""
        while not await until_stop(stop, _CHECK_INTERVAL_S):
            if self._manager.leads:
                self.renew()

    def renew(self) -> None:
        """Have the manager's next turn send a credential to each worker that needs one."""
        world, now = self._manager.world, self._clock()
        if world is not self._world:
            # Rebuilt: what was handed over for the last one may not have been sent.
            self._world, self._sent_at = world, {}
        workers = world.fleet.workers
        self._sent_at = {worker: at for worker, at in self._sent_at.items() if worker in workers}
        # At 0.4, so that the next one arrives before half of the life is over.
        due = [w for w in workers if w not in self._sent_at or now - self._sent_at[w] >= 0.4 * self._life_s]
        self._sent_at.update(dict.fromkeys(due, now))
        credentials = {worker: issue_store_credential(self._token, worker, now, self._life_s) for worker in due}
        self._manager.at_next_turn(lambda world, _: _send(world, credentials))


def _send(world: World, credentials: Mapping[str, str]) -> list[Effect]:
    present = [worker for worker in credentials if worker in world.fleet.workers]
    return [Send(worker, StoreCredential(credential=credentials[worker])) for worker in present]


# --- scaling ----------------------------------------------------------------------------------------------------------
#
# Keeps the number of spot workers at what autoscaling decides, and the fleet's cost below its limit.
#
# Consumes: the fleet and the jobs of the manager's world, and the operator's number.
# Produces: targets, by which the manager's next turn drains surplus workers; requests to the provider, which are
#     repeated every `REPEAT_S`, since the provider's number may be changed by others.
# Waits for: the next second; in `run_requests`, the provider, which limits its own calls.
# Ends when: the stop is set. A standby decides and requests nothing.


CHECK_EVERY_S = 1.0
REPEAT_S = 60.0
RETRY_S = 10.0
"""Time after which a request that failed is repeated."""
AUTO = "auto"
_FIELD = "workers"


@dataclass(slots=True)
class _Request:
    """The last request for workers of one kind."""

    workers: int
    at: float
    error: str = ""


class FleetScaler:
    """Decides once per second while its manager leads.

    Args:
        manager: whose fleet.
        bus: has the operator's number.
        settings: pools and limits.
        provider: starts and stops workers; None: something else follows `GET /v1/fleet`.

    """

    def __init__(self, manager: Manager, bus: Bus, settings: Settings, provider: FleetProvider | None = None) -> None:
        self._manager, self._bus, self._settings, self._provider = manager, bus, settings, provider
        self._autoscaler = self._new_autoscaler()
        self._fixed: int | None = None
        self._world: World | None = None
        """The world that the present decisions are about; None while another manager leads."""
        self._requests: dict[str, _Request] = {}

    @property
    def has_pools(self) -> bool:
        """Return True if there is a kind of worker to start."""
        return bool(self._autoscaler.pools)

    def public(self) -> dict[str, Any]:
        """Return the fields of the REST API."""
        fleet = self._manager.world.fleet.workers.values()
        scaler = self._autoscaler
        errors = {kind: request.error or None for kind, request in self._requests.items()}
        present = present_workers(self._manager.world.fleet, {pool.kind for pool in scaler.pools})
        return {
            "workers": AUTO if self._fixed is None else self._fixed,
            "limited_by": scaler.limited_by,
            "dollars_per_hour": sum(worker.price_per_hour for worker in fleet),
            "max_dollars_per_hour": scaler.max_dollars_per_hour,
            "pools": [
                {
                    **pool.model_dump(),
                    "price_per_hour": self._manager.world.fleet.prices.get(pool.kind, 0.0),
                    "present": present[pool.kind],
                    "target": scaler.targets.get(pool.kind),
                    "error": errors.get(pool.kind),
                }
                for pool in scaler.pools
            ],
        }

    async def set_workers(self, workers: int | None, write: Callable[[Sequence[Op]], Awaitable[None]]) -> None:
        """Set the number of spot workers, None for automatic; `write` writes to the bus."""
        text = AUTO if workers is None else str(workers)
        await write([HashSet(names.FLEET_SCALE, {_FIELD: text})])
        self._fixed = workers

    async def run_decisions(self, stop: asyncio.Event) -> None:
        """Decide until the stop."""
        while not await until_stop(stop, CHECK_EVERY_S):
            try:
                await self.decide_once(Now(time.monotonic(), time.time()))
            except BusUnavailable as error:
                log.warning("redis_unavailable", error=str(error), during="reading the number of workers")

    async def decide_once(self, now: Now) -> None:
        """Set the targets, and have the manager's next turn apply them; raises `BusUnavailable`."""
        if not self._manager.leads:
            self._world, self._requests = None, {}
            return
        world = self._manager.world
        if world is not self._world:
            text = await self._bus.hash_get(names.FLEET_SCALE, _FIELD)
            self._fixed = int(text) if text and text != AUTO else None
            self._autoscaler, self._world = self._new_autoscaler(), world
        scaler = self._autoscaler
        before = dict(scaler.targets)
        seen = fleet_view(world.jobs, world.fleet, scaler.pools)
        scaler.decide(seen, self._fixed, now.mono)
        # A worker that joined by itself, and is kept, is no change.
        before = {kind: max(n, min(seen.present.get(kind, 0), scaler.targets[kind])) for kind, n in before.items()}
        present = tuple(world.fleet.workers)
        targets = FleetTargets(dict(scaler.targets), before, scaler.max_dollars_per_hour, present)
        for kind, (_, workers) in targets.changes().items():
            log.info("fleet_scaled", worker_kind=kind, workers=workers, limited_by=scaler.limited_by)
        self._manager.at_next_turn(lambda world, at: scale_fleet(world.fleet, targets, at))

    async def run_requests(self, stop: asyncio.Event) -> None:
        """Request workers from the provider until the stop."""
        while not await until_stop(stop, CHECK_EVERY_S):
            await self.request_once(time.monotonic())

    async def request_once(self, now: float) -> None:
        """Make the requests that are due."""
        if self._provider is None or self._world is None:
            return
        fleet = self._world.fleet.workers.values()
        for kind, target in self._autoscaler.targets.items():
            last = self._requests.get(kind)
            present = sum(not worker.reserved and worker.joined.kind == kind for worker in fleet)
            if last is None and self._fixed is None and target <= present and self._autoscaler.is_settling(now):
                continue  # machines that are starting would be stopped
            workers = workers_to_request(target, last.workers if last else None, present)
            wait_s = RETRY_S if last and last.error else REPEAT_S
            if last is None or (workers != last.workers and not last.error) or now - last.at >= wait_s:
                self._requests[kind] = request = _Request(workers, now)
                try:
                    await self._provider.scale(kind, workers)
                except ProviderFailed as error:
                    request.error = str(error)
                    log.warning("provider_failed", worker_kind=kind, workers=workers, error=request.error)

    def _new_autoscaler(self) -> Autoscaler:
        settings = self._settings
        return Autoscaler(settings.pools, settings.max_dollars_per_hour, settings.scale_in_delay_s)
