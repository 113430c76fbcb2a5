"""What one more preemptible worker is worth.

In the paper's model (section 4.1), reserved engines and workers generate during the seeding window, and the workers
alone during training. A step's generation takes a fixed number of *worker-seconds at full throughput*, so a larger
fleet needs a shorter window, until none is left: from `target_workers` (N_prem in the paper) on, one more is worth
nothing. An upper estimate where long samples, and not throughput, decide when a step ends.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

from rlboost.services.rollout_manager.domain.jobs import Job
from rlboost.services.rollout_manager.domain.world import World

_HOUR_S = 3600.0


@dataclass(frozen=True, slots=True)
class WorkerWorth:
    """What one more worker would change."""

    job_id: str
    tokens_per_hour: float
    """Additional tokens delivered."""
    dollars_per_hour: float
    """What these tokens cost with the present workers. It pays if its price is lower."""
    price_per_hour: float
    """Mean price of the present preemptible workers; 0 if there are none."""


def step_duration_s(workers: float, reserved: float, work_s: float, train_s: float) -> float:
    """Return how long window and training of a step take.

    Args:
        workers: number of preemptible workers.
        reserved: number of reserved workers.
        work_s: generation of a step in worker-seconds at full throughput.
        train_s: training time of a step.

    """
    remaining_s = max(0.0, work_s - workers * train_s)
    if not remaining_s:
        return train_s
    return remaining_s / (workers + reserved) + train_s if workers + reserved else math.inf


def saved_by_one_more_s(workers: float, reserved: float, work_s: float, train_s: float) -> float:
    """Return by how much one more worker shortens a step; infinity if nothing generates now."""
    after_s = step_duration_s(workers + 1, reserved, work_s, train_s)
    return step_duration_s(workers, reserved, work_s, train_s) - after_s


def worth_of_one_more(world: World) -> dict[str, Any] | None:
    """Return what one more preemptible worker is worth to the job that gains most; None while that is unknown."""
    known = [worth for job in world.jobs.active() if (worth := _worth(world, job)) is not None]
    return asdict(max(known, key=lambda worth: worth.tokens_per_hour)) if known else None


def _worth(world: World, job: Job) -> WorkerWorth | None:
    tuner = job.window_tuner
    workers = [worker for worker in world.fleet.workers.values() if worker.job == job.id and worker.state != "draining"]
    reserved = sum(worker.reserved for worker in workers)
    if tuner.target_workers is None or not tuner.train_s or not workers:
        return None
    preemptible = [worker for worker in workers if not worker.reserved]
    work_s = tuner.target_workers * tuner.train_s
    saved_s = saved_by_one_more_s(len(preemptible), reserved, work_s, tuner.train_s)
    # The measured step also has a tail, pulls of weights and publishing, which no further worker shortens.
    after_s = max(tuner.step_s - saved_s, tuner.train_s)
    speedup = max(0.0, tuner.step_s / after_s - 1.0) if saved_s else 0.0
    kinds = Counter(worker.joined.kind for worker in preemptible)
    available = sum(n * world.fleet.availability_of(kind) for kind, n in kinds.items())
    share = available / len(preemptible) if preemptible else 1.0
    prices = [worker.joined.price_per_hour for worker in preemptible]
    return WorkerWorth(
        job_id=job.id,
        tokens_per_hour=speedup * share * tuner.tokens_per_s * _HOUR_S,
        dollars_per_hour=speedup * share * sum(worker.joined.price_per_hour for worker in workers),
        price_per_hour=sum(prices) / len(prices) if prices else 0.0,
    )
