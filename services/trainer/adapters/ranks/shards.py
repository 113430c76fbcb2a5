"""Tensors that the ranks export: whole, or for a version that the ranks upload to the weight store themselves."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from pathlib import Path

from rlboost.services.trainer.adapters.ranks.calls import RankCalls
from rlboost.services.trainer.adapters.ranks.scratch_dir import ScratchDir
from rlboost.services.trainer.adapters.ranks.sharded_tensors import SliceReader
from rlboost.services.trainer.adapters.ranks.tensor_slice import TensorSlice
from rlboost.services.trainer.adapters.shard_tensors import tensor_of, whole_shard
from rlboost.services.trainer.ports.engine import Loaded
from rlboost.shared.weights.lora import adapter_of
from rlboost.shared.weights.manifest import ChunkRef, digest_of
from rlboost.shared.weights.shards import ChunkCopy, Shard
from rlboost.shared.weights.torch_tensors import merged

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

    Args:
        base: the whole tensors of the model.
        adapter: the tensors of the adapter.
        adapter_json: PEFT's `adapter_config.json`.
        shapes: shapes of the model's tensors.

    """
    tensors = {shard.name: tensor_of(shard) for shard in adapter}
    found = adapter_of(adapter_json, {name: tuple(tensor.shape) for name, tensor in tensors.items()}, shapes)
    for shard in base:
        if (pair := found.factors.get(shard.name)) is None:
            yield shard
        else:
            yield whole_shard(shard.name, merged(tensor_of(shard), tensors[pair.a], tensors[pair.b], found.scaling))
