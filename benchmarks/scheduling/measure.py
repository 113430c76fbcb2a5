"""One run of one policy, and what is reported of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

from benchmarks.scheduling.cases import Case
from benchmarks.scheduling.oracle import bounds
from benchmarks.scheduling.ours import Ours
from benchmarks.scheduling.paper import Paper
from benchmarks.scheduling.polyrl import PolyRL
from benchmarks.scheduling.simulation import LIMIT_STEPS, Manager, Simulation
from benchmarks.scheduling.workload import Workload, workload

POLICIES: dict[str, Callable[[Case], Manager]] = {"polyrl": PolyRL, "paper": Paper, "ours": Ours}
ORACLE = "oracle"


@dataclass(frozen=True, slots=True)
class Result:
    """Means over the measured steps of one run, in seconds a step unless said otherwise."""

    case: str
    preemptions: int
    seed: int
    policy: str
    step_s: float
    window_s: float = 0.0
    """Until the device was the trainer's."""
    last_sample_s: float = 0.0
    """Until the last sample was there."""
    trainer_idle_s: float = 0.0
    worker_idle: float = 0.0
    """Part of the time of preemptible workers in which their engines ran nothing, over the whole run."""
    made_again: float = 0.0
    """Tokens decoded beyond those delivered, per thousand delivered, over the whole run."""
    prefilled_again: float = 0.0
    """Completion tokens prefilled, per thousand delivered, over the whole run: moves and retractions."""
    moves: float = 0.0
    """Placements of samples that had been placed before."""
    tail_s: float = 0.0
    """With fewer samples left than the engines could batch well, and nothing being trained."""
    tail_lost_s: float = 0.0
    """Of these seconds, the part of the engines' best speed that was not reached."""
    tokens_per_s: float = 0.0
    """Generated and trained (both counted, as the paper does)."""
    retractions: float = 0.0
    share_off: float = 0.0
    """Largest difference of a preemptible worker's share of tokens to its share of speed, in points."""
    decide_us: float = 0.0
    """Ours: host time of all that was decided, turns without a placement too, per placement, in microseconds."""
    host_s: float = 0.0
    """Host time of the policy over the whole run, reading all messages included."""

    def public(self) -> dict[str, Any]:
        """Return the figures, rounded."""
        return {key: round(v, 4) if isinstance(v, float) else v for key, v in asdict(self).items()}


def prepare(case: Case, preemptions: int, seed: int) -> Workload:
    """Return the world of one run: the same for every policy."""
    # The bound of a step without anybody leaving says how early events must come to be met by all.
    calm = workload(case, 0, seed, 0.0)
    return workload(case, preemptions, seed, min(bounds(calm)))


def bound(work: Workload, preemptions: int, seed: int) -> Result:
    """Return what no policy can do better."""
    measured = bounds(work)[work.case.warm_up :]
    tokens = [sum(group.tokens for group in step) for step in work.steps[work.case.warm_up :]]
    generated = [sum(sum(group.lengths) for group in step) for step in work.steps[work.case.warm_up :]]
    return Result(
        case=work.case.name,
        preemptions=preemptions,
        seed=seed,
        policy=ORACLE,
        step_s=fmean(measured),
        tokens_per_s=(sum(tokens) + sum(generated)) / sum(measured),
    )


def run(work: Workload, policy: str, preemptions: int, seed: int) -> tuple[Result, Simulation]:
    """Return the figures of one run, and the run.

    Raises:
        RuntimeError: the run does not end, or lost or changed a sample.

    """
    case = work.case
    sim = Simulation(work, POLICIES[policy](case), LIMIT_STEPS * sum(bounds(work)))
    sim.run()
    if sim.trainer.delivered != sim.lengths:
        raise RuntimeError(f"{policy} in {case.name}: what was delivered is not what was asked for")
    return _result(sim, policy, preemptions, seed), sim


def _result(sim: Simulation, policy: str, preemptions: int, seed: int) -> Result:
    case, first = sim.case, sim.case.warm_up
    steps = sim.trainer.steps[first:]
    n = len(steps)
    totals = {worker.id: worker.totals() for worker in sim.workers.values()}
    spot = [totals[worker.id] for worker in sim.workers.values() if worker.role == "preemptible"]
    present_s = sum(total.present_s for total in spot)
    delivered = sum(sim.lengths.values())
    decoded = sum(total.decoded for total in totals.values())
    work = sum(sum(group.tokens + sum(group.lengths) for group in step) for step in sim.work.steps[first:])
    return Result(
        case=case.name,
        preemptions=preemptions,
        seed=seed,
        policy=policy,
        step_s=fmean(step.ended - step.began for step in steps),
        window_s=fmean(step.device_at - step.began for step in steps),
        last_sample_s=fmean(step.all_there_at - step.began for step in steps),
        trainer_idle_s=fmean(step.idle_s for step in steps),
        worker_idle=1.0 - sum(total.busy_s for total in spot) / present_s if present_s else 0.0,
        made_again=1000 * max(0.0, decoded / delivered - 1.0),
        prefilled_again=1000 * sum(total.prefilled_again for total in totals.values()) / delivered,
        moves=sim.moves / case.steps,
        tail_s=sum(sim.tail.s.get(step.step, 0.0) for step in steps) / n,
        tail_lost_s=sum(sim.tail.lost_s.get(step.step, 0.0) for step in steps) / n,
        tokens_per_s=work / sum(step.ended - step.began for step in steps),
        retractions=sum(worker.engine.retractions for worker in sim.workers.values()) / case.steps,
        share_off=_share_off(sim),
        decide_us=1e6 * sim.manager.decide_s / max(1, sim.placements) if isinstance(sim.manager, Ours) else 0.0,
        host_s=sim.host_s,
    )


def _share_off(sim: Simulation) -> float:
    spot = [(worker.engine.speed, worker.totals()) for worker in sim.workers.values() if worker.role == "preemptible"]
    made, able = sum(total.decoded for _, total in spot), sum(speed * total.present_s for speed, total in spot)
    if not made or not able:
        return 0.0
    return max(100 * abs(total.decoded / made - speed * total.present_s / able) for speed, total in spot)
