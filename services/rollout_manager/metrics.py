"""What Prometheus scrapes of the manager: read from the world when asked, with bounded labels."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

if TYPE_CHECKING:
    from services.rollout_manager.app import Manager


class WorldCollector:
    """A collector of `prometheus_client`."""

    def __init__(self, manager: Manager) -> None:
        """Look at this manager's world."""
        self._manager = manager

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics as of now."""
        leading = float(self._manager.leads)
        yield GaugeMetricFamily("rlboost_manager_leading", "1 where this manager leads, 0 on a standby", value=leading)
        world = self._manager.world
        workers = GaugeMetricFamily("rlboost_workers", "Workers by role and state", labels=["role", "state"])
        states = Counter((worker.joined.role, worker.state) for worker in world.fleet.workers.values())
        for (role, state), n in states.items():
            workers.add_metric([role, state], n)
        yield workers
        rate = sum(worker.tokens_per_s for worker in world.fleet.workers.values())
        yield GaugeMetricFamily("rlboost_tokens_per_second", "Tokens generated a second, all workers", value=rate)
        yield GaugeMetricFamily("rlboost_samples_in_flight", "Samples in flight", value=len(world.ledger.samples))
        yield GaugeMetricFamily("rlboost_tokens_in_flight", "Tokens of them", value=world.ledger.tokens_live)
        tokens = CounterMetricFamily("rlboost_tokens", "Tokens of active jobs by fate", labels=["fate"])
        audits = [world.audits[job.id] for job in world.active_jobs()]
        tokens.add_metric(["delivered"], sum(audit.tokens_delivered for audit in audits))
        tokens.add_metric(["made_again"], sum(sum(audit.tokens_made_again.values()) for audit in audits))
        tokens.add_metric(["saved_by_migration"], sum(audit.tokens_saved for audit in audits))
        yield tokens
        moves = CounterMetricFamily("rlboost_migrations", "Samples that went on elsewhere, active jobs")
        moves.add_metric([], sum(audit.migrations for audit in audits))
        yield moves
