"""The slices of tensors that a rank publishes, and how they are split into chunks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from collections.abc import Set as AbstractSet
from typing import NamedTuple

from rlboost.shared.weights.manifest import CHUNK_BYTES, ChunkRef, TensorEntry, digest_of

ChunkCopy = tuple[ChunkRef, bytes]
"""A chunk and its bytes, which no later change of the shards affects."""


class Shard(NamedTuple):
    """One rank's slice of a tensor, C-contiguous in any buffer; the bytes must not change until `publish` returns.

    With torch: `tensor.detach().cpu().contiguous().view(torch.uint8).numpy().data`.
    """

    name: str
    dtype: str
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    local_shape: tuple[int, ...]
    data: memoryview | bytes | bytearray


class Chunk(NamedTuple):
    """One chunk of a part's byte stream."""

    ref: ChunkRef
    data: memoryview
    dtype: str
    """Dtype of most of its bytes."""


def chunks_among(shards: Iterable[Shard], digests: AbstractSet[str]) -> list[ChunkCopy]:
    """Return copies of the chunks with these digests, as one rank's `Publisher.publish` splits its shards."""
    chunks = split(shards, CHUNK_BYTES, [])
    return [(chunk.ref, bytes(chunk.data)) for chunk in chunks if chunk.ref.digest in digests]


def split(shards: Iterable[Shard], chunk_bytes: int, entries: list[TensorEntry]) -> Iterator[Chunk]:
    """Concatenate the shards and split them into chunks; add each shard to `entries`. Copies only at shard borders."""
    blocks: list[tuple[memoryview, str]] = []
    start, free = 0, chunk_bytes
    for shard in shards:
        data = _flat(shard.data)
        entries.append(
            TensorEntry(
                name=shard.name,
                dtype=shard.dtype,
                global_shape=shard.global_shape,
                offset=shard.offset,
                local_shape=shard.local_shape,
                start=start,
                n_bytes=len(data),
                digest=digest_of(data),
            )
        )
        start += len(data)
        while data:
            block, data = data[:free], data[free:]
            blocks.append((block, shard.dtype))
            free -= len(block)
            if not free:
                yield _join(blocks)
                blocks, free = [], chunk_bytes
    if blocks:
        yield _join(blocks)


def _join(blocks: list[tuple[memoryview, str]]) -> Chunk:
    data = blocks[0][0] if len(blocks) == 1 else memoryview(b"".join(block for block, _ in blocks))
    share: Counter[str] = Counter()
    for block, dtype in blocks:
        share[dtype] += len(block)
    return Chunk(ChunkRef(digest_of(data), len(data)), data, share.most_common(1)[0][0])


def _flat(data: memoryview | bytes | bytearray) -> memoryview:
    view = memoryview(data)
    # A view with a zero in its shape cannot be cast.
    return view.cast("B") if view.nbytes else memoryview(b"")
