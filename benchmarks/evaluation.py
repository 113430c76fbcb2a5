"""The paper's evaluation in simulation: calibration, its table, ablations and sweeps.

    python -m benchmarks.evaluation fit [--seeds 2]
    python -m benchmarks.evaluation table --trace ../g4dn-trace.csv [--models 8b 14b] [--policies verl paper rlboost]
    python -m benchmarks.evaluation constant [--models 8b 14b]
    python -m benchmarks.evaluation ablations --trace ../g4dn-trace.csv [--models 14b]
    python -m benchmarks.evaluation sweep [--models 14b]

One JSON line for each run or fit. `fit` uses the paper's numbers for constant fleets only: of 8B, 10, 12, 14, 16 and 18
thousand tokens/s with 0 to 4 instances; of 14B, 1.37 times veRL with one instance, and 1.64 times that with six.
`table` uses what was not fitted: traces, and 32B. The trace is Bamboo's g4dn log, of which half of the instances are
sampled and three segments of two hours are taken; without --trace, one is generated from its statistics.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any, get_args

from rlboost.simulation import POLICIES, Machine, Policy, SimulatedJob, SimulationResult, simulate
from rlboost.simulation.policies import ABLATIONS
from rlboost.simulation.presets import FITS, SHAPES, Answers, Fit, Model, preset
from rlboost.simulation.traces import G4DN, FleetEvent, FleetTrace, generate_trace, read_trace

Row = dict[str, Any]
HOUR_S = 3600.0
REPORTED_8B = (10_000, 12_000, 14_000, 16_000, 18_000)
"""Tokens/s with 0 to 4 instances (the repository's notes)."""
REPORTED_14B_ONE, REPORTED_14B_SIX = 1.37, 1.64
"""Throughput with one instance against veRL, and with six against one."""
TRAIN_GRID: dict[Model, tuple[int, ...]] = {
    "8b": (14_000, 17_000, 20_000, 24_000),
    "14b": (7_000, 9_000, 11_000, 13_000),
}
"""Training rates that are tried, in tokens/s."""
FIRST_SLOWDOWN = 4.0
SEGMENTS = {"A": (0.25, 0.9), "B": (0.35, 0.1), "C": (0.6, 0.5)}


# --- fit --------------------------------------------------------------------------------------------------------------


def constant_fleet(model: Model, answers: Answers, fit: Fit, instances: int, seeds: int) -> float:
    """Return the mean throughput of the paper's policy, or of veRL without instances."""
    job, machine = preset(model, answers, fit)
    policy = POLICIES["paper" if instances else "verl"]
    step_tokens = sum(group.tokens + sum(group.lengths) for group in job.groups(0, 0))
    duration_s = 6 * step_tokens / (0.9 * fit.train_tokens_per_s)
    trace = FleetTrace(tuple(FleetEvent(0.0, "add", f"n{i}") for i in range(instances)), duration_s)
    runs = [
        simulate(job, machine, trace, policy, seed=seed, warm_up_steps=7 if instances else 1) for seed in range(seeds)
    ]
    return fmean(run.tokens_per_s for run in runs)


def fit_8b(answers: Answers, seeds: int) -> tuple[Fit, Row]:
    """Fit training rate and slowdown: nearly all times scale together, so a scale follows from each training rate."""
    best_error, best = math.inf, Fit(FIRST_SLOWDOWN, 0.0, 1.0)
    for train in TRAIN_GRID["8b"]:
        rates = [constant_fleet("8b", answers, Fit(FIRST_SLOWDOWN, train, 1.0), n, seeds) for n in range(1, 5)]
        scale, error = _scale(rates)
        if error < best_error:
            best_error, best = error, Fit(FIRST_SLOWDOWN / scale, train * scale, 1.0)
    none, *rates = [constant_fleet("8b", answers, best, n, seeds) for n in range(5)]
    fit = best._replace(verl_factor=REPORTED_8B[0] / none)
    return fit, {"tokens_per_s": [round(rate) for rate in (none, *rates)], "error": round(_scale(rates)[1], 3)}


def _scale(rates: Sequence[float]) -> tuple[float, float]:
    """Return the factor from simulated to reported throughput with 1 to 4 instances, and the relative error left."""
    logs = [math.log(reported / rate) for reported, rate in zip(REPORTED_8B[1:], rates, strict=True)]
    return math.exp(fmean(logs)), pstdev(logs)


def fit_14b(answers: Answers, slowdown: float, seeds: int) -> tuple[Fit, Row]:
    """Fit the training rate to the ratio between six instances and one; the slowdown is that of 8B."""
    found = []
    for train in TRAIN_GRID["14b"]:
        fit = Fit(slowdown, train, 1.0)
        none, one, six = (constant_fleet("14b", answers, fit, n, seeds) for n in (0, 1, 6))
        found.append((abs(six / one - REPORTED_14B_SIX), fit, one / none, six / one))
    _, fit, one_to_none, six_to_one = min(found)
    row = {"one_to_none": round(one_to_none, 3), "six_to_one": round(six_to_one, 3)}
    return fit._replace(verl_factor=one_to_none / REPORTED_14B_ONE), row


def fits(seeds: int) -> Iterator[Row]:
    """Yield the fit of each model and calibration; that of 32B is extrapolated."""
    for answers in get_args(Answers):
        small, shown = fit_8b(answers, seeds)
        yield _fit_row("8b", answers, small) | shown
        medium, shown = fit_14b(answers, small.slowdown, seeds)
        yield _fit_row("14b", answers, medium) | shown
        # Training takes time in proportion to the parameters, on twice the nodes.
        train = medium.train_tokens_per_s * SHAPES["14b"].parameters / SHAPES["32b"].parameters * 2
        large = Fit(small.slowdown, train, math.sqrt(small.verl_factor * medium.verl_factor))
        yield _fit_row("32b", answers, large)


def _fit_row(model: Model, answers: Answers, fit: Fit) -> Row:
    return {"fit": model, "answers": answers, **{name: round(value, 4) for name, value in fit._asdict().items()}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["fit"])
    parser.add_argument("--seeds", type=int, default=2)
    args = parser.parse_args()
    for row in fits(args.seeds):
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
