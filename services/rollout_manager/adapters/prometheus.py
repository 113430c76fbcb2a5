"""The manager's metrics for Prometheus, read from the world at each scrape."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import get_args

from prometheus_client import REGISTRY
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from rlboost.services.rollout_manager.domain.jobs import Audit
from rlboost.services.rollout_manager.domain.world import World
from rlboost.shared.messages import JobState


class WorldCollector:
    """A collector of `prometheus_client`.

    Args:
        leads: returns True if the manager leads.
        world: returns the manager's world, which each recovery replaces.

    """

    def __init__(self, leads: Callable[[], bool], world: Callable[[], World]) -> None:
        self._leads, self._world = leads, world
        self._audits: dict[str, Audit] = {}
        """Job id -> audit, for all jobs seen while this manager led."""

    def register(self) -> None:
        """Add the metrics to the process's registry."""
        REGISTRY.register(self)

    def collect(self) -> Iterator[Metric]:
        """Yield the present metrics."""
        leading = float(self._leads())
        yield GaugeMetricFamily("rlboost_manager_leading", "1 where this manager leads, 0 on a standby", value=leading)
        world = self._world()
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
        yield from self._counters()
        yield from self._jobs()

    def _counters(self) -> Iterator[Metric]:
        tokens = CounterMetricFamily("rlboost_tokens", "Tokens of jobs by outcome", labels=["outcome"])
        migrations = CounterMetricFamily("rlboost_migrations", "Migrated samples of jobs")
        preemptions = CounterMetricFamily(
            "rlboost_preemptions",
            "Preempted workers; one that served no job counts once for each running or paused job",
            labels=["kind"],
        )
        dollars = CounterMetricFamily("rlboost_cost_dollars", "What jobs have cost")
        # A counter must not start at 0 when another manager has counted before, nor fall when the world drops an
        # ended job: Prometheus would count what was there before as new.
        if self._leads():
            self._audits |= {job.id: job.audit for job in self._world().jobs.values() if job.is_audited}
            audits = self._audits.values()
            tokens.add_metric(["delivered"], sum(audit.tokens_delivered for audit in audits))
            tokens.add_metric(["regenerated"], sum(sum(audit.tokens_regenerated.values()) for audit in audits))
            tokens.add_metric(["saved_by_migration"], sum(audit.tokens_saved for audit in audits))
            migrations.add_metric([], sum(audit.migrations for audit in audits))
            for kind in ("with_notice", "without_notice"):
                preemptions.add_metric([kind], sum(audit.preemptions[kind] for audit in audits))
            dollars.add_metric([], sum(audit.cost.dollars for audit in audits))
        yield from (tokens, migrations, preemptions, dollars)

    def _jobs(self) -> Iterator[Metric]:
        world = self._world()
        jobs = GaugeMetricFamily("rlboost_jobs", "Jobs by state, ended ones for 7 days", labels=["state"])
        states = Counter(job.record.state for job in world.jobs.values())
        for state in get_args(JobState):
            jobs.add_metric([state], states[state])
        yield jobs
        stalled = sum(job.progress.stalled_since_unix_s is not None for job in world.jobs.active())
        yield GaugeMetricFamily(
            "rlboost_jobs_stalled", "Jobs with queued samples that no worker can take", value=stalled
        )
