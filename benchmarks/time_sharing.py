"""Several jobs on one device: one after the other, at once without turns, and in turns; a JSON line for each.

    python -m benchmarks.time_sharing [--steps 12] [--workers 2] [--repeat 1]

Redis, manager, weight store, trainers and workers are real processes on this machine; the trainers' device and the
workers' are emulated (`benchmarks.support.emulated`). Each job trains Countdown, and in each step generation and
training take about as long. `makespan_s` is from the first submission to the end of the last job.

- `one after the other`: the second job is submitted when the first has ended; the same system and fleet.
- `at once`: two trainers compute whenever they have work, and the device serializes their calls. This needs memory for
  the states of both on the device at the same time.
- `in turns`: `--time-share`. `ratio` is its makespan over that of one after the other.
- `three in turns`: `shares` are those of the device's time while all three jobs ran.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import redis
import yaml

from benchmarks.support.emulated import CHANGE_S, DECODE_S, LOCK, TOKEN_S
from rlboost.client import Client
from rlboost.local.cluster import LocalCluster
from rlboost.local.processes import SHARED_DEVICE, LaunchContext, LocalOptions, ProcessRole, ProcessSpec, spec_of
from rlboost.shared.streams.names import device_claims

ROOT = Path(__file__).parents[1]
_PROGRAMS = {"trainer": "trainer", "preemptible": "worker"}
_DEVICE = {TOKEN_S: "0.008", CHANGE_S: "0.2", DECODE_S: "0.04"}


def emulated(context: LaunchContext, name: str, role: ProcessRole) -> ProcessSpec:
    """Return a process, with an emulated device if it has one."""
    spec = spec_of(context, name, role)
    if role not in _PROGRAMS:
        return spec
    return replace(spec, argv=(sys.executable, "-m", "benchmarks.support.emulated", _PROGRAMS[role]))


def job(steps: int, seed: int) -> dict[str, Any]:
    """Return the example's job with small steps."""
    spec: dict[str, Any] = yaml.safe_load((ROOT / "examples/countdown/job.yaml").read_text(encoding="utf-8"))
    spec["data"]["prompts_per_step"] = 4
    spec["algorithm"] |= {"group_size": 4, "updates_per_step": 1}
    spec["trainer"] |= {"seed": seed, "checkpoint_every": 100, "micro_batch_tokens": 256}
    del spec["eval"]
    return {**spec, "steps": steps, "name": f"job-{seed}"}


class System:
    """A running system, and what its jobs do."""

    def __init__(self, cluster: LocalCluster) -> None:
        """Bind to a cluster that is ready."""
        self._client = Client(cluster.url, cluster.token)
        self._redis = redis.Redis.from_url(cluster.config.redis_url)

    def submit(self, steps: int, seed: int) -> str:
        """Create a job; return its id."""
        return str(self._client.jobs.create(job(steps, seed))["id"])

    def until_ended(self, jobs: list[str], each: Callable[[], None] = lambda: None) -> None:
        """Wait until all have ended; one that failed ends the benchmark."""
        while True:
            states = [self._client.jobs.show(job_id) for job_id in jobs]
            if bad := [state for state in states if state["state"] in {"failed", "cancelled"}]:
                raise SystemExit(f"a job did not complete: {bad[0]['error']}")
            if all(state["state"] == "completed" for state in states):
                return
            each()
            time.sleep(0.1)

    def used_s(self) -> dict[str, float]:
        """Return how long each running job has held the device."""
        claims = self._redis.hgetall(device_claims(SHARED_DEVICE))
        return {name.decode(): json.loads(claim)["used_s"] for name, claim in claims.items()}  # type: ignore[union-attr]

    def phases(self, jobs: list[str]) -> dict[str, float]:
        """Return the mean seconds of the parts of a step, and how often a job's workers changed jobs."""
        rows = [row for job_id in jobs for row in self._client.jobs.metrics(job_id)]
        names = ("step", "wait", "train", "publish", "device_wait")
        means = {f"{name}_s": sum(row.get(f"time/{name}_s", 0.0) for row in rows) / len(rows) for name in names}
        means["length"] = sum(row["completions/mean_length"] for row in rows) / len(rows)
        events = [event.kind for job_id in jobs for event in self._client.jobs.events(job_id, follow=False)]
        means["reassigned"] = events.count("worker_reassigned") / len(jobs)
        return {name: round(mean, 2) for name, mean in means.items()}


def one_after_the_other(system: System, steps: int) -> dict[str, Any]:
    """Run two jobs; return the makespan."""
    began, jobs = time.monotonic(), []
    for seed in (1, 2):
        jobs.append(system.submit(steps, seed))
        system.until_ended(jobs)
    return {"makespan_s": time.monotonic() - began, **system.phases(jobs)}


def at_once(system: System, steps: int) -> dict[str, Any]:
    """Run two jobs at once; return the makespan."""
    began = time.monotonic()
    jobs = [system.submit(steps, seed) for seed in (1, 2)]
    system.until_ended(jobs)
    return {"makespan_s": time.monotonic() - began, **system.phases(jobs)}


def three(system: System, steps: int) -> dict[str, Any]:
    """Run three jobs in turns; return makespan and each one's part of the device while all ran."""
    began = time.monotonic()
    jobs = [system.submit(steps, seed) for seed in (1, 2, 3)]
    first: dict[str, float] = {}
    last: dict[str, float] = {}

    def look() -> None:
        seen = system.used_s()
        if set(seen) == set(jobs):
            first.update({} if first else seen)
            last.update(seen)

    system.until_ended(jobs, look)
    used = {job_id: last[job_id] - first[job_id] for job_id in jobs}
    shares = {job_id: round(100 * s / sum(used.values()), 1) for job_id, s in used.items()}
    return {"makespan_s": time.monotonic() - began, "shares": shares, **system.phases(jobs)}


async def measure(
    options: LocalOptions, *runs: tuple[str, Callable[[System, int], dict[str, Any]], int]
) -> dict[str, float]:
    """Start a system, do one run after the other, and print each; return their makespans."""
    makespans: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        env = {**_DEVICE, LOCK: str(Path(folder, "device")), "OMP_NUM_THREADS": "1"}
        env |= {"RLBOOST_WORKER_SLOTS": "16"}
        async with LocalCluster(
            replace(options, state_dir=Path(folder, "state"), env=env), spec_of=emulated
        ) as cluster:
            system = await asyncio.to_thread(System, cluster)
            for name, run, steps in runs:
                found = await asyncio.to_thread(run, system, steps)
                makespans[name] = found["makespan_s"]
                found["makespan_s"] = round(found["makespan_s"], 1)
                print(
                    json.dumps({"run": name, "steps": steps, "load": round(os.getloadavg()[0], 1), **found}), flush=True
                )
    return makespans


def main() -> None:
    """Measure all, and print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--only", choices=("two", "three"), help="only these runs")
    given = parser.parse_args()
    options = LocalOptions(reserved=0, workers=given.workers, trainers=2)
    shared = replace(options, time_share=True)
    for _ in range(given.repeat if given.only != "three" else 0):
        apart = asyncio.run(measure(options, ("at once", at_once, given.steps)))
        runs = (("one after the other", one_after_the_other, given.steps), ("in turns", at_once, given.steps))
        found = asyncio.run(measure(shared, *runs)) | apart
        serial = found["one after the other"]
        print(
            json.dumps({f"ratio, {name}": round(s / serial, 3) for name, s in found.items() if s != serial}), flush=True
        )
    if given.only != "two":
        asyncio.run(measure(replace(shared, trainers=3), ("three in turns", three, given.steps)))


if __name__ == "__main__":
    main()
