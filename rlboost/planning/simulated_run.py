"""What the simulation needs of a job and a machine, from what a run has measured."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

from pydantic import ValidationError

from rlboost.shared.errors import ConfigError
from rlboost.shared.job.run_profile import RunProfile
from rlboost.shared.job.spec import RlJob
from rlboost.shared.messages import EngineProfile
from rlboost.shared.prices import Prices
from rlboost.shared.validation import first_error
from rlboost.simulation import POLICIES, EngineSpec, Lengths, Machine, SimulatedJob, SimulationResult, simulate
from rlboost.simulation.traces import FleetTrace


def read_profile(path: Path) -> RunProfile:
    """Read the `profile.json` of a run.

    Raises:
        ConfigError: it cannot be read, or is not a profile.

    """
    try:
        return RunProfile.model_validate_json(path.read_bytes())
    except OSError as error:
        text = f"profile {path}: {error.strerror}: name the profile.json of a run; a run writes it after some steps"
        raise ConfigError(text) from error
    except ValidationError as error:
        raise ConfigError(f"{path} is not the profile of a run: {first_error(error)}") from error


def worker_kinds(profile: RunProfile) -> list[EngineProfile]:
    """Return the kinds of preemptible workers that the run has measured.

    Raises:
        ConfigError: there is none.

    """
    kinds = [engine for engine in profile.engines if engine.role == "preemptible"]
    if not kinds:
        raise ConfigError("the profile has no throughput of a spot worker: run some steps with one first")
    return kinds


def simulated_job(spec: RlJob, profile: RunProfile) -> SimulatedJob:
    """Return the job of a job file, with the lengths and times of the profile."""
    return SimulatedJob(
        lengths=Lengths(cap=spec.sampling.max_tokens, quantiles=profile.completion_quantiles),
        train_s_per_token=profile.train_s_per_token,
        update_s=profile.update_s,
        prompts=spec.data.prompts_per_step,
        group_size=spec.algorithm.group_size,
        prompt_tokens=profile.prompt_tokens,
        micro_batch=spec.algorithm.group_size,  # the trainer trains each group as soon as it is scored
        reward_s=profile.reward_s,
    )


def simulated_machine(kind: EngineProfile, profile: RunProfile, prices: Prices, *, startup_s: float) -> Machine:
    """Return the run's reserved engines and a kind of worker as they were measured.

    A weight update takes the measured times, whatever its bytes: the download, during which an engine generates, and
    the pause after it. Where the profile has no pause, the whole update counts as one. All engines have the throughput
    of `kind`, and are slower in the steps in which the trainer was.

    Raises:
        ConfigError: a price is missing.

    """
    reserved = [engine for engine in profile.engines if engine.role == "reserved"]
    update_pause_s = kind.update_pause_s or kind.update_s
    engine = EngineSpec(
        step_s=kind.step_s,
        per_sample_s=kind.per_sample_s,
        per_kv_token_s=kind.per_kv_token_s,
        prefill_tokens_per_s=math.inf,  # not measured
        slots=max(1, kind.slots),
        kv_tokens=kind.kv_tokens,
    )
    return Machine(
        engine=engine.with_assumed_prefill(),
        reserved_engines=sum(engine.workers for engine in reserved),
        reserved_price_per_hour=_reserved_price(reserved, prices),
        instance_price_per_hour=_worker_price(kind, prices),
        weights_bytes=0.0,
        instance_bytes_per_s=1.0,
        store_bytes_per_s=1.0,
        pull_latency_s=max(0.0, kind.update_s - update_pause_s),
        load_s=update_pause_s,
        reserved_load_s=max((engine.update_s for engine in reserved), default=0.0),
        switch_s=0.0,
        slowdowns=profile.slowdowns or (1.0,),
        startup_s=startup_s,
    )


def simulate_run(spec: RlJob, profile: RunProfile, machine: Machine, trace: FleetTrace, seed: int) -> SimulationResult:
    """Simulate the job on a fleet, with the decisions of the rollout manager."""
    elastic = spec.elastic
    policy = replace(POLICIES["rlboost"], staleness=elastic.max_staleness, seeding=elastic.seeding != "off")
    return simulate(simulated_job(spec, profile), machine, trace, policy, seed=seed)


def _worker_price(kind: EngineProfile, prices: Prices) -> float:
    price = prices.workers.get(kind.kind, kind.price_per_hour or None)
    if price is None:
        raise ConfigError(
            f"the price of workers of kind {kind.kind!r} is missing: add it under 'workers' in a file for --prices"
        )
    return price


def _reserved_price(reserved: list[EngineProfile], prices: Prices) -> float:
    if prices.reserved is not None:
        return prices.reserved
    price = sum(engine.workers * engine.price_per_hour for engine in reserved)
    if not price:
        raise ConfigError("the price of the reserved cluster is missing: add 'reserved' to a file for --prices")
    return price
