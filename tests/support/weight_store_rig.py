"""A weight store on fakes, and versions for it."""

from __future__ import annotations

from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry

from rlboost.services.weight_store.app import WeightStore
from rlboost.services.weight_store.chunks import DerivedChunks
from rlboost.services.weight_store.deltas import DeltaComposer, Deltas
from rlboost.services.weight_store.domain.versions import Version
from rlboost.services.weight_store.metrics import Metrics
from rlboost.shared.messages import WeightsCommitted
from rlboost.shared.process.waiting import Waits
from rlboost.shared.streams.bus import START
from rlboost.shared.streams.names import WEIGHTS_COMMITTED
from rlboost.shared.weights.access import ManifestKey
from rlboost.shared.weights.manifest import ChunkRef, Part, TensorEntry, digest_of
from rlboost.shared.weights.rest_models import CommitRequest
from tests.support.memory_bus import MemoryBus
from tests.support.store_fakes import MemoryChunks, MemoryDocuments

JOB = "job-1"


@dataclass
class World:
    chunks: MemoryChunks = field(default_factory=MemoryChunks)
    documents: MemoryDocuments = field(default_factory=MemoryDocuments)
    bus: MemoryBus = field(default_factory=MemoryBus)
    waits: Waits = field(default_factory=Waits)
    now: float = 1_000_000.0

    def store(self, keep: int = 2) -> WeightStore:
        metrics = Metrics(CollectorRegistry())
        self.derived = DerivedChunks(self.chunks)
        self.deltas = Deltas(self.derived, self.documents, metrics, keep=3, clock=lambda: self.now)
        self.composer = DeltaComposer(self.deltas, self.derived, self.documents, metrics, clock=lambda: self.now)
        return WeightStore(
            self.derived,
            self.documents,
            self.deltas,
            self.bus,
            self.waits,
            metrics,
            sign=ManifestKey("token").sign,
            keep_versions=keep,
            clock=lambda: self.now,
        )

    async def announced(self) -> list[int]:
        entries = await self.bus.read({WEIGHTS_COMMITTED: START})
        return [entry.message.version for entry in entries if isinstance(entry.message, WeightsCommitted)]


def part_of(content: bytes, rank: int = 0, rows: tuple[int, int] | None = None) -> Part:
    """One rank's rows of a uint8 vector."""
    low, high = rows or (0, len(content))
    data = content[low:high]
    entry = TensorEntry(
        name="w",
        dtype="uint8",
        global_shape=(len(content),),
        offset=(low,),
        local_shape=(high - low,),
        start=0,
        n_bytes=len(data),
        digest=digest_of(data),
    )
    return Part(rank=rank, chunks=(ChunkRef(digest_of(data), len(data)),), tensors=(entry,))


async def publish(store: WeightStore, version: int, content: bytes) -> CommitRequest:
    part = part_of(content)
    await store.put_chunk(digest_of(content), [content])
    await store.put_part(JOB, version, 0, part.encode())
    return CommitRequest(expect=version - 1, parts=(part.digest,), config_json="{}")


async def commit(store: WeightStore, version: int, content: bytes) -> Version:
    return await store.commit(JOB, version, await publish(store, version, content))
