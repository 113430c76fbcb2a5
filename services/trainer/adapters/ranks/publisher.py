"""Publishes weights that the ranks upload themselves."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

from rlboost.services.trainer.adapters.ranks.policy import RanksPolicy
from rlboost.services.trainer.adapters.weights import Digests, StorePublisher
from rlboost.shared.weights.publisher import ChunkCopy, Shard


@dataclass(eq=False, repr=False)
class RanksPublisher(StorePublisher):
    """`WeightPublisher` whose ranks each upload their own part of a version; this process commits it.

    `publish`, `equals` and `chunks_among` ignore the shards that they are given: the ranks hold the same ones.
    """

    policy: RanksPolicy = field(kw_only=True)
    token: str = field(kw_only=True)
    """The ranks' credential for the weight store."""

    async def _upload(self, version: int, shards: Iterable[Shard]) -> list[str]:
        del shards
        because = f"upload of version {version}"
        store = {"url": self.client.url, "token": self.token}
        async with self.waits.on("the ranks", because=because, limit_s=2 * self.limit_s):
            return await asyncio.to_thread(
                self.policy.publish, store, self.job_id, version, limit_s=self.limit_s, deltas=self.deltas
            )

    def chunks_among(self, shards: Iterable[Shard], digests: AbstractSet[str]) -> list[ChunkCopy]:
        """See `WeightPublisher.chunks_among`."""
        del shards
        return self.policy.chunks_among(digests)

    async def _digests(self, shards: Iterable[Shard]) -> Digests:
        del shards
        return await asyncio.to_thread(self.policy.digests)
