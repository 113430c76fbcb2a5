"""What jobs cost, and what one more worker is worth."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from rlboost.services.rollout_manager.domain.effects import Effect, Now, event
from rlboost.services.rollout_manager.domain.jobs import Audit, Cost, JobEntry, Jobs
from rlboost.services.rollout_manager.domain.offers import NO_LIMITS, ROUNDING, Limits, Offer, cheapest_first
from rlboost.services.rollout_manager.domain.windows import WindowTuner
from rlboost.services.rollout_manager.domain.workers import Fleet, Worker
from rlboost.services.rollout_manager.domain.world import PeriodicDecisions
from rlboost.shared.job.fleet import HOUR_S

# --- worth ------------------------------------------------------------------------------------------------------------
#
# What one more preemptible worker is worth, and how many pay for themselves.
#
# Reserved engines and workers generate during the seeding window, and the workers alone during training (section 4.1
# of the paper). A larger fleet needs a shorter window: see `Generation`. From `target_workers` (N_prem in the paper)
# on, one more is worth little or nothing.


LEAST_SPEEDUP = 0.01
"""A worker that shortens a step by less does not help to meet a deadline."""


def speedup_of_one_more(tuner: WindowTuner, workers: float, reserved: int, speed: float = 1.0) -> float:
    """Return the relative gain in throughput by one more than `workers`; infinity if none would generate without it.

    Args:
        tuner: what was learned of the job.
        workers: number of preemptible workers, as mean ones.
        reserved: number of reserved workers.
        speed: throughput of the additional worker relative to a mean one.

    """
    before_s, after_s = (expected_step_s(tuner, n, reserved) for n in (workers, workers + speed))
    return before_s / after_s - 1.0 if after_s else 0.0


def expected_step_s(tuner: WindowTuner, workers: float, reserved: int) -> float:
    """Return how long a step would take with this many preemptible workers; infinity without any worker.

    The last step also had costs that no worker shortens: a tail, weight pulls, publishing. Its excess over the model's
    time for `fleet_mean` workers is added for any number of workers.
    """
    generation, train_s = tuner.generation, tuner.train_s
    overhead_s = max(0.0, tuner.step_s - generation.step_s(tuner.fleet_mean, reserved, train_s))
    return generation.step_s(workers, reserved, train_s) + overhead_s


def worth_of_one_more(jobs: Jobs, fleet: Fleet) -> dict[str, Any] | None:
    """Return what one more preemptible worker is worth to the job that gains most; None while that is unknown.

    It pays for itself if it costs less than `dollars_per_hour`: what the additional tokens cost with the trainer and
    the present workers. `price_per_hour` is the mean of the present preemptible workers; 0 if there are none.
    """
    known = [worth for job in jobs.active() if (worth := _worth(jobs, fleet, job)) is not None]
    return max(known, key=lambda worth: worth["tokens_per_hour"]) if known else None


class Paying(NamedTuple):
    """Preemptible workers that a job should have."""

    workers: Counter[str]
    """Kind -> workers."""
    finishes_at: float | None = None
    """When the job will end with them (Unix seconds), if that is later than its deadline. Without any worker it waits,
    and its wait says so."""
    missing: float = 0.0
    """Mean workers of the job that it should have besides, if limits and not prices forbid them."""


def paying_workers(
    jobs: Jobs, fleet: Fleet, job: JobEntry, offers: Sequence[Offer], limits: Limits = NO_LIMITS, now: float = 0.0
) -> Paying | None:
    """Return how many preemptible workers of each kind to have, each of them worth its price; None while unknown.

    With each worker that pays, a token gets cheaper. An offer without a price always pays. So does every offer while
    the training time is unknown, no reserved worker is present, or one has no price and the trainer has none either.
    A job with a deadline also gets the workers without which it would end too late. Those that a closed offer has not
    got do not make it end earlier.

    Args:
        jobs: all jobs.
        fleet: has the workers that serve the job.
        job: the job that they generate for.
        offers: the workers that providers can start; their speeds count mean workers of the job's last steps.
        limits: what these workers do not pass.
        now: this moment in Unix seconds.

    """
    tuner = job.record.window_tuner
    if tuner.target_workers is None:
        return None
    reserved, _ = serving_workers(jobs, fleet, job)
    is_priced = job.progress.trainer_price_per_hour or all(worker.price_per_hour for worker in reserved)
    is_weighed = tuner.train_s and reserved and is_priced
    dollars = _dollars_per_hour(job, reserved)
    limit_s = _longest_step_s(job, now)
    found: Counter[str] = Counter()
    work = expected_work = 0.0
    step_s = expected_step_s(tuner, 0, len(reserved))
    target, missing = _workers_worth_having(tuner, tuner.target_workers, offers), 0.0
    for offer in cheapest_first(offers, limits):
        speedup = speedup_of_one_more(tuner, work, len(reserved), offer.speed)
        is_weighed_off = is_weighed and offer.availability * speedup * dollars < offer.price_per_hour
        is_enough = target - work < 0.5 * offer.speed
        is_expected = not offer.closed or found[offer.kind] < offer.n_present
        is_in_time = step_s <= limit_s or speedup < LEAST_SPEEDUP or not is_expected
        if (is_enough or is_weighed_off) and is_in_time:
            break
        found[offer.kind] += 1
        work += offer.speed
        expected_work += offer.speed if is_expected else 0.0
        dollars += offer.price_per_hour
        step_s = expected_step_s(tuner, expected_work, len(reserved))
    else:
        missing = max(0.0, target - work)
    finishes_at = now + _steps_left(job) * step_s if limit_s < step_s < math.inf else None
    return Paying(found, finishes_at, missing)


def _workers_worth_having(tuner: WindowTuner, target: int, offers: Sequence[Offer]) -> float:
    """Return the number of mean workers worth having, rounded up to a worker of the slowest offer.

    One worker, the mean of a fast reserved one, may do the work of dozens that an offer has.
    """
    spare_s, least = tuner.train_s - tuner.latency_s, min((offer.speed for offer in offers), default=0.0)
    if not tuner.work_s or spare_s <= 0 or not least:
        return target
    return min(target, math.ceil(tuner.work_s / spare_s / least - ROUNDING) * least)


def _steps_left(job: JobEntry) -> int:
    return max(0, job.record.spec.steps - job.record.step)


def _longest_step_s(job: JobEntry, now: float) -> float:
    """Return how long a step may take for the job to meet its deadline; infinity without one."""
    finish_by = getattr(job.record.spec.elastic, "finish_by", None)
    left = _steps_left(job)
    return (finish_by.timestamp() - now) / left if finish_by is not None and left else math.inf


def step_without_spot(jobs: Jobs, fleet: Fleet, job: JobEntry) -> tuple[float, float] | None:
    """Return seconds and dollars of the last measured step with the job's reserved workers alone, None before one."""
    step_s, (reserved, _) = job.progress.step_without_spot_s, serving_workers(jobs, fleet, job)
    if step_s is None or not reserved:
        return None
    return step_s, step_s / HOUR_S * _dollars_per_hour(job, reserved)


def serving_workers(jobs: Jobs, fleet: Fleet, job: JobEntry) -> tuple[list[Worker], list[Worker]]:
    """Return the job's reserved and preemptible workers that neither drain nor yield.

    Its reserved workers may serve its other models for a while.
    """
    family = jobs.family_of(job.id)
    available = (worker for worker in fleet.workers.values() if worker.is_available)
    workers = [one for one in available if job.id in one.jobs or (one.reserved and one.job in family)]
    return [worker for worker in workers if worker.reserved], [worker for worker in workers if not worker.reserved]


def _dollars_per_hour(job: JobEntry, workers: Iterable[Worker]) -> float:
    """Return what the job's trainer and these workers cost."""
    return job.progress.trainer_price_per_hour + sum(worker.price_per_hour for worker in workers)


def _worth(jobs: Jobs, fleet: Fleet, job: JobEntry) -> dict[str, Any] | None:
    tuner = job.record.window_tuner
    reserved, preemptible = serving_workers(jobs, fleet, job)
    if tuner.target_workers is None or not tuner.train_s or not (reserved or preemptible):
        return None
    speedup = speedup_of_one_more(tuner, len(preemptible), len(reserved))
    kinds = Counter(worker.joined.kind for worker in preemptible)
    available = sum(n * fleet.availability_of(kind) for kind, n in kinds.items())
    share = available / len(preemptible) if preemptible else 1.0
    prices = [worker.price_per_hour for worker in preemptible]
    return {
        "job_id": job.id,
        "tokens_per_hour": speedup * share * tuner.tokens_per_s * HOUR_S,
        "dollars_per_hour": speedup * share * _dollars_per_hour(job, [*reserved, *preemptible]),
        "price_per_hour": sum(prices) / len(prices) if prices else 0.0,
    }


# --- charging ---------------------------------------------------------------------------------------------------------
#
# Charges jobs with the time of their workers and trainers, and checks what their budgets still pay for.


CHARGE_EVERY_S = 1.0
DRAIN_RESERVE_S = 30.0
"""A budget always pays for this much more time of all the job's workers: until the next charge, a drain and an exit."""


def charge_jobs(jobs: Jobs, fleet: Fleet, periodic: PeriodicDecisions, now: Now) -> list[Effect]:
    """Charge each active job with the time of its workers and its trainer since the last charge, if that is due.

    A worker costs from the start of its process until it is gone, except for time in which it serves no job or yields
    its device; a trainer while it holds the job's lease. Time in which no manager led is charged by the next one, for
    those that are still there.
    """
    last = periodic.charged_at
    if last is not None and now.mono - last < CHARGE_EVERY_S:
        return []
    periodic.charged_at = now.mono
    effects: list[Effect] = []
    for job in jobs.active():
        cost = job.audit.cost
        # Within one manager's life the monotonic clock counts: the system's may be set.
        elapsed_s = now.mono - last if last is not None else max(0.0, now.wall - cost.charged_until)
        if cost.charged_until:
            for worker in _billed_workers(fleet, job):
                share_s = elapsed_s / max(1, len(worker.jobs))
                cost.charge(worker.joined.role, worker.joined.kind, worker.price_per_hour, share_s)
            if trainer_price := job.progress.trainer_price_per_hour:
                cost.charge("trainer", "", trainer_price, elapsed_s)
        cost.charged_until = now.wall
        if job.record.step > cost.estimated_steps and (estimate := step_without_spot(jobs, fleet, job)):
            cost.add_estimate(job.record.step, *estimate)
        effects += _check_budget(fleet, job, now)
    return effects


def charge_startup(worker: Worker, job: JobEntry) -> None:
    """Charge a job that a worker begins to serve with the time before the worker joined, unless another job was."""
    joined, seconds = worker.joined, worker.unbilled_startup_s
    worker.unbilled_startup_s = 0.0
    if seconds:
        job.audit.cost.charge(joined.role, joined.kind, worker.price_per_hour, seconds)


def has_budget(fleet: Fleet, job: JobEntry, worker: Worker | None = None) -> bool:
    """Return True if the job's budget pays for its trainer and workers a while longer, and for one more, if given."""
    cost, limit = job.audit.cost, job.record.spec.elastic.max_dollars
    if limit is None:
        return True
    if cost.budget_reached:
        return False
    per_hour = job.progress.trainer_price_per_hour
    per_hour += sum(member.price_per_hour / max(1, len(member.jobs)) for member in _billed_workers(fleet, job))
    dollars = cost.dollars + DRAIN_RESERVE_S / HOUR_S * per_hour
    if worker is not None:
        dollars += (DRAIN_RESERVE_S + worker.unbilled_startup_s) / HOUR_S * worker.price_per_hour
    return dollars < limit


def _check_budget(fleet: Fleet, job: JobEntry, now: Now) -> list[Effect]:
    cost, limit = job.audit.cost, job.record.spec.elastic.max_dollars
    if cost.budget_reached or has_budget(fleet, job):
        return []
    cost.budget_reached = True
    return [event("budget_reached", now, job.id, dollars=round(cost.dollars, 2), max_dollars=limit)]


def _billed_workers(fleet: Fleet, job: JobEntry) -> list[Worker]:
    """Return the workers that the job pays for, each in equal parts with the other jobs that it serves."""
    workers = fleet.workers.values()
    return [worker for worker in workers if job.id in (worker.jobs or (worker.job_id,)) and not worker.yields]


# --- cost report ------------------------------------------------------------------------------------------------------
#
# What a job has cost, as `GET /v1/jobs/{job_id}/cost` answers it.


def cost_report(
    audit: Audit, steps: int, max_dollars: float | None, models: Sequence[dict[str, Any]] = ()
) -> dict[str, Any]:
    """Return the fields of `GET /v1/jobs/{job_id}/cost`; a ratio is None before its denominator is above 0.

    Args:
        audit: the job's.
        steps: finished steps.
        max_dollars: the job's budget.
        models: the `model_cost` of its other models.

    """
    dollars = audit.cost.dollars
    per_token = _ratio(dollars, audit.tokens_generated)
    regenerated = sum(audit.tokens_regenerated.values())
    return {
        "dollars": dollars,
        "max_dollars": max_dollars,
        "budget_reached": audit.cost.budget_reached,
        "workers": [
            {"role": time.role, "kind": time.kind, "hours": time.seconds / HOUR_S, "dollars": time.dollars}
            for time in audit.cost.workers.values()
        ],
        "dollars_per_step": _ratio(dollars, steps),
        "dollars_per_1000_samples": _ratio(1e3 * dollars, audit.delivered),
        "dollars_per_million_tokens": None if per_token is None else 1e6 * per_token,
        "tokens_saved": audit.tokens_saved,
        "dollars_saved_by_migration": None if per_token is None else per_token * audit.tokens_saved,
        "tokens_regenerated": regenerated,
        "dollars_regenerated": None if per_token is None else per_token * regenerated,
        "dollars_regenerated_by_cause": {
            cause: per_token * tokens for cause, tokens in audit.tokens_regenerated.items() if per_token is not None
        },
        "reserved_only": _reserved_only(audit.cost),
        "models": list(models),
    }


def model_cost(job_id: str, audit: Audit) -> dict[str, Any]:
    """Return what the workers of another model of a job have cost while they served it."""
    hours = sum(time.seconds for time in audit.cost.workers.values()) / HOUR_S
    return {"job_id": job_id, "dollars": audit.cost.dollars, "hours": hours, "tokens": audit.tokens_generated}


def _reserved_only(cost: Cost) -> dict[str, Any] | None:
    """Return what the finished steps would have taken and cost without preemptible workers, None while unknown.

    The break-even price is what an hour of a preemptible worker may cost for the job to cost as much as without any;
    None before one has served it.
    """
    if not cost.reserved_only_dollars:
        return None
    spot_s = sum(time.seconds for time in cost.workers.values() if time.role == "preemptible")
    other_dollars = sum(time.dollars for time in cost.workers.values() if time.role != "preemptible")
    saved = max(0.0, cost.reserved_only_dollars - other_dollars)
    return {
        "seconds": cost.reserved_only_s,
        "dollars": cost.reserved_only_dollars,
        "break_even_price_per_hour": _ratio(saved * HOUR_S, spot_s),
    }


def _ratio(numerator: float, denominator: float) -> float | None:
    return numerator / denominator if denominator else None
