"""Predicts time and dollars of a job on fleets of several sizes, and chooses the best one; list prices of clouds."""

from __future__ import annotations

import csv
import json
import math
import random
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

import httpx
from pydantic import ValidationError

from rlboost.shared.errors import ConfigError, Retryable
from rlboost.shared.job.fleet import HOUR_S
from rlboost.shared.job.run_profile import RunProfile
from rlboost.shared.job.spec import RlJob
from rlboost.shared.messages import EngineProfile
from rlboost.shared.prices import Prices
from rlboost.shared.validation import first_error
from rlboost.simulation import (
    POLICIES,
    EngineSpec,
    Lengths,
    Machine,
    SimulatedJob,
    SimulationResult,
    StepTooLong,
    simulate,
)
from rlboost.simulation.traces import FleetTrace

# --- List prices of clouds' machines, for the price files of `rlboost plan` -------------------------------------------
# Azure's come from its Retail Prices API, all others from SkyPilot's catalog, which is derived from the clouds' own
# price APIs several times a day. Neither needs an account. Sources:
# https://learn.microsoft.com/rest/api/cost-management/retail-prices/azure-retail-prices and
# https://github.com/skypilot-org/skypilot-catalog (schema v8).


CATALOG_URL = "https://raw.githubusercontent.com/skypilot-org/skypilot-catalog/master/catalogs/v8"
AZURE_URL = "https://prices.azure.com/api/retail/prices"
_MACHINE = re.compile(r"([a-z]+)/([\w-]+)/([\w.-]+)(?:\+([\w-]+):([1-9]\d*))?")
_SPOT_KIND = re.compile(r"([^=]+)=([^/]+/[^/]+/[^/]+)(?:/([1-9]\d*))?")
_COLUMNS = {"InstanceType", "AcceleratorName", "AcceleratorCount", "Region", "AvailabilityZone", "Price", "SpotPrice"}
_LARGEST_ANSWER_BYTES = 64 << 20
_MOST_PAGES = 20
_DIGITS = 5


class PriceUnavailable(Retryable):
    """A source of prices did not answer, or not as it documents."""


@dataclass(frozen=True)
class MachineType:
    """A type of machine in a region of a cloud."""

    cloud: str
    region: str
    """A region, or one of its zones."""
    type: str
    gpu: str = ""
    """Type of its GPUs on Google Cloud, whose catalog has the prices of machines without GPUs; else empty."""
    gpus: int = 0

    @classmethod
    def parse(cls, text: str) -> MachineType:
        """Read `CLOUD/REGION/TYPE`, on Google Cloud followed by `+GPU:COUNT`.

        Raises:
            ConfigError: it has another form.

        """
        found = _MACHINE.fullmatch(text)
        if not found or (found[1] == "gcp") != bool(found[4]):
            raise ConfigError(
                f"machine {text!r}: write CLOUD/REGION/TYPE, such as aws/us-east-1/p5.48xlarge; on gcp, and only "
                "there, with its GPUs, such as gcp/us-central1/a3-highgpu-8g+H100:8"
            )
        cloud, region, type_, gpu, gpus = found.groups()
        return cls(cloud, region, type_, gpu or "", int(gpus or 0))

    def __str__(self) -> str:
        """Return what `parse` reads."""
        return f"{self.cloud}/{self.region}/{self.type}" + (f"+{self.gpu}:{self.gpus}" if self.gpu else "")


@dataclass(frozen=True)
class SpotKind:
    """A kind of spot worker, and the machines that run it."""

    kind: str
    machine: MachineType
    workers: int
    """Workers on one machine."""

    @classmethod
    def parse(cls, text: str) -> SpotKind:
        """Read `KIND=MACHINE` or `KIND=MACHINE/WORKERS`.

        Raises:
            ConfigError: it has another form.

        """
        found = _SPOT_KIND.fullmatch(text)
        if not found:
            raise ConfigError(
                f"worker {text!r}: write KIND=CLOUD/REGION/TYPE, with several workers on a machine .../TYPE/WORKERS, "
                "such as h100=aws/us-east-1/p5.48xlarge/8"
            )
        return cls(found[1], MachineType.parse(found[2]), int(found[3] or 1))


class ListPrices:
    """Prices of machines, over HTTP.

    Its methods raise `PriceUnavailable` if a source does not answer as documented, and `ConfigError` if it has no price
    of the machine.
    """

    def __init__(self, http: httpx.Client) -> None:
        self._http = http
        self._catalogs: dict[str, list[dict[str, str]]] = {}

    def prices(self, reserved: Sequence[MachineType], spot: Sequence[SpotKind], today: date) -> Prices:
        """Return the on-demand price of the reserved machines together, and the spot price of each kind of worker."""
        if len({one.kind for one in spot}) < len(spot):
            raise ConfigError(f"two workers have the same kind: {', '.join(one.kind for one in spot)}: name each once")
        machines = dict.fromkeys(str(machine) for machine in (*reserved, *(one.machine for one in spot)))
        return Prices(
            as_of=today.isoformat(),
            source=f"list prices of {', '.join(machines)}",
            reserved=round(sum(self.price(one, spot=False) for one in reserved), _DIGITS) if reserved else None,
            workers={one.kind: round(self.price(one.machine, spot=True) / one.workers, _DIGITS) for one in spot},
        )

    def price(self, machine: MachineType, *, spot: bool) -> float:
        """Return dollars per hour in the region's cheapest zone."""
        found = self._of_azure(machine, spot=spot) if machine.cloud == "azure" else self._of_catalog(machine, spot=spot)
        if not found:
            raise ConfigError(
                f"{machine} has no {'spot' if spot else 'on-demand'} price: check the names of the region and the "
                "type, or write the price into the file by hand"
            )
        return min(found)

    def _of_azure(self, machine: MachineType, *, spot: bool) -> list[float]:
        """Return the prices of Linux machines."""
        names = {"armRegionName": machine.region, "armSkuName": machine.type}
        names |= {"serviceName": "Virtual Machines", "priceType": "Consumption"}
        query = {"$filter": " and ".join(f"{name} eq '{value}'" for name, value in names.items())}
        url: str | None = str(httpx.URL(AZURE_URL, params=query))
        found: list[float] = []
        for _ in range(_MOST_PAGES):
            if not url:
                return found
            try:
                page = json.loads(self._get(url))
                found += [float(item["retailPrice"]) for item in page["Items"] if _is_linux(item, spot=spot)]
                url = page["NextPageLink"]
            except (ValueError, KeyError, TypeError) as error:
                raise PriceUnavailable(f"GET {url}: not an answer of Azure's Retail Prices API: {error!r}") from error
        raise PriceUnavailable(f"GET {url}: more than {_MOST_PAGES} pages of prices of one machine")

    def _of_catalog(self, machine: MachineType, *, spot: bool) -> list[float]:
        """Return the price in each zone, on Google Cloud of the machine and its GPUs."""
        rows = [
            row for row in self._catalog(machine.cloud) if machine.region in {row["Region"], row["AvailabilityZone"]}
        ]
        prices = _by_zone((row for row in rows if row["InstanceType"] == machine.type), spot=spot)
        if not machine.gpu:
            return list(prices.values())
        count = str(machine.gpus)
        gpus = _by_zone(
            (
                row
                for row in rows
                if not row["InstanceType"]
                and (row["AcceleratorName"], row["AcceleratorCount"].removesuffix(".0")) == (machine.gpu, count)
            ),
            spot=spot,
        )
        return [prices[zone] + gpus[zone] for zone in prices.keys() & gpus.keys()]

    def _catalog(self, cloud: str) -> list[dict[str, str]]:
        if cloud not in self._catalogs:
            url = f"{CATALOG_URL}/{cloud}/vms.csv"
            reader = csv.DictReader(self._get(url).splitlines(), restval="")
            if not set(reader.fieldnames or ()) >= _COLUMNS:
                raise PriceUnavailable(f"GET {url}: not a catalog of schema v8: its columns are {reader.fieldnames}")
            self._catalogs[cloud] = list(reader)
        return self._catalogs[cloud]

    def _get(self, url: str) -> str:
        """Return the text at a URL."""
        try:
            with self._http.stream("GET", url) as answer:
                if answer.status_code == 404:
                    raise ConfigError(f"GET {url}: not found: prices are known of azure and of SkyPilot's clouds")
                answer.raise_for_status()
                read = bytearray()
                for part in answer.iter_bytes():
                    read += part
                    if len(read) > _LARGEST_ANSWER_BYTES:
                        raise PriceUnavailable(f"GET {url}: the answer is larger than {_LARGEST_ANSWER_BYTES} bytes")
                return read.decode()
        except (httpx.HTTPError, httpx.InvalidURL, UnicodeDecodeError) as error:
            raise PriceUnavailable(f"GET {url} failed: {error or type(error).__name__}: try again later") from error


def _is_linux(item: dict[str, Any], *, spot: bool) -> bool:
    """Return True for the hourly price of a machine with Linux, bought as asked."""
    name, product = item["skuName"], item["productName"]
    others = ("Low Priority" in name, "Windows" in product, "Cloud Services" in product, "CloudServices" in product)
    return not any(others) and ("Spot" in name) == spot and item["unitOfMeasure"] == "1 Hour"


def _by_zone(rows: Iterable[dict[str, str]], *, spot: bool) -> dict[str, float]:
    """Return the prices that are known; a catalog without zones has one entry per region."""
    found = {}
    for row in rows:
        text = row["SpotPrice" if spot else "Price"]
        try:
            price = float(text or "nan")
        except ValueError as error:
            raise PriceUnavailable(f"the catalog has the price {text!r} of {row['InstanceType']}") from error
        if math.isfinite(price):
            found[row["AvailabilityZone"] or row["Region"]] = price
    return found


# --- What the simulation needs of a job and a machine, from what a run has measured -----------------------------------


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


# --- Predicts time and dollars of a job on fleets of several sizes, and chooses the best one --------------------------


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
