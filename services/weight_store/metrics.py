"""Prometheus metrics of the weight store."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter


class Metrics:
    """Counters of one process."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.bytes_in = Counter("rlboost_weight_store_bytes_in", "Bytes of chunks received", registry=registry)
        self.bytes_out = Counter("rlboost_weight_store_bytes_out", "Bytes of chunks sent", registry=registry)
        self.bytes_redirected = Counter(
            "rlboost_weight_store_bytes_redirected",
            "Bytes of chunks for which clients were redirected to the object store",
            registry=registry,
        )
        self.commits = Counter("rlboost_weight_store_commits", "Versions committed", registry=registry)
        self.deltas_applied = Counter(
            "rlboost_weight_store_deltas_applied", "Chunks derived from uploaded deltas", registry=registry
        )
        self.deltas_composed = Counter(
            "rlboost_weight_store_deltas_composed",
            "Deltas over several versions composed of shorter ones",
            registry=registry,
        )
        self.chunks_removed = Counter(
            "rlboost_weight_store_chunks_removed", "Chunks removed as garbage", registry=registry
        )
