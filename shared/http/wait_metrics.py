"""A process's current waits for Prometheus. Their subjects are no labels: they name steps and versions."""

from __future__ import annotations

import time
from collections.abc import Iterator

from prometheus_client import Metric
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from rlboost.shared.process.waiting import Waits


class WaitMetrics(Collector):
    """Reads the waits at the time of the scrape."""

    def __init__(self, waits: Waits) -> None:
        """Read these waits."""
        self._waits = waits

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics; 0 without a wait."""
        now, waits = time.time(), self._waits.current()
        oldest_s = max((now - wait.since for wait in waits), default=0.0)
        ratio = max(((now - wait.since) / wait.limit_s for wait in waits), default=0.0)
        yield GaugeMetricFamily("rlboost_wait_oldest_seconds", "How long the oldest current wait has lasted", oldest_s)
        yield GaugeMetricFamily(
            "rlboost_wait_limit_ratio",
            "Highest elapsed fraction of the limit of a current wait; at 1 the wait fails",
            ratio,
        )
