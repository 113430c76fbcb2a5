"""Versions of a few bytes with deltas, and a weight store on any origin that retains one of them."""

from __future__ import annotations

import itertools

from prometheus_client import CollectorRegistry

from rlboost.services.weight_store.app import WeightStore
from rlboost.services.weight_store.chunks import DerivedChunks
from rlboost.services.weight_store.deltas import Deltas
from rlboost.services.weight_store.metrics import Metrics
from rlboost.services.weight_store.ports import Chunks, Documents
from rlboost.shared.process.waiting import Waits
from rlboost.shared.weights.access import ManifestKey
from rlboost.shared.weights.delta_graph import Edge, lists_of
from rlboost.shared.weights.manifest import ChunkRef, Part, TensorEntry, digest_of
from rlboost.shared.weights.rest_models import CommitRequest
from tests.support.memory_bus import MemoryBus

JOB = "job-1"


def store_on(chunks: Chunks, documents: Documents, *, keep_versions: int = 1, now_s: int = 1_000_000) -> WeightStore:
    """Return a store, not yet loaded, whose clock gives another second each time, beginning with `now_s`."""
    metrics, derived = Metrics(CollectorRegistry()), DerivedChunks(chunks)
    clock = itertools.count(now_s)

    def now() -> float:
        return float(next(clock))

    return WeightStore(
        derived,
        documents,
        Deltas(derived, documents, metrics, keep=1, clock=now),
        MemoryBus(),
        Waits(),
        metrics,
        sign=ManifestKey("token").sign,
        keep_versions=keep_versions,
        clock=now,
    )


def content(version: int) -> bytes:
    """Return the weights of a version, one chunk."""
    return b"weights of version %d" % version


def deltas(version: int) -> list[bytes]:
    """Return a placeholder for the delta to a version, which is never applied, and its edge list."""
    if not version:
        return []
    delta = b"delta %d" % version
    edge = Edge(digest_of(content(version)), digest_of(content(version - 1)), digest_of(delta), len(delta))
    return [delta, *lists_of(version - 1, [edge])]


async def publish(store: WeightStore, version: int) -> None:
    """Upload and commit a version, and remove what it makes superfluous."""
    data = content(version)
    entry = TensorEntry(
        name="w",
        dtype="uint8",
        global_shape=(len(data),),
        offset=(0,),
        local_shape=(len(data),),
        start=0,
        n_bytes=len(data),
        digest=digest_of(data),
    )
    blobs = deltas(version)
    for blob in blobs:
        await store.put_chunk(digest_of(blob), [blob])
    edges = tuple(ChunkRef(digest_of(blob), len(blob)) for blob in blobs[1:])
    part = Part(rank=0, chunks=(ChunkRef(digest_of(data), len(data)),), tensors=(entry,), edges=edges)
    await store.put_chunk(digest_of(data), [data])
    await store.put_part(JOB, version, 0, part.encode())
    request = CommitRequest(expect=version - 1, parts=(part.digest,), config_json="{}")
    await store.commit(JOB, version, request)
    await store.collector.collect_once()
