"""Receives uploads of chunks in threads, without passing through the ASGI app; see `http.body_receiver`."""

from __future__ import annotations

from collections.abc import Callable

from rlboost.services.weight_store.app import WeightStore
from rlboost.services.weight_store.metrics import Metrics
from rlboost.shared.http.body_receiver import BodyReceiver
from rlboost.shared.weights.manifest import CHUNK_BYTES
from rlboost.shared.weights.transfer.blob_response import digest_in


def chunk_receiver(store: WeightStore, metrics: Metrics, authorized: Callable[[str], bool]) -> BodyReceiver:
    """Return the receiver of plain uploads of chunks; `authorized` takes their `Authorization` header."""

    def accepts(path: str, authorization: str) -> bool:
        return bool(digest_in(path)) and authorized(authorization)

    async def put(path: str, body: memoryview) -> None:
        await store.put_chunk(digest_in(path), [body])
        metrics.bytes_in.inc(len(body))

    return BodyReceiver(accepts, put, max_bytes=CHUNK_BYTES)
