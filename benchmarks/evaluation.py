"""The paper's evaluation in simulation: calibration, its table, ablations and sweeps.

    python -m benchmarks.evaluation fit
    python -m benchmarks.evaluation table --trace g4dn-trace.csv [--models 8b] [--completions short]
    python -m benchmarks.evaluation ablations --trace ... --models 14b
    python -m benchmarks.evaluation sweep --models 14b

One JSON line for each fit or run, then for `table` one for each policy: means over the seeds, lowest and highest. `fit`
uses the paper's numbers for constant fleets only: of 8B, 10, 12, 14, 16 and 18 thousand tokens/s with 0 to 4 instances;
of 14B, 1.37 times veRL with one instance, and 1.64 times that with six. Its results are in
`rlboost/simulation/scenario.py` and in `VERL_FACTORS`. `table` shows what was not fitted: traces, and 32B.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any, get_args

from benchmarks.step_bound import shortest_steps
from rlboost.simulation import POLICIES, Machine, SimulatedJob, SimulationResult, simulate
from rlboost.simulation.policies import ABLATIONS
from rlboost.simulation.result import summarize
from rlboost.simulation.scenario import GBIT, SHAPES, Completions, Fit, Model, preset
from rlboost.simulation.traces import G4DN, FleetTrace, generate_trace, read_trace

Row = dict[str, Any]
CAPPED = {
    f"{name}-cap-{cap}": replace(POLICIES[name], name=f"{name}-cap-{cap}", batch_cap=cap)
    for name in ("rlboost", "rlboost-speculation")
    for cap in (16, 24, 32, 40, 48, 51, 64, 96)
}
"""Batch caps fixed in place of the manager's decision."""
KNOWN = POLICIES | ABLATIONS | CAPPED
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
VERL_FACTORS: dict[tuple[Model, Completions], float] = {
    ("8b", "short"): 0.993,
    ("8b", "long"): 0.950,
    ("14b", "short"): 0.936,
    ("14b", "long"): 0.879,
    ("32b", "short"): 0.964,
    ("32b", "long"): 0.914,
}
"""Reported throughput of veRL against simulated, as `fit` finds it: other overheads than the model has. 32B is not
fitted: the mean of the others."""
FIRST_SLOWDOWN = 4.0
SAMPLED = 0.5
"""Share of the trace's instances that the paper replays."""
IMPLIED_MEANS = {4: 3.76, 6: 5.07}
"""Most instances in use -> mean number that the paper's costs imply, for 8B and 14B."""
SEGMENT_H = 2.0
"""Hours of a segment, as in the paper."""
SWEEPS: dict[str, tuple[float, ...]] = {
    "instances": (0, 1, 2, 4, 6, 8),
    "median_length": (700, 1500, 3000, 6000),
    "spot_price": (2.66, 5.32, 10.6, 14.7, 20.9),
    "life_min": (10, 20, 40, 80),
    "gbit": (1, 5, 50),
}


# --- fit --------------------------------------------------------------------------------------------------------------


def constant_fleet(model: Model, completions: Completions, fit: Fit, instances: int, seeds: int) -> float:
    """Return the mean throughput of the paper's policy, or of veRL without instances."""
    job, machine = preset(model, completions, fit)
    policy = POLICIES["paper" if instances else "verl"]
    step_tokens = sum(group.tokens + sum(group.lengths) for group in job.groups(0, 0))
    duration_s = 6 * step_tokens / (0.9 * fit.train_tokens_per_s)
    trace = FleetTrace.constant(instances, duration_s)
    runs = [
        simulate(job, machine, trace, policy, seed=seed, warm_up_steps=7 if instances else 1) for seed in range(seeds)
    ]
    return fmean(run.tokens_per_s for run in runs)


def fit_8b(completions: Completions, seeds: int) -> tuple[Fit, float, Row]:
    """Fit training rate and slowdown: nearly all times scale together, so a scale follows from each training rate.

    Returns:
        The fit, the factor of veRL, and what the fit reaches.

    """
    best_error, best = math.inf, Fit(FIRST_SLOWDOWN, 0.0)
    for train in TRAIN_GRID["8b"]:
        rates = [constant_fleet("8b", completions, Fit(FIRST_SLOWDOWN, train), n, seeds) for n in range(1, 5)]
        scale, error = _scale(rates)
        if error < best_error:
            best_error, best = error, Fit(FIRST_SLOWDOWN / scale, train * scale)
    none, *rates = [constant_fleet("8b", completions, best, n, seeds) for n in range(5)]
    row = {"tokens_per_s": [round(rate) for rate in (none, *rates)], "error": round(_scale(rates)[1], 3)}
    return best, REPORTED_8B[0] / none, row


def _scale(rates: Sequence[float]) -> tuple[float, float]:
    """Return the factor from simulated to reported throughput with 1 to 4 instances, and the relative error left."""
    logs = [math.log(reported / rate) for reported, rate in zip(REPORTED_8B[1:], rates, strict=True)]
    return math.exp(fmean(logs)), pstdev(logs)


def fit_14b(completions: Completions, slowdown: float, seeds: int) -> tuple[Fit, float, Row]:
    """Fit the training rate to the ratio between six instances and one, as `fit_8b`; the slowdown is that of 8B."""
    found = []
    for train in TRAIN_GRID["14b"]:
        fit = Fit(slowdown, train)
        none, one, six = (constant_fleet("14b", completions, fit, n, seeds) for n in (0, 1, 6))
        found.append((abs(six / one - REPORTED_14B_SIX), fit, one / none, six / one))
    _, fit, one_to_none, six_to_one = min(found)
    row = {"one_to_none": round(one_to_none, 3), "six_to_one": round(six_to_one, 3)}
    return fit, one_to_none / REPORTED_14B_ONE, row


def fits(seeds: int) -> Iterator[Row]:
    """Yield the fit of each model and calibration; that of 32B is extrapolated."""
    for completions in get_args(Completions):
        small, small_factor, shown = fit_8b(completions, seeds)
        yield _fit_row("8b", completions, small, small_factor) | shown
        medium, medium_factor, shown = fit_14b(completions, small.slowdown, seeds)
        yield _fit_row("14b", completions, medium, medium_factor) | shown
        # Training takes time in proportion to the parameters, on twice the nodes.
        train = medium.train_tokens_per_s * SHAPES["14b"].parameters / SHAPES["32b"].parameters * 2
        large = Fit(small.slowdown, train)
        yield _fit_row("32b", completions, large, math.sqrt(small_factor * medium_factor))


def _fit_row(model: Model, completions: Completions, fit: Fit, verl_factor: float) -> Row:
    return {
        "fit": model,
        "completions": completions,
        **{name: round(value, 4) for name, value in (fit._asdict() | {"verl_factor": verl_factor}).items()},
    }


# --- traces -----------------------------------------------------------------------------------------------------------


def sampled_trace(path: Path | None) -> FleetTrace:
    """Return the trace of half of the instances; of 20 samples the one with the means that the paper's costs imply."""
    whole = read_trace(path) if path else generate_trace(G4DN, seed=0)

    def distance(trace: FleetTrace) -> float:
        return sum(abs(trace.limited(n).mean_instances - mean) for n, mean in IMPLIED_MEANS.items())

    return min((whole.sampled(SAMPLED, seed) for seed in range(20)), key=distance)


def segments(trace: FleetTrace, hours: float) -> dict[str, FleetTrace]:
    """Return segments: A has many instances and removals, B the fewest instances, C is between."""
    starts = range(0, int(trace.duration_s - hours * HOUR_S) + 1, int(HOUR_S / 2))
    found = [trace.between(start, start + hours * HOUR_S) for start in starts]
    rich = [segment for segment in found if segment.mean_instances >= trace.mean_instances]
    return {
        "A": max(rich, key=lambda segment: sum(event.kind == "remove" for event in segment.events)),
        "B": min(found, key=lambda segment: segment.mean_instances),
        "C": min(found, key=lambda segment: abs(segment.mean_instances - trace.mean_instances)),
    }


def over_segments(args: argparse.Namespace, names: Iterable[str]) -> Iterator[Row]:
    """Yield throughput and cost of each policy, in each segment with each seed."""
    parts = segments(sampled_trace(args.trace), args.hours)
    policies = [KNOWN[name] for name in dict.fromkeys(names)]
    for model, completions, (name, segment) in product(args.models, args.completions, parts.items()):
        job, machine = preset(model, completions)
        fleet = segment.limited(SHAPES[model].useful_instances)
        for policy, seed in product(policies, range(args.seeds)):
            run = simulate(job, machine, fleet, policy, seed=seed)
            row: Row = {
                "model": model,
                "completions": completions,
                "segment": name,
                "seed": seed,
                "present": round(fleet.mean_instances, 2),
            }
            if policy.fleet == "spot" and not policy.speculation:  # the bound knows no drafts
                row["step_over_bound"] = round(_over_bound(job, machine, fleet, run), 3)
            yield row | summarize([run]).public()


def _over_bound(job: SimulatedJob, machine: Machine, fleet: FleetTrace, run: SimulationResult) -> float:
    """Return the time of all steps relative to the shortest that they could take one by one."""
    return sum(step.duration_s for step in run.steps) / sum(shortest_steps(job, machine, fleet, run))


def against_verl(rows: Iterable[Row]) -> Iterator[Row]:
    """Yield each policy's throughput and tokens per dollar against veRL as reported: means of the segments."""
    found: dict[tuple[Model, Completions, str], list[Row]] = {}
    for row in rows:
        found.setdefault((row["model"], row["completions"], row["policy"]), []).append(row)
    for (model, completions, policy), some in found.items():
        verl = found[model, completions, "verl"]
        factor = 1.0 if policy.startswith("verl") else 1 / VERL_FACTORS[model, completions]
        faster: dict[int, list[float]] = {}
        cheaper: dict[int, list[float]] = {}
        cost = "dollars_per_million_tokens"
        for row, base in zip(some, verl, strict=True):
            faster.setdefault(row["seed"], []).append(factor * row["tokens_per_s"] / base["tokens_per_s"])
            cheaper.setdefault(row["seed"], []).append(factor * base[cost] / row[cost])
        figures = {"throughput": _spread(faster), "tokens_per_dollar": _spread(cheaper)}
        yield {"table": model, "completions": completions, "policy": policy} | figures


def _spread(found: dict[int, list[float]]) -> dict[str, float]:
    """Return mean, lowest and highest value over the seeds, each a mean over the segments."""
    means = [fmean(values) for values in found.values()]
    return {"mean": round(fmean(means), 3), "lowest": round(min(means), 3), "highest": round(max(means), 3)}


def sweep(args: argparse.Namespace) -> Iterator[Row]:
    """Yield throughput and cost of our policy over one parameter at a time, and of veRL."""
    for model, name in product(args.models, args.sweeps):
        for value in SWEEPS[name]:
            job, machine = preset(model, "short")
            length_s = args.hours * HOUR_S
            trace = FleetTrace.constant(SHAPES[model].useful_instances, length_s)
            if name == "instances":
                trace = FleetTrace.constant(int(value), length_s)
            elif name == "median_length":
                job = replace(job, lengths=replace(job.lengths, median=value))
            elif name == "spot_price":
                machine = replace(machine, instance_price_per_hour=value)
            elif name == "life_min":
                trace = generate_trace(replace(G4DN, median_life_s=60 * value, mean_life_s=90 * value), seed=0)
                trace = trace.between(HOUR_S, HOUR_S + length_s).limited(SHAPES[model].useful_instances)
            else:
                machine = replace(machine, instance_bytes_per_s=value * GBIT)
            for policy in ("verl", "paper", "rlboost"):
                runs = [simulate(job, machine, trace, POLICIES[policy], seed=seed) for seed in range(args.seeds)]
                yield {"sweep": name, "value": value, "model": model} | summarize(runs).public()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["fit", "table", "ablations", "sweep"])
    parser.add_argument("--trace", type=Path, help="Bamboo's g4dn log; generated from its statistics without this")
    parser.add_argument("--models", nargs="+", choices=get_args(Model), default=get_args(Model))
    parser.add_argument("--completions", nargs="+", choices=get_args(Completions), default=get_args(Completions))
    parser.add_argument("--policies", nargs="+", choices=KNOWN, help="of table and ablations")
    parser.add_argument("--sweeps", nargs="+", choices=SWEEPS, default=list(SWEEPS))
    parser.add_argument("--hours", type=float, default=SEGMENT_H, help="of each segment, and of a sweep's runs")
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    rows: list[Row] = []
    found = {
        "fit": lambda: fits(args.seeds),
        "table": lambda: over_segments(args, ["verl", *(args.policies or POLICIES)]),  # it compares with veRL
        "ablations": lambda: over_segments(args, args.policies or ["rlboost", *ABLATIONS]),
        "sweep": lambda: sweep(args),
    }
    for row in found[args.command]():
        rows.append(row)
        print(json.dumps(row), flush=True)
    if args.command == "table":
        for row in against_verl(rows):
            print(json.dumps(row))


if __name__ == "__main__":
    main()
