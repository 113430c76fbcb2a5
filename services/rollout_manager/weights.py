"""`GET /v1/weights`: which versions there are, what they weigh, and who holds them."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter

from services.rollout_manager.app import Manager
from services.rollout_manager.settings import Settings
from shared.bus import Bus
from shared.errors import BusUnavailable, ConfigError, Fatal, StoreUnavailable
from shared.http import Problem
from shared.weights.peers.directory import listed

if TYPE_CHECKING:
    from shared.weights.client import StoreClient
    from shared.weights.wire import ModelInfo

_LIMIT_S = 5.0


def add_weights(router: APIRouter, manager: Manager, bus: Bus, settings: Settings) -> None:
    """Add the route."""

    @router.get("/weights", tags=["weights"])
    async def weights() -> dict[str, Any]:
        """Versions of every job's weights, oldest first, and the workers that serve what they hold to others."""
        models = await _models(settings)
        holders: dict[tuple[str, int], list[str]] = {}
        for worker in manager.world.fleet.workers.values():
            if worker.version >= 0:
                holders.setdefault((worker.job_id, worker.version), []).append(worker.id)
        peers = await _peers(bus)
        return {"models": [_public(model, holders) for model in models], "peers": peers}


async def _models(settings: Settings) -> tuple[ModelInfo, ...]:
    url, connect = settings.weight_store_url, await asyncio.to_thread(_store_client)
    try:
        async with asyncio.timeout(_LIMIT_S), connect(url, settings.token.get_secret_value()) as client:
            return (await client.models()).models
    except (StoreUnavailable, ConfigError, Fatal, TimeoutError) as error:
        raise Problem(
            503, "No weight store", f"{str(error) or f'{url} does not answer'}: see that it runs, and try again"
        ) from error


def _store_client() -> type[StoreClient]:
    # Its imports would be a seventh of what a manager needs to start, and to take over.
    from shared.weights.client import StoreClient  # noqa: PLC0415

    return StoreClient


async def _peers(bus: Bus) -> list[dict[str, str]]:
    try:
        return [{"name": peer.name, "url": peer.url, "host": peer.host} for peer in await listed(bus)]
    except BusUnavailable as error:
        raise Problem(503, "No Redis", f"{error}: try again") from error


def _public(model: ModelInfo, holders: dict[tuple[str, int], list[str]]) -> dict[str, Any]:
    versions = [
        {
            "version": version.version,
            "bytes_full": version.n_bytes,
            "bytes_delta": version.delta_bytes,
            "committed_at": datetime.fromtimestamp(version.committed_at, UTC).isoformat(),
            "pinned": version.pinned,
            "digest": version.digest,
            "holders": sorted(holders.get((model.job_id, version.version), [])),
        }
        for version in model.versions
    ]
    return {"job_id": model.job_id, "versions": versions}
