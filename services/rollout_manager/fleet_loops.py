"""What the leader does for its fleet next to its loop: scales it, and renews its credentials."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import structlog

from rlboost.services.rollout_manager.domain.autoscale import (
    Autoscaler,
    FleetTargets,
    fleet_view,
    scale_fleet,
    workers_to_request,
)
from rlboost.services.rollout_manager.domain.effects import Effect, Now, Send
from rlboost.services.rollout_manager.domain.offers import Offer, OfferBook, is_pooled, present_workers
from rlboost.services.rollout_manager.domain.world import World
from rlboost.services.rollout_manager.loop import Manager
from rlboost.services.rollout_manager.ports import FleetProvider, ProviderFailed
from rlboost.services.rollout_manager.settings import Settings
from rlboost.shared.errors import BusUnavailable, ConfigError
from rlboost.shared.http.access import STORE_CREDENTIAL_LIFE_S, issue_store_credential
from rlboost.shared.job.fleet import HOUR_S
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
# Keeps the spot workers at the number and the mix that autoscaling decides, and the fleet's cost below its limit.
#
# Consumes: the fleet and the jobs of the manager's world, the operator's number, the price file as it changes, and
#     prices of providers, for kinds that have none in the settings.
# Produces: targets, by which the manager's next turn drains surplus workers; requests to the providers, which are
#     repeated every `REPEAT_S`, since a provider's number may be changed by others.
# Waits for: the next second; in `run_requests`, the providers, each on its own, which limit their own calls.
# Ends when: the stop is set. A standby decides and requests nothing.


CHECK_EVERY_S = 1.0
REPEAT_S = 60.0
PRICE_EVERY_S = 300.0
AUTO = "auto"
_FIELD = "workers"


@dataclass(slots=True)
class _Request:
    """The last request for workers of one kind."""

    workers: int
    at: float
    error: str = ""


@dataclass(slots=True)
class _Price:
    """What a provider told of the price of one kind."""

    dollars_per_hour: float | None = None
    ask_at: float = float("-inf")
    error: str = ""


class FleetScaler:
    """Decides once per second while its manager leads.

    Args:
        manager: whose fleet.
        bus: has the operator's number.
        settings: pools and limits.
        providers: kind -> what starts and stops its workers; something else follows `GET /v1/fleet` for the others.

    """

    def __init__(
        self,
        manager: Manager,
        bus: Bus,
        settings: Settings,
        providers: Mapping[str, FleetProvider] = MappingProxyType({}),
    ) -> None:
        self._manager, self._bus, self._settings, self._providers = manager, bus, settings, providers
        self._autoscaler, self._book = self._new_autoscaler(), OfferBook(settings.pools)
        self._offers: Sequence[Offer] = self._book.offers(manager.world.fleet, manager.world.fleet.prices, 0.0)
        self._fixed: int | None = None
        self._world: World | None = None
        """The world that the present decisions are about; None while another manager leads."""
        self._requests: dict[str, _Request] = {}
        self._prices_at: float | None = None
        """When the price file was written that the world has the prices of; None: unknown."""
        self._listed = settings.prices
        """Prices of the settings."""
        self._followed: dict[str, _Price] = {}
        """Kinds without one -> the price that their provider told."""

    @property
    def has_pools(self) -> bool:
        """Return True if there is a kind of worker to start."""
        return bool(self._book.pools)

    def public(self) -> dict[str, Any]:
        """Return the fields of the REST API."""
        fleet = self._manager.world.fleet.workers.values()
        scaler = self._autoscaler
        errors = {kind: price.error for kind, price in self._followed.items()}
        errors |= {kind: request.error for kind, request in self._requests.items() if request.error}
        pools = zip(self._book.pools, self._offers, strict=True)
        present = present_workers(self._manager.world.fleet, self._book.records)
        return {
            "workers": AUTO if self._fixed is None else self._fixed,
            "limited_by": scaler.limited_by,
            "reason": scaler.reason or None,
            "dollars_per_hour": sum(worker.price_per_hour for worker in fleet),
            "max_dollars_per_hour": scaler.max_dollars_per_hour,
            "pools": [
                {
                    **pool.model_dump(exclude={"command", "aws"}),
                    "price_per_hour": offer.price_per_hour,
                    "tokens_per_s": self._book.tokens_per_s_of(pool),
                    "preemptions_per_hour": self._book.preemptions_per_s(pool) * HOUR_S,
                    "availability": offer.availability,
                    "dollars_per_million_tokens": self._book.dollars_per_million_tokens(pool, offer),
                    "present": present[pool.kind],
                    "target": scaler.targets.get(pool.kind),
                    "closed": offer.closed or None,
                    "error": errors.get(pool.kind) or None,
                }
                for pool, offer in pools
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
            self._autoscaler, self._book, self._world = self._new_autoscaler(), OfferBook(self._settings.pools), world
            self._prices_at, self._followed = None, {}  # its prices are those of the manager's start
        self._read_changed_prices()
        unpriced = [kind for kind in self._unlisted() if self._price_of(kind).dollars_per_hour is None]
        self._book.unpriced = unpriced
        scaler = self._autoscaler
        before = dict(scaler.targets)
        self._book.observe(world.fleet, {k: r.workers for k, r in self._requests.items() if not r.error}, now.mono)
        seen = fleet_view(world.jobs, world.fleet, self._book, scaler.limits(), now)
        self._offers = seen.offers
        scaler.decide(seen, self._fixed, now.mono)
        # A worker that joined by itself, and is kept, is no change.
        before = {kind: max(n, min(seen.present.get(kind, 0), scaler.targets[kind])) for kind, n in before.items()}
        present = tuple(world.fleet.workers)
        targets = FleetTargets(
            dict(scaler.targets), before, scaler.max_dollars_per_hour, present, scaler.reason, seen.late
        )
        for kind, (_, workers) in targets.changes().items():
            log.info(
                "fleet_scaled", worker_kind=kind, workers=workers, limited_by=scaler.limited_by, reason=scaler.reason
            )
        self._manager.at_next_turn(lambda world, at: scale_fleet(world.jobs, world.fleet, targets, at))

    def _read_changed_prices(self) -> None:
        """Have the manager's next turn use the price file if it was written since it was read last."""
        if not self._settings.price_file or (at := self._settings.prices_modified_at) == self._prices_at:
            return
        self._prices_at = at
        try:
            prices = self._settings.prices
        except ConfigError as error:
            log.warning("price_file_unusable", error=str(error), uses="the prices before")
            return
        self._listed = prices
        self._use_prices()

    def _use_prices(self) -> None:
        """Have the manager's next turn use the prices of the settings and of the providers, if they changed."""
        told = {kind: price.dollars_per_hour for kind, price in self._followed.items() if kind not in self._listed}
        prices = self._listed | {kind: price for kind, price in told.items() if price is not None}
        if prices != self._manager.world.fleet.prices:
            log.info("prices_changed", prices=prices)
            self._manager.at_next_turn(lambda world, _: world.fleet.set_prices(prices))

    def _unlisted(self) -> list[str]:
        """Return the kinds whose price the provider tells."""
        pools = (pool for pool in self._book.pools if self._settings.provider_of(pool) == "aws")
        return [pool.kind for pool in pools if pool.kind not in self._listed]

    def _price_of(self, kind: str) -> _Price:
        return self._followed.setdefault(kind, _Price())

    async def _follow_price(self, kind: str, now: float) -> None:
        """Ask the provider for the price of a kind, if that is due; the last one counts until the next."""
        if self._world is None or kind not in self._unlisted() or now < (price := self._price_of(kind)).ask_at:
            return
        price.ask_at = now + PRICE_EVERY_S
        try:
            price.dollars_per_hour, price.error = await self._providers[kind].price(kind), ""
        except ProviderFailed as error:
            price.error = str(error)
            price.ask_at = now + (REPEAT_S if price.dollars_per_hour is None else PRICE_EVERY_S)
            log.warning("price_unknown", worker_kind=kind, error=price.error, uses=price.dollars_per_hour)
        self._use_prices()

    async def run_requests(self, stop: asyncio.Event) -> None:
        """Request workers from the providers until the stop; one that does not answer delays no other."""
        async with asyncio.TaskGroup() as tasks:
            for kind in self._providers:
                tasks.create_task(self._run_requests_of(kind, stop), name=f"provider of {kind}")
            await stop.wait()

    async def _run_requests_of(self, kind: str, stop: asyncio.Event) -> None:
        while not await until_stop(stop, CHECK_EVERY_S):
            await self._follow_price(kind, time.monotonic())
            await self._request(kind, time.monotonic())

    async def request_once(self, now: float) -> None:
        """Make the requests that are due."""
        for kind in self._providers:
            await self._follow_price(kind, now)
            await self._request(kind, now)

    async def _request(self, kind: str, now: float) -> None:
        if self._world is None or kind not in self._autoscaler.targets:
            return
        fleet, target = self._world.fleet.workers.values(), self._autoscaler.targets[kind]
        last = self._requests.get(kind)
        hosts = [worker.joined.host for worker in fleet if is_pooled(worker, {kind})]
        present = len(hosts)
        if last is None and self._fixed is None and target <= present and self._autoscaler.is_settling(now):
            return  # machines that are starting would be stopped
        workers = workers_to_request(target, last.workers if last else None, present)
        record = self._book.records[kind]
        if last is not None and last.error:
            is_due = now >= record.retry_at or workers < min(last.workers, record.n_workers)
        else:
            is_due = last is None or workers != last.workers or now - last.at >= REPEAT_S
        if not is_due:
            return
        self._requests[kind] = request = _Request(workers, now)
        try:
            await self._providers[kind].scale(kind, workers, hosts)
        except ProviderFailed as error:
            request.error = str(error)
            n_accepted = last.workers if last is not None and not last.error else 0
            self._book.on_failure(kind, error.failure, present, now, n_accepted)
            log.warning("provider_failed", worker_kind=kind, workers=workers, error=request.error)

    def _new_autoscaler(self) -> Autoscaler:
        settings = self._settings
        return Autoscaler(settings.max_dollars_per_hour, settings.scale_in_delay_s, settings.max_share)
