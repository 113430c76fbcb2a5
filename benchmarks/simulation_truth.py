"""Compares simulated step times with real ones: the Countdown job on this machine, on several fleets.

    python -m benchmarks.simulation_truth [--fleets 1 2 3 2-preempted] [--steps 30]

For each fleet it runs a local system with real processes, and then simulates the same fleet with the `profile.json`
that the run wrote. `2-preempted` starts with two preemptible workers; every 8 s one is killed without notice, and
another one joins. The mean step time of the run's last 20 steps is compared with the simulated one.

One JSON line per fleet. `error` is the relative difference with the run's own profile, `cross_error` with the profile
of the first fleet, as `rlboost plan` predicts: on one machine it includes that workers share its processors.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlboost.client import Client
from rlboost.demo.run import countdown
from rlboost.local.cluster import LocalCluster
from rlboost.local.processes import LocalOptions
from rlboost.planning import read_profile, simulate_run, simulated_machine, worker_kinds
from rlboost.services.trainer.domain.profile_recorder import RECENT_STEPS
from rlboost.shared.job.run_profile import RunProfile
from rlboost.shared.job.spec import RlJob, parse
from rlboost.shared.messages import ENDED
from rlboost.shared.prices import Prices
from rlboost.simulation.traces import FleetEvent, FleetTrace

PREEMPT_EVERY_S = 8.0
LOOK_EVERY_S = 0.1
LIMIT_S = 1200.0
SEEDS = 3
FREE = Prices(reserved=0.0, workers={"torch-cpu": 0.0})


class Run:
    """One real run: its job file, its measured steps and the changes of its fleet meanwhile."""

    def __init__(self, steps: int, workers: int, *, preempted: bool) -> None:
        raw, _ = countdown(steps, seed=0)
        raw["elastic"]["seeding"] = "auto"
        raw["eval"] = None
        self.raw = raw
        self.steps, self.workers, self.preempted = steps, workers, preempted
        self.began_at = 0.0
        """When the first measured step began."""
        self.fleet = [f"worker-{i + 1}" for i in range(workers)]
        self.events: list[FleetEvent] = []
        self.startup_s: list[float] = []
        self.step_s = 0.0
        self.profile: RunProfile

    def spec(self) -> RlJob:
        spec = parse(self.raw)
        assert isinstance(spec, RlJob)
        return spec

    async def measure(self, state: Path) -> None:
        cluster = LocalCluster(LocalOptions(state_dir=state, reserved=1, workers=self.workers))
        async with cluster, asyncio.timeout(LIMIT_S):
            with Client(cluster.url, cluster.token) as client:
                job_id = client.jobs.create(self.raw)["id"]
                async for seen in job_states(client, job_id):
                    if seen["step"] >= self.steps - RECENT_STEPS and not self.began_at:
                        self.began_at = time.monotonic()
                        self.events = [FleetEvent(0.0, "add", name) for name in self.fleet]
                    if self.preempted and self.began_at:
                        await self.preempt_if_due(cluster)
                rows = client.jobs.metrics(job_id)
            self.profile = read_profile(state / "runs" / job_id / "profile.json")
        self.step_s = statistics.mean(row["time/step_s"] for row in rows[self.steps - RECENT_STEPS : self.steps])

    async def preempt_if_due(self, cluster: LocalCluster) -> None:
        if time.monotonic() - self.began_at < PREEMPT_EVERY_S * (1 + len(self.startup_s)):
            return
        killed = self.fleet.pop(0)
        cluster.kill(killed)
        self.events.append(FleetEvent(time.monotonic() - self.began_at, "remove", killed))
        joined, at = cluster.join_worker(), time.monotonic()
        self.events.append(FleetEvent(at - self.began_at, "add", joined))
        self.fleet.append(joined)
        await cluster.until_ready(joined)
        self.startup_s.append(time.monotonic() - at)

    def simulated_step_s(self, profile: RunProfile) -> float:
        """Return the mean duration of as many simulated steps, over several seeds."""
        startup_s = statistics.mean(self.startup_s) if self.startup_s else 0.0
        machine = simulated_machine(worker_kinds(profile)[0], profile, FREE, startup_s=startup_s)
        machine = replace(machine, notice_s=0.0)  # the workers are killed
        trace = FleetTrace(tuple(self.events), 1.5 * RECENT_STEPS * self.step_s)
        runs = [simulate_run(self.spec(), profile, machine, trace, seed) for seed in range(SEEDS)]
        return statistics.mean(statistics.mean(s.duration_s for s in run.steps[:RECENT_STEPS]) for run in runs)


async def job_states(client: Client, job_id: str) -> AsyncIterator[dict[str, Any]]:
    while (seen := await asyncio.to_thread(client.jobs.show, job_id))["state"] not in ENDED:
        yield seen
        await asyncio.sleep(LOOK_EVERY_S)
    if seen["state"] != "completed":
        raise SystemExit(f"job {job_id} ended as {seen['state']}: {seen.get('error')}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fleets", nargs="+", default=["1", "2", "3", "2-preempted"])
    parser.add_argument("--steps", type=int, default=RECENT_STEPS + 10)
    options = parser.parse_args()
    first: RunProfile | None = None
    for fleet in options.fleets:
        workers, _, suffix = fleet.partition("-")
        run = Run(options.steps, int(workers), preempted=suffix == "preempted")
        with tempfile.TemporaryDirectory() as folder:
            asyncio.run(run.measure(Path(folder) / "state"))
        first = first or run.profile
        own_s, cross_s = run.simulated_step_s(run.profile), run.simulated_step_s(first)
        figures = {
            "fleet": fleet,
            "step_s": round(run.step_s, 3),
            "simulated_s": round(own_s, 3),
            "error": round(own_s / run.step_s - 1, 3),
            "cross_error": round(cross_s / run.step_s - 1, 3),
            "preemptions": len(run.startup_s),
        }
        print(json.dumps(figures), flush=True)


if __name__ == "__main__":
    main()
