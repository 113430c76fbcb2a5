"""Publishes weights to the weight store and fetches them, with the client of `shared.weights`."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from pathlib import Path

from rlboost.services.trainer.adapters.torch.tensors import RankShards
from rlboost.shared.errors import NotFound, StoreUnavailable
from rlboost.shared.process.waiting import Waits
from rlboost.shared.weights.cache import Cache
from rlboost.shared.weights.client import StoreClient, retry_unavailable
from rlboost.shared.weights.manifest import ChunkCopy, Manifest, Shard, chunks_among, digest_of
from rlboost.shared.weights.publisher import Publisher
from rlboost.shared.weights.puller import Puller

Digests = dict[tuple[str, tuple[int, ...], tuple[int, ...], str], str]
"""(name, offset, shape, dtype) of each shard -> digest."""


@dataclass(eq=False, repr=False)
class StorePublisher:
    """`WeightPublisher` for one job; this process uploads all tensors."""

    client: StoreClient
    """An open client; closed by `close`."""
    job_id: str
    """The job whose weights these are."""
    config_json: str
    """The model's Hugging Face `config.json`."""
    cache: Path
    """Directory for the chunks that `fetch` downloads; removed by `close`."""
    waits: Waits
    """Registry of waits, for waits on the store."""
    limit_s: float
    """How long the store may be unavailable."""
    deltas: bool = field(default=False, kw_only=True)
    """Publish deltas alongside the chunks, which needs a copy of the weights in host memory."""

    def __post_init__(self) -> None:
        """Create the publisher; connects at the first call."""
        self._publisher = Publisher(self.client, self.waits, limit_s=self.limit_s, deltas=self.deltas)
        self._puller: Puller | None = None

    async def head(self) -> int:
        head = await self._publisher.head(self.job_id)
        return -1 if head is None else head.version

    async def publish(
        self,
        version: int,
        shards: Iterable[Shard],
        *,
        expect: int,
        epoch: int | None = None,
        base_version: int | None = None,
        adapter_json: str = "",
        parity_json: str = "",
    ) -> None:
        part_digests = await self._upload(version, shards)
        await self._publisher.commit(
            self.job_id,
            version,
            expect=expect,
            epoch=epoch,
            part_digests=part_digests,
            config_json=self.config_json,
            base_version=base_version,
            adapter_json=adapter_json,
            parity_json=parity_json,
        )
        if self.deltas and expect < 0:
            # Pinned, so that workers that have the base model get deltas from it.
            await self._publisher.pin(self.job_id, version)

    async def equals(self, version: int, shards: Iterable[Shard]) -> bool | None:
        committed = await self._committed(version)
        return None if committed is None else committed == await self._digests(shards)

    async def digest(self, version: int, shards: Iterable[Shard]) -> str:
        committed = await self._committed(version)
        found = await self._digests(shards) if committed is None else committed
        return digest_of(json.dumps(sorted(found.items())).encode())

    async def _committed(self, version: int) -> Digests | None:
        """Return the digests of a committed version, None if it is no longer retained."""
        waiting = self.waits.on("the weight store", because=f"manifest of version {version}", limit_s=self.limit_s)
        try:
            async with waiting:
                return _digests_in(await retry_unavailable(lambda: self.client.manifest(self.job_id, version)))
        except NotFound:
            return None

    async def damaged(self) -> frozenset[str]:
        try:
            return await self.client.damaged()
        except StoreUnavailable:
            return frozenset()

    def chunks_among(self, shards: Iterable[Shard], digests: AbstractSet[str]) -> list[ChunkCopy]:
        return chunks_among(shards, digests)

    async def restore(self, chunks: Sequence[ChunkCopy]) -> None:
        because = f"upload {len(chunks)} damaged chunks again"
        async with self.waits.on("the weight store", because=because, limit_s=self.limit_s):
            for ref, data in chunks:
                await retry_unavailable(lambda: self.client.put_chunk(ref, memoryview(data)))  # noqa: B023 - awaited

    async def fetch(self, version: int) -> Iterator[Shard]:
        if self._puller is None:
            self._puller = Puller(self.client, Cache(self.cache), self.waits, limit_s=self.limit_s)
        pulled = await self._puller.pull(self.job_id, version)
        return (
            Shard(whole.name, whole.dtype, whole.shape, (0,) * len(whole.shape), whole.shape, data)
            for whole, data in pulled.tensors()
        )

    async def close(self) -> None:
        await self.client.close()
        if self._puller is not None:
            self._puller.close()
            await asyncio.to_thread(shutil.rmtree, self.cache, ignore_errors=True)

    async def _upload(self, version: int, shards: Iterable[Shard]) -> list[str]:
        """Upload all parts of a version and return their digests, rank 0's first."""
        part = await self._publisher.publish(self.job_id, version, 0, shards)
        return [part.digest]

    async def _digests(self, shards: Iterable[Shard]) -> Digests:
        """Return the digests of the shards that would be uploaded."""
        return await asyncio.to_thread(_digests_of, shards)


@dataclass(eq=False, repr=False)
class RanksPublisher(StorePublisher):
    """`WeightPublisher` for ranks: each process uploads its own part of a whole model, and this one commits it.

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
        return shards.chunks_among(digests) if isinstance(shards, RankShards) else super().chunks_among(shards, digests)

    async def _digests(self, shards: Iterable[Shard]) -> Digests:
        if not isinstance(shards, RankShards):
            return await super()._digests(shards)
        return await asyncio.to_thread(shards.digests)


def _digests_in(manifest: Manifest) -> Digests:
    return {
        (entry.name, entry.offset, entry.local_shape, entry.dtype): entry.digest
        for part in manifest.parts
        for entry in part.tensors
    }


def _digests_of(shards: Iterable[Shard]) -> Digests:
    return {(s.name, s.offset, s.local_shape, s.dtype): digest_of(s.data) for s in shards}
