"""The weight store's side of a policy whose ranks send their parts themselves."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from pathlib import Path

from services.trainer.adapters.ranks.policy import RanksPolicy
from services.trainer.adapters.weights import Digests, StorePublisher
from shared.waiting import Waits
from shared.weights.client import StoreClient
from shared.weights.publisher import Shard


class RanksPublisher(StorePublisher):
    """`WeightPublisher` where every rank uploads its own part; a version is committed from here when all are there.

    The shards that `publish` and `equals` are given are the engine's, whose ranks have them: they are not asked for.
    """

    def __init__(  # noqa: PLR0913 - StorePublisher's, and the ranks'
        self,
        policy: RanksPolicy,
        token: str,
        client: StoreClient,
        job_id: str,
        config_json: str,
        cache: Path,
        waits: Waits,
        limit_s: float,
        *,
        deltas: bool = False,
        small: bool = False,
    ) -> None:
        """See `StorePublisher`; `token` is what the ranks show the store."""
        super().__init__(client, job_id, config_json, cache, waits, limit_s, deltas=deltas, small=small)
        self._policy = policy
        self._store = {"url": client.url, "token": token}
        self._made = {"deltas": deltas, "small": small}

    async def _upload(self, version: int, shards: Iterable[Shard]) -> list[str]:
        del shards
        because = f"they publish version {version}"
        async with self._waits.on("the ranks", because=because, limit_s=2 * self._limit_s):
            return await asyncio.to_thread(
                self._policy.publish, self._store, self._job_id, version, limit_s=self._limit_s, deltas=self._made
            )

    async def _digests(self, shards: Iterable[Shard]) -> Digests:
        del shards
        return await asyncio.to_thread(self._policy.digests)
