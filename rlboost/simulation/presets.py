"""Jobs and machines of the paper's evaluation, calibrated on its numbers for constant fleets.

Set-up (arXiv 2510.19225 and its repository): 128 prompts x 8 samples a step, prompts up to 512 tokens, completions up
to 14,336; engines of two H100 with tensor parallelism; 8 reserved H100 (16 for 32B) with 200 Gb/s, $83.79 an hour for
8; spot instances of two H100 with 50 Gb/s, $5.32 an hour.

Not reported are the lengths, the engines' throughput and the training time. The shape of the throughput comes from
arithmetic: a decode step reads the weights and each cached token once, at 6.7 TB/s, and computes at 40 % of 1,979
TFLOP/s. `python -m benchmarks.evaluation fit` finds the factor by which engines are slower, and the training rate. The
reported numbers do not determine lengths as well, so there are two calibrations: their results are a bracket.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from rlboost.simulation.job import Lengths, SimulatedJob
from rlboost.simulation.machine import EngineSpec, Machine

Model = Literal["8b", "14b", "32b"]
Completions = Literal["short", "long"]

BANDWIDTH_BYTES_PER_S = 6.7e12
LAUNCH_S = 0.003
"""Fixed time of a decode step, besides its kernels."""
FLOPS = 0.4 * 1.979e15
MEMORY_BYTES = 0.85 * 160e9
"""Memory of one engine for weights and KV cache."""
GBIT = 1e9 / 8
LENGTHS: dict[Completions, Lengths] = {
    "short": Lengths(cap=14_336, median=1800, sigma=0.7),
    "long": Lengths(cap=14_336, median=4500, sigma=0.6),
}


@dataclass(frozen=True, slots=True)
class Shape:
    """A model and its reserved cluster."""

    parameters: float
    kv_bytes_per_token: float
    nodes: int
    useful_instances: int
    """Beyond this the paper's throughput does not grow."""


class Fit(NamedTuple):
    """A calibration."""

    slowdown: float
    """Time of samples and cached tokens in a decode step, against arithmetic; weights are read at half bandwidth."""
    train_tokens_per_s: float


SHAPES: dict[Model, Shape] = {
    "8b": Shape(8.19e9, 147_456, 1, 4),
    "14b": Shape(14.8e9, 163_840, 1, 6),
    "32b": Shape(32.8e9, 262_144, 2, 6),
}
FITS: dict[tuple[Model, Completions], Fit] = {
    # 32B is not fitted: slowdown of 8B, training in proportion to the parameters of 14B.
    ("8b", "short"): Fit(4.27, 13_115),
    ("8b", "long"): Fit(4.278, 18_700),
    ("14b", "short"): Fit(4.27, 11_000),
    ("14b", "long"): Fit(4.278, 13_000),
    ("32b", "short"): Fit(4.27, 9_927),
    ("32b", "long"): Fit(4.278, 11_732),
}


def preset(model: Model, completions: Completions, fit: Fit | None = None) -> tuple[SimulatedJob, Machine]:
    """Return the job and the machine of one model.

    Args:
        model: which one.
        completions: which calibration.
        fit: replaces it.

    """
    shape, fit = SHAPES[model], fit or FITS[model, completions]
    weights = 2 * shape.parameters
    flops_s = 2 * shape.parameters / FLOPS
    decode = EngineSpec(
        step_s=LAUNCH_S + 2 * weights / BANDWIDTH_BYTES_PER_S,
        per_sample_s=fit.slowdown * flops_s,
        per_kv_token_s=fit.slowdown * shape.kv_bytes_per_token / BANDWIDTH_BYTES_PER_S,
        prefill_tokens_per_s=1 / flops_s,
        kv_tokens=round((MEMORY_BYTES - weights) / shape.kv_bytes_per_token),
    )
    job = SimulatedJob(lengths=LENGTHS[completions], train_s_per_token=1 / fit.train_tokens_per_s, update_s=2.0)
    machine = Machine(
        engine=decode,
        reserved_engines=4 * shape.nodes,
        reserved_price_per_hour=83.79 * shape.nodes,
        instance_price_per_hour=5.32,
        weights_bytes=weights,
        instance_bytes_per_s=50 * GBIT,
        store_bytes_per_s=200 * GBIT,
        load_s=1.0,
        reserved_load_s=1.5,
        switch_s=1.5,
        dedicated_engines=shape.useful_instances,
    )
    return job, machine
