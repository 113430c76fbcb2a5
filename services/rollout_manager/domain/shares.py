"""Which job each preemptible worker serves: fair shares by weight, of those who have something to generate.

A worker serves one model at a time, and changing it means a pull of weights. So workers change only to a job whose
samples wait: at once when they have nothing to do themselves, otherwise after the job has waited below its share for
`PATIENCE_S`. Jobs in opposite phases fill each other's gaps by that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

PATIENCE_S = 1.0
"""How long a job waits below its share before it takes a worker from another job's work."""


@dataclass(frozen=True, slots=True)
class Demand:
    """What a job wants."""

    job_id: str
    share: float
    """Relative to the other jobs' shares."""
    samples: int
    """In flight and admissible: waiting and running."""
    waiting: int
    """Of them, those without a worker."""
    waited_s: float = 0.0
    """How long it has been below its share with samples waiting."""


@dataclass(frozen=True, slots=True)
class Member:
    """A preemptible worker."""

    id: str
    job_id: str
    """What it serves or was told to; empty: nothing."""
    load: int
    batch: int


def fair(demands: Sequence[Demand], workers: int, batch: float) -> dict[str, int]:
    """Return how many workers each job is due: in proportion to the shares, none more than it can fill.

    Args:
        demands: the jobs.
        workers: how many there are.
        batch: how many samples one takes, on average.

    """
    due = {demand.job_id: 0 for demand in demands}
    most = {demand.job_id: -(-demand.samples // max(1, int(batch))) for demand in demands}
    for _ in range(workers):
        hungry = [d for d in demands if due[d.job_id] < most[d.job_id]]
        if not hungry:
            break
        # The job that would still be farthest below its share with one more (Jefferson's method).
        poorest = min(hungry, key=lambda d: ((due[d.job_id] + 1) / d.share, d.job_id))
        due[poorest.job_id] += 1
    return due


def due_of(demands: Sequence[Demand], members: Sequence[Member]) -> dict[str, int]:
    """Return how many of these workers, at least one, each job is due."""
    return fair(demands, len(members), sum(member.batch for member in members) / len(members))


def reassign(demands: Sequence[Demand], members: Sequence[Member], due: Mapping[str, int]) -> dict[str, str]:
    """Return which workers should change to which job, where each job is due so many."""
    have = {demand.job_id: 0 for demand in demands}
    for member in members:
        if member.job_id in have:
            have[member.job_id] += 1
    changes: dict[str, str] = {}
    free = sorted((m for m in members), key=lambda m: (m.load, m.id))
    for demand in sorted(demands, key=lambda d: (have[d.job_id] - due[d.job_id], d.job_id)):
        for member in free:
            if have[demand.job_id] >= due[demand.job_id] or not demand.waiting:
                break
            if member.id not in changes and _may_leave(member, demand, due, have):
                changes[member.id] = demand.job_id
                have[demand.job_id] += 1
                if member.job_id in have:
                    have[member.job_id] -= 1
    return changes


def _may_leave(member: Member, demand: Demand, due: Mapping[str, int], have: Mapping[str, int]) -> bool:
    if member.job_id == demand.job_id:
        return False
    if member.job_id not in due:
        return True
    spare = have[member.job_id] > due[member.job_id]
    return spare and (member.load == 0 or demand.waited_s >= PATIENCE_S)
