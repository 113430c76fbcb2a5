"""Publishes weights that the ranks upload themselves."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

from rlboost.services.trainer.adapters.ranks.shards import RankShards
from rlboost.services.trainer.adapters.weights import Digests, StorePublisher
from rlboost.shared.weights.shards import ChunkCopy, Shard


@dataclass(eq=False, repr=False)
class RanksPublisher(StorePublisher):
    """`WeightPublisher` for ranks that each upload their own part of a whole model; this process commits it.

    Tensors that this process holds itself, as those of an adapter, it uploads itself.
    """

    token: str = field(kw_only=True)
    """The ranks' credential for the weight store."""

    async def _upload(self, version: int, shards: Iterable[Shard]) -> list[str]:
        if not isinstance(shards, RankShards):
            return await super()._upload(version, shards)
        because = f"upload of version {version}"
        store = {"url": self.client.url, "token": self.token}
        async with self.waits.on("the ranks", because=because, limit_s=2 * self.limit_s):
            return await asyncio.to_thread(
                shards.publish, store, self.job_id, version, limit_s=self.limit_s, deltas=self.deltas
            )

    def chunks_among(self, shards: Iterable[Shard], digests: AbstractSet[str]) -> list[ChunkCopy]:
        """See `WeightPublisher.chunks_among`."""
        return shards.chunks_among(digests) if isinstance(shards, RankShards) else super().chunks_among(shards, digests)

    async def _digests(self, shards: Iterable[Shard]) -> Digests:
        if not isinstance(shards, RankShards):
            return await super()._digests(shards)
        return await asyncio.to_thread(shards.digests)
