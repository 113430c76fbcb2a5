"""The weight store's side of a policy whose ranks send their parts themselves."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field

from services.trainer.adapters.ranks.policy import RanksPolicy
from services.trainer.adapters.weights import Digests, StorePublisher
from shared.weights.publisher import Shard


@dataclass(eq=False, repr=False)
class RanksPublisher(StorePublisher):
    """`WeightPublisher` where every rank uploads its own part; a version is committed from here when all are there.

    The shards that `publish` and `equals` are given are the engine's, whose ranks have them: they are not asked for.
    """

    policy: RanksPolicy = field(kw_only=True)
    token: str = field(kw_only=True)
    """What the ranks show the store."""

    async def _upload(self, version: int, shards: Iterable[Shard]) -> list[str]:
        del shards
        because = f"they publish version {version}"
        store = {"url": self.client.url, "token": self.token}
        made = {"deltas": self.deltas, "small": self.small}
        async with self.waits.on("the ranks", because=because, limit_s=2 * self.limit_s):
            return await asyncio.to_thread(
                self.policy.publish, store, self.job_id, version, limit_s=self.limit_s, deltas=made
            )

    async def _digests(self, shards: Iterable[Shard]) -> Digests:
        del shards
        return await asyncio.to_thread(self.policy.digests)
