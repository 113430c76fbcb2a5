"""A small job on small machines for the simulation: a step takes about a minute of virtual time."""

from __future__ import annotations

from dataclasses import replace

from rlboost.simulation import EngineSpec, Lengths, Machine, Policy, SimulatedJob, SimulationResult, simulate
from rlboost.simulation.traces import FleetEvent, FleetTrace

JOB = SimulatedJob(
    lengths=Lengths(cap=5120, median=1200, sigma=0.7), train_s_per_token=1 / 22_000, update_s=2.0, prompts=16
)
MACHINE = Machine(
    engine=EngineSpec(
        step_s=0.010, per_sample_s=6e-5, per_kv_token_s=6e-8, prefill_tokens_per_s=40_000, slots=32, kv_tokens=100_000
    ),
    reserved_engines=4,
    reserved_price_per_hour=80.0,
    instance_price_per_hour=5.0,
    weights_bytes=16e9,
    instance_bytes_per_s=6.25e9,
    store_bytes_per_s=25e9,
    load_s=1.0,
    reserved_load_s=1.5,
    switch_s=1.5,
    dedicated_engines=3,
)
FULL_CACHES = replace(MACHINE, engine=replace(MACHINE.engine, kv_tokens=12_000))
"""KV caches that hold a few samples, so that running samples are retracted."""
STEADY = FleetTrace.constant(3, 300.0)
UNSTEADY = FleetTrace(
    (
        *STEADY.events,
        FleetEvent(40.0, "remove", "instance-1"),
        FleetEvent(70.0, "remove", "instance-2"),
        FleetEvent(100.0, "add", "instance-4"),
        FleetEvent(150.0, "remove", "instance-3"),
        FleetEvent(170.0, "remove", "instance-4"),
        FleetEvent(200.0, "add", "instance-5"),
        FleetEvent(230.0, "add", "instance-6"),
    ),
    400.0,
)
"""Preempted within steps; for 30 s no instance is left."""


def simulated(
    policy: Policy, *, machine: Machine = MACHINE, trace: FleetTrace = UNSTEADY, seed: int = 1
) -> SimulationResult:
    """Simulate the small job with few turns of the manager."""
    return simulate(JOB, machine, trace, policy, seed=seed, warm_up_steps=2, resolution_s=0.5)
