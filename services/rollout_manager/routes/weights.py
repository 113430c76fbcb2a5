"""`GET /v1/weights`: the versions of every job's weights, their sizes, and the workers that hold them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from rlboost.services.rollout_manager.adapters.weight_store import list_models
from rlboost.services.rollout_manager.domain.workers.worker import Worker
from rlboost.services.rollout_manager.routes.timestamps import iso_time
from rlboost.shared.streams.bus import Bus
from rlboost.shared.weights.peers.directory import list_peers

if TYPE_CHECKING:
    from rlboost.shared.weights.rest_models import ModelInfo


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
            holders.setdefault((worker.job_id, worker.version), []).append(worker.id)
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
