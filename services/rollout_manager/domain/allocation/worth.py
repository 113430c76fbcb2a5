"""What one more preemptible worker is worth, and how many pay for themselves.

Reserved engines and workers generate during the seeding window, and the workers alone during training (section 4.1 of
the paper). A larger fleet needs a shorter window: see `Generation`. From `target_workers` (N_prem in the paper) on, one
more is worth little or nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from rlboost.services.rollout_manager.domain.jobs.record import Job
from rlboost.services.rollout_manager.domain.seeding.tuner import WindowTuner
from rlboost.services.rollout_manager.domain.workers.worker import Worker
from rlboost.services.rollout_manager.domain.world import World
from rlboost.shared.units import HOUR_S


@dataclass(frozen=True, slots=True)
class WorkerWorth:
    """What one more worker would change."""

    job_id: str
    tokens_per_hour: float
    """Additional tokens delivered."""
    dollars_per_hour: float
    """Cost of these tokens with the trainer and the present workers. Another one pays for itself if it costs less."""
    price_per_hour: float
    """Mean price of the present preemptible workers; 0 if there are none."""


class Offer(NamedTuple):
    """Preemptible workers of one kind that a provider can start."""

    kind: str
    n_workers: int
    price_per_hour: float
    """Price of one worker in dollars; 0 if unknown."""
    availability: float
    """Fraction of its time in which a worker generates: see `Fleet.availability_of`."""


def speedup_of_one_more(tuner: WindowTuner, workers: int, reserved: int) -> float:
    """Return the relative gain in throughput by one more than `workers`; infinity if none would generate without it."""
    before_s, after_s = (expected_step_s(tuner, n, reserved) for n in (workers, workers + 1))
    return before_s / after_s - 1.0


def expected_step_s(tuner: WindowTuner, workers: int, reserved: int) -> float:
    """Return how long a step would take with this many preemptible workers; infinity without any worker.

    The last step also had costs that no worker shortens: a tail, weight pulls, publishing. Its excess over the model's
    time for `fleet_mean` workers is added for any number of workers.
    """
    generation, train_s = tuner.generation, tuner.train_s
    overhead_s = max(0.0, tuner.step_s - generation.step_s(tuner.fleet_mean, reserved, train_s))
    return generation.step_s(workers, reserved, train_s) + overhead_s


def worth_of_one_more(world: World) -> dict[str, Any] | None:
    """Return what one more preemptible worker is worth to the job that gains most; None while that is unknown."""
    known = [worth for job in world.jobs.active() if (worth := _worth(world, job)) is not None]
    return asdict(max(known, key=lambda worth: worth.tokens_per_hour)) if known else None


def paying_workers(world: World, job: Job, offers: Iterable[Offer]) -> Counter[str] | None:
    """Return how many preemptible workers of each kind to have, each of them worth its price; None while unknown.

    With each worker that pays, a token gets cheaper. An offer without a price always pays. So does every offer while
    the training time is unknown, no reserved worker is present, or one has no price and the trainer has none either.

    Args:
        world: the fleet.
        job: the job that they generate for.
        offers: the workers that providers can start, preferred first.

    """
    tuner = job.window_tuner
    if tuner.target_workers is None:
        return None
    target = tuner.target_workers
    reserved, _ = _serving_workers(world, job)
    is_priced = world.progress[job.id].trainer_price_per_hour or all(worker.price_per_hour for worker in reserved)
    is_weighed = tuner.train_s and reserved and is_priced
    dollars = _dollars_per_hour(world, job, reserved)
    found: Counter[str] = Counter()
    for offer in offers:
        for _ in range(min(offer.n_workers, target - found.total())):
            if is_weighed:
                speedup = speedup_of_one_more(tuner, found.total(), len(reserved))
                if offer.availability * speedup * dollars < offer.price_per_hour:
                    break
            found[offer.kind] += 1
            dollars += offer.price_per_hour
    return found


def step_without_spot(world: World, job: Job) -> tuple[float, float] | None:
    """Return seconds and dollars of the last measured step with the job's reserved workers alone, None before one."""
    step_s, (reserved, _) = world.progress[job.id].step_without_spot_s, _serving_workers(world, job)
    if step_s is None or not reserved:
        return None
    return step_s, step_s / HOUR_S * _dollars_per_hour(world, job, reserved)


def _serving_workers(world: World, job: Job) -> tuple[list[Worker], list[Worker]]:
    """Return the job's reserved and preemptible workers that do not drain."""
    workers = [worker for worker in world.fleet.workers.values() if worker.job == job.id and worker.state != "draining"]
    return [worker for worker in workers if worker.reserved], [worker for worker in workers if not worker.reserved]


def _dollars_per_hour(world: World, job: Job, workers: Iterable[Worker]) -> float:
    """Return what the job's trainer and these workers cost."""
    return world.progress[job.id].trainer_price_per_hour + sum(worker.price_per_hour for worker in workers)


def _worth(world: World, job: Job) -> WorkerWorth | None:
    tuner = job.window_tuner
    reserved, preemptible = _serving_workers(world, job)
    if tuner.target_workers is None or not tuner.train_s or not (reserved or preemptible):
        return None
    speedup = speedup_of_one_more(tuner, len(preemptible), len(reserved))
    kinds = Counter(worker.joined.kind for worker in preemptible)
    available = sum(n * world.fleet.availability_of(kind) for kind, n in kinds.items())
    share = available / len(preemptible) if preemptible else 1.0
    prices = [worker.price_per_hour for worker in preemptible]
    return WorkerWorth(
        job_id=job.id,
        tokens_per_hour=speedup * share * tuner.tokens_per_s * HOUR_S,
        dollars_per_hour=speedup * share * _dollars_per_hour(world, job, [*reserved, *preemptible]),
        price_per_hour=sum(prices) / len(prices) if prices else 0.0,
    )
