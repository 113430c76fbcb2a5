"""The manager's metrics for Prometheus, read from the world at each scrape."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from prometheus_client import REGISTRY
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from rlboost.services.rollout_manager.ports import ManagerState


class WorldCollector:
    """A collector of `prometheus_client`."""

    def __init__(self, manager: ManagerState) -> None:
        """Collect from this manager's world."""
        self._manager = manager

    def register(self) -> None:
        """Add the metrics to the process's registry."""
        REGISTRY.register(self)

    def collect(self) -> Iterator[Metric]:
        """Yield the present metrics."""
        leading = float(self._manager.leads)
        yield GaugeMetricFamily("rlboost_manager_leading", "1 where this manager leads, 0 on a standby", value=leading)
        world = self._manager.world
        workers = GaugeMetricFamily("rlboost_workers", "Workers by role and state", labels=["role", "state"])
        states = Counter((worker.joined.role, worker.state) for worker in world.fleet.workers.values())
        for (role, state), n in states.items():
            workers.add_metric([role, state], n)
        yield workers
        rate = sum(worker.tokens_per_s for worker in world.fleet.workers.values())
        yield GaugeMetricFamily("rlboost_tokens_per_second", "Tokens generated per second, all workers", value=rate)
        yield GaugeMetricFamily("rlboost_samples_in_flight", "Samples in flight", value=len(world.ledger.samples))
        yield GaugeMetricFamily(
            "rlboost_tokens_in_flight", "Tokens of samples in flight", value=world.ledger.tokens_live
        )
        tokens = CounterMetricFamily("rlboost_tokens", "Tokens of active jobs by outcome", labels=["fate"])
        audits = [world.audits[job.id] for job in world.jobs.active()]
        tokens.add_metric(["delivered"], sum(audit.tokens_delivered for audit in audits))
        tokens.add_metric(["regenerated"], sum(sum(audit.tokens_regenerated.values()) for audit in audits))
        tokens.add_metric(["saved_by_migration"], sum(audit.tokens_saved for audit in audits))
        yield tokens
        migrations = CounterMetricFamily("rlboost_migrations", "Migrated samples of active jobs")
        migrations.add_metric([], sum(audit.migrations for audit in audits))
        yield migrations
