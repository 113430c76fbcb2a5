"""Allocates preemptible workers to jobs: fair shares by weight, among the jobs with samples to generate.

A worker serves one model at a time, and a change of model costs a pull of weights. So workers change only to a job
with queued samples: at once if they are idle, otherwise after the job has been below its share for `PATIENCE_S`. Jobs
in opposite phases thereby fill each other's gaps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

PATIENCE_S = 1.0
"""How long a job stays below its share before it takes a busy worker from another job."""


@dataclass(frozen=True, slots=True)
class Demand:
    """What a job asks for."""

    job_id: str
    weight: float
    """Its share relative to the other jobs' shares."""
    samples: int
    """Its admissible samples in flight: queued and running."""
    queued: int
    """How many of `samples` have no worker."""
    below_share_s: float = 0.0
    """How long it has been below its share with samples queued."""


@dataclass(frozen=True, slots=True)
class AllocatedWorker:
    """A preemptible worker that is allocated to a job, or to none."""

    id: str
    job_id: str
    """The job that it is allocated to; empty: none."""
    load: int
    batch_cap: int


def fair_shares(demands: Sequence[Demand], n_workers: int, batch_cap: float) -> dict[str, int]:
    """Return the fair share of each job in workers: in proportion to the weights, none more than it can fill.

    Args:
        demands: the jobs.
        n_workers: number of workers.
        batch_cap: mean number of samples that one worker runs.

    """
    shares = {demand.job_id: 0 for demand in demands}
    fillable = {demand.job_id: -(-demand.samples // max(1, int(batch_cap))) for demand in demands}
    for _ in range(n_workers):
        unfilled = [d for d in demands if shares[d.job_id] < fillable[d.job_id]]
        if not unfilled:
            break
        # The job that would still be farthest below its share with one more (Jefferson's method).
        poorest = min(unfilled, key=lambda d: ((shares[d.job_id] + 1) / d.weight, d.job_id))
        shares[poorest.job_id] += 1
    return shares


def shares_of(demands: Sequence[Demand], workers: Sequence[AllocatedWorker]) -> dict[str, int]:
    """Return the fair share of each job in `workers`, which must not be empty."""
    return fair_shares(demands, len(workers), sum(worker.batch_cap for worker in workers) / len(workers))


def reallocate(
    demands: Sequence[Demand], workers: Sequence[AllocatedWorker], shares: Mapping[str, int]
) -> dict[str, str]:
    """Return which workers should change to which job, given each job's fair share."""
    have = {demand.job_id: 0 for demand in demands}
    for worker in workers:
        if worker.job_id in have:
            have[worker.job_id] += 1
    changes: dict[str, str] = {}
    by_load = sorted(workers, key=lambda w: (w.load, w.id))
    for demand in sorted(demands, key=lambda d: (have[d.job_id] - shares[d.job_id], d.job_id)):
        for worker in by_load:
            if have[demand.job_id] >= shares[demand.job_id] or not demand.queued:
                break
            if worker.id not in changes and _may_change(worker, demand, shares, have):
                changes[worker.id] = demand.job_id
                have[demand.job_id] += 1
                if worker.job_id in have:
                    have[worker.job_id] -= 1
    return changes


def _may_change(worker: AllocatedWorker, demand: Demand, shares: Mapping[str, int], have: Mapping[str, int]) -> bool:
    if worker.job_id == demand.job_id:
        return False
    if worker.job_id not in shares:
        return True
    above_share = have[worker.job_id] > shares[worker.job_id]
    return above_share and (worker.load == 0 or demand.below_share_s >= PATIENCE_S)
