"""Predicts time and dollars of a job on fleets of several sizes, and chooses the best one."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from rlboost.planning.simulated_run import simulate_run, simulated_machine, worker_kinds
from rlboost.shared.errors import ConfigError
from rlboost.shared.job.run_profile import RunProfile
from rlboost.shared.job.spec import RlJob
from rlboost.shared.prices import Prices
from rlboost.shared.units import HOUR_S
from rlboost.simulation import Machine, SimulationResult, StepTooLong
from rlboost.simulation.traces import FleetTrace

SIMULATED_STEPS = 30
"""A longer job is extrapolated from about this many steps, at a random time of the trace for each seed."""
LEAST_STEPS = 3
"""Fewer simulated steps are too few to extrapolate from: a larger job or a smaller fleet is simulated for longer."""


@dataclass(frozen=True, slots=True)
class Spread:
    """A figure over the seeds."""

    mean: float
    lowest: float
    highest: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Return mean and range of some values."""
        return cls(sum(values) / len(values), min(values), max(values))


@dataclass(frozen=True, slots=True)
class Plan:
    """The prediction for one fleet."""

    kind: str
    max_workers: int
    """The fleet takes up to this many preemptible workers, as far as the trace has them."""
    workers: Spread
    """Workers in use, averaged over time."""
    hours: Spread
    """Duration of the whole job."""
    dollars: Spread
    tokens_per_s: Spread
    """Generated tokens."""


def plans(
    spec: RlJob,
    profile: RunProfile,
    prices: Prices,
    trace_of: Callable[[int], FleetTrace],
    *,
    max_workers: int,
    seeds: int,
    startup_s: float,
) -> Iterator[Plan]:
    """Yield the prediction for 0 to `max_workers` workers of each measured kind.

    Args:
        spec: the job.
        profile: what a run has measured.
        prices: dollars per hour.
        trace_of: returns the availability of instances for a seed.
        max_workers: the largest fleet.
        seeds: number of simulations of each fleet.
        startup_s: from an instance's request to its join.

    Raises:
        ConfigError: a price is missing, no instance is available, or no step ends within the trace.

    """
    traces = [trace_of(seed) for seed in range(seeds)]
    for kind in worker_kinds(profile):
        machine = simulated_machine(kind, profile, prices, startup_s=startup_s)
        for n in range(0 if machine.reserved_engines else 1, max_workers + 1):
            runs = [_run(spec, profile, machine, trace.limited(n), seed) for seed, trace in enumerate(traces)]
            factors = [spec.steps / len(run.steps) for run in runs]
            yield Plan(
                kind=kind.kind,
                max_workers=n,
                workers=Spread.of([run.mean_instances for run in runs]),
                hours=Spread.of([f * run.duration_s / HOUR_S for f, run in zip(factors, runs, strict=True)]),
                dollars=Spread.of([f * run.dollars for f, run in zip(factors, runs, strict=True)]),
                tokens_per_s=Spread.of(
                    [sum(step.generated_tokens for step in run.steps) / run.duration_s for run in runs]
                ),
            )


def best(found: Iterable[Plan], *, max_dollars: float | None = None, max_hours: float | None = None) -> Plan | None:
    """Return the fastest plan within a budget, otherwise the cheapest one, within a deadline if there is one.

    A limit holds for every seed, not only for the mean. None if no plan is within the limits.
    """
    allowed = [
        plan
        for plan in found
        if (max_dollars is None or plan.dollars.highest <= max_dollars)
        and (max_hours is None or plan.hours.highest <= max_hours)
    ]
    if max_dollars is not None and max_hours is None:
        return min(allowed, key=lambda plan: plan.hours.mean, default=None)
    return min(allowed, key=lambda plan: plan.dollars.mean, default=None)


def _run(spec: RlJob, profile: RunProfile, machine: Machine, trace: FleetTrace, seed: int) -> SimulationResult:
    """Simulate the job in a part of the trace in which several steps end."""
    length_s = max(1.0, min(SIMULATED_STEPS, spec.steps) * profile.step_s)
    while True:
        window = _window(trace, length_s, seed, needs_instance=not machine.reserved_engines)
        try:
            run = simulate_run(spec, profile, machine, window, seed)
        except StepTooLong as error:
            raise ConfigError(f"{error}: use a smaller job, or a --trace with more instances") from error
        if len(run.steps) >= min(LEAST_STEPS, spec.steps):
            return run
        if length_s >= trace.duration_s:
            break
        length_s *= 2
    if not run.steps:
        hours = trace.duration_s / HOUR_S
        raise ConfigError(f"no step of the job ends within the trace of {hours:.1f} hours: use a longer --trace")
    return run


def _window(trace: FleetTrace, length_s: float, seed: int, *, needs_instance: bool) -> FleetTrace:
    """Return a part of the trace that begins at a random time, if needed when an instance is available."""
    latest_s = max(0.0, trace.duration_s - length_s)
    start_s = random.Random(seed).uniform(0.0, latest_s)  # noqa: S311 - not a secret
    if needs_instance:
        moments = (trace.next_available_s(start_s), trace.next_available_s(0.0))
        available_s = next((moment for moment in moments if moment is not None), None)
        if available_s is None:
            raise ConfigError(
                "no instance is available in the trace, and the run has no reserved workers: use another --trace"
            )
        start_s = available_s
    return trace.between(start_s, start_s + length_s)
