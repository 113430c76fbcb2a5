"""A chunk out of an older one and the deltas between them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from shared.errors import Corrupt
from shared.weights import codec
from shared.weights.client import StoreClient, persistently
from shared.weights.edges import Edge
from shared.weights.manifest import digest_of
from shared.weights.plan import Way


async def rebuilt(client: StoreClient, way: Way, base: Callable[[], bytes]) -> bytes:
    """Return the chunk at the end of a path of deltas, verified.

    Args:
        client: of the store that has the deltas.
        way: with a path of one edge at least.
        base: reads the chunk that the path begins at; called in a thread.

    Raises:
        Corrupt: a delta, or what comes out in the end, does not have its digest.
        CorruptDelta: a delta is none, or none to its base.
        NotFound: the store has dropped a delta meanwhile.

    """
    data = await asyncio.to_thread(base)
    for edge in way.path:
        delta = await _fetched(client, edge)
        data = await asyncio.to_thread(codec.apply, data, delta)
    if await asyncio.to_thread(digest_of, data) != way.chunk.digest:
        raise Corrupt(f"chunk {way.chunk.digest} does not come out of its deltas")
    return data


async def _fetched(client: StoreClient, edge: Edge) -> bytearray:
    data = bytearray()

    async def fetch() -> None:
        if len(data) >= edge.n_bytes:
            return
        async with client.chunk(edge.delta, len(data)) as (first, blocks):
            del data[first:]
            async for block in blocks:
                data.extend(block)
                if len(data) > edge.n_bytes:
                    raise Corrupt(f"delta {edge.delta} is longer than the {edge.n_bytes} bytes that its edge tells")

    await persistently(fetch)
    if digest_of(data) != edge.delta:
        raise Corrupt(f"delta {edge.delta} came with another digest")
    return data
