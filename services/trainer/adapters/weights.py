"""Weights as they are exported by ranks, published to the weight store, and fetched from it."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from rlboost.services.trainer.adapters.torch.ranks import RankCalls, TensorSlice
from rlboost.services.trainer.adapters.torch.tensors import ScratchDir, SliceReader
from rlboost.services.trainer.ports.engine import Loaded
from rlboost.shared.errors import NotFound, StoreUnavailable
from rlboost.shared.model.folder import HEAD
from rlboost.shared.process.waiting import Waits
from rlboost.shared.weights.cache import Cache
from rlboost.shared.weights.client import StoreClient, retry_unavailable
from rlboost.shared.weights.lora import adapter_of
from rlboost.shared.weights.manifest import ChunkCopy, ChunkRef, Manifest, Shard, chunks_among, digest_of
from rlboost.shared.weights.publisher import Publisher
from rlboost.shared.weights.puller import Puller
from rlboost.shared.weights.torch_tensors import merged

# --- Shards, as weights are published, and torch tensors --------------------------------------------------------------


def tensor_of(shard: Shard) -> Tensor:
    """Return a copy of a shard as a tensor."""
    return torch.frombuffer(bytearray(shard.data), dtype=getattr(torch, shard.dtype)).reshape(shard.local_shape)


def shard_of(s: TensorSlice, tensor: Tensor) -> Shard:
    """Return a contiguous tensor on the CPU as a shard, which shares its memory."""
    raw = tensor.reshape(-1).view(torch.uint8).numpy().data
    return Shard(s.name, str(tensor.dtype).removeprefix("torch."), s.global_shape, s.offset, s.local_shape, raw)


def whole_shard(name: str, tensor: Tensor) -> Shard:
    """Return a contiguous tensor on the CPU as a shard with all of it, which shares its memory."""
    return shard_of(TensorSlice.whole(name, tuple(tensor.shape)), tensor)


def host_shards(values: Iterable[tuple[TensorSlice, Tensor]]) -> Iterator[Shard]:
    """Yield slices as shards, without a copy if the tensor is in host memory.

    From a GPU the next tensor is copied while the caller uses a shard.
    """
    previous: _HostCopy | None = None
    for s, value in values:
        current = _HostCopy(s, value)
        if previous is not None:
            yield previous.shard()
        previous = current
    if previous is not None:
        yield previous.shard()


class _HostCopy:
    """An asynchronous copy of a tensor to host memory."""

    def __init__(self, s: TensorSlice, value: Tensor) -> None:
        self._slice = s
        self._value = value.detach().contiguous()
        self._copied: torch.cuda.Event | None = None
        if value.device.type == "cuda":
            self._value = torch.empty_like(self._value, device="cpu", pin_memory=True)
            self._value.copy_(value, non_blocking=True)
            self._copied = torch.cuda.current_stream(value.device).record_event()

    def shard(self) -> Shard:
        if self._copied is not None:
            self._copied.synchronize()
        return shard_of(self._slice, self._value)


# --- Tensors that the ranks export: whole, or for a version that the ranks upload to the weight store themselves ------


Shapes = Mapping[str, tuple[int, ...]]
"""Name of a tensor -> shape of the whole tensor."""


class RankShards(Iterator[Shard]):
    """The whole model. If iterated, whole tensors, which the ranks write into a scratch directory first."""

    def __init__(self, ranks: RankCalls, shapes: Shapes, folder: Path | None) -> None:
        """Bind to the ranks; the first iteration asks them for tensors.

        Args:
            ranks: the ranks, with a loaded model.
            shapes: shapes of the model's tensors.
            folder: parent of the scratch directory.

        """
        self._ranks = ranks
        self._whole = whole_shards(ranks, "base", shapes, folder)

    def __next__(self) -> Shard:
        return next(self._whole)

    def digests(self) -> dict[tuple[str, tuple[int, ...], tuple[int, ...], str], str]:
        """Return (name, offset, shape, dtype) -> digest of every rank's shards."""
        return {
            (name, tuple(offset), tuple(shape), dtype): digest
            for found in self._ranks.call("digests", {})
            for name, offset, shape, dtype, digest in found
        }

    def chunks_among(self, digests: AbstractSet[str]) -> list[ChunkCopy]:
        """Return copies of the chunks with these digests, as the ranks publish them."""
        found = self._ranks.call("chunks_among", {"digests": list(digests)})
        return [(ChunkRef(digest_of(data), len(data)), data) for of_rank in found for data in of_rank]

    def publish(self, store: dict[str, str], job_id: str, version: int, *, limit_s: float, deltas: bool) -> list[str]:
        """Have each rank upload its part of a version to the weight store; return the parts' digests, in order.

        Args:
            store: `url` and `token` of the weight store.
            job_id: the job whose weights these are.
            version: the weight version.
            limit_s: how long the store may be unavailable.
            deltas: publish deltas too.

        Raises:
            WaitTimedOut: the store was unavailable for longer than `limit_s`.

        """
        arguments = {"store": store, "job_id": job_id, "version": version, "limit_s": limit_s, "deltas": deltas}
        return [digest for digest in self._ranks.call("publish", arguments) if digest]


def whole_shards(ranks: RankCalls, what: Loaded, shapes: Shapes, folder: Path | None) -> Iterator[Shard]:
    """Yield the tensors of the model or of its adapter. The arguments are those of `RankShards`."""
    with ScratchDir(folder) as directory:
        ranks.call("write", {"directory": str(directory), "what": what})
        with SliceReader(sorted(directory.iterdir())) as reader:
            for name, shape in shapes.items():
                yield whole_shard(name, reader.read(TensorSlice.whole(name, shape)))


def merged_shards(
    base: Iterable[Shard], adapter: Iterable[Shard], adapter_json: str, shapes: Shapes
) -> Iterator[Shard]:
    """Yield the tensors of a model with its adapter merged in, with the same bits as workers merge it.

    The head of a reward model comes from the adapter.

    Args:
        base: the whole tensors of the model.
        adapter: the tensors of the adapter.
        adapter_json: PEFT's `adapter_config.json`.
        shapes: shapes of the model's tensors.

    """
    tensors = {shard.name: tensor_of(shard) for shard in adapter}
    if (head := tensors.pop(f"base_model.model.{HEAD}", None)) is not None:
        adapter_json = json.dumps({**json.loads(adapter_json), "modules_to_save": None})
    found = adapter_of(adapter_json, {name: tuple(tensor.shape) for name, tensor in tensors.items()}, shapes)
    for shard in base:
        if (pair := found.factors.get(shard.name)) is None:
            yield shard
        else:
            yield whole_shard(shard.name, merged(tensor_of(shard), tensors[pair.a], tensors[pair.b], found.scaling))
    if head is not None:
        yield whole_shard(HEAD, head)


# --- Publishes weights to the weight store and fetches them, with the client of `shared.weights` ----------------------


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
