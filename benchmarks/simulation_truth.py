"""Compares simulated step times with real ones: the Countdown job on this machine, on several fleets.

    python -m benchmarks.simulation_truth [--fleets 1 2 3 2-preempted trace] [--steps 30] [--trace FILE --start HOUR]

For each fleet it runs a local system with real processes, and then simulates the same fleet with the `profile.json`
that the run wrote. `2-preempted` starts with two preemptible workers; every 8 s one is killed without notice, and
another one joins. `trace` replays two hours of a spot trace in a minute, with at most three workers; without a file the
trace is generated. The mean step time of the run's last 20 steps is compared with the simulated one.

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
from collections import deque
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from rlboost.client import Client
from rlboost.demo.run import countdown
from rlboost.local.cluster import LocalCluster
from rlboost.local.processes import LocalOptions
from rlboost.planning import read_profile, simulate_run, simulated_machine, worker_kinds
from rlboost.services.trainer.domain.metrics import RECENT_STEPS
from rlboost.shared.job.run_profile import RunProfile
from rlboost.shared.job.spec import RlJob, parse
from rlboost.shared.messages import ENDED
from rlboost.shared.prices import Prices
from rlboost.simulation.traces import FleetEvent, FleetTrace, trace_segment

Action = Literal["add", "remove"]
PREEMPT_EVERY_S = 8.0
TRACE_HOURS, TRACE_MINUTES, TRACE_WORKERS = 2.0, 1.0, 3
"""What is replayed of a trace, in which time, and by how many workers at most."""
LOOK_EVERY_S = 0.1
LIMIT_S = 1200.0
SEEDS = 3
FREE = Prices(reserved=0.0, workers={"torch-cpu": 0.0})


class Run:
    """One real run: its job file, its measured steps and the changes of its fleet meanwhile."""

    def __init__(self, steps: int, workers: int, changes: Sequence[tuple[float, Action]]) -> None:
        raw, _ = countdown(steps, seed=0)
        raw["elastic"]["seeding"] = "auto"
        raw["eval"] = None
        self.raw = raw
        self.steps, self.workers, self.changes = steps, workers, deque(changes)
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
                    if self.began_at:
                        await self.change_if_due(cluster)
                rows = client.jobs.metrics(job_id)
            self.profile = read_profile(state / "runs" / job_id / "profile.json")
        self.step_s = statistics.mean(row["time/step_s"] for row in rows[self.steps - RECENT_STEPS : self.steps])

    async def change_if_due(self, cluster: LocalCluster) -> None:
        joining: list[tuple[str, float]] = []
        while self.changes and self.changes[0][0] <= time.monotonic() - self.began_at:
            if self.changes.popleft()[1] == "add":
                self.fleet.append(cluster.join_worker())
                joining.append((self.fleet[-1], time.monotonic()))
                self.events.append(FleetEvent(time.monotonic() - self.began_at, "add", self.fleet[-1]))
            else:
                killed = self.fleet.pop(0)
                cluster.kill(killed)
                self.events.append(FleetEvent(time.monotonic() - self.began_at, "remove", killed))
        for joined, at in joining:
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


def fleet_of(name: str, trace: Path | None, start_h: float) -> tuple[int, list[tuple[float, Action]]]:
    """Return the initial workers of a fleet, and its changes with their seconds after the first measured step."""
    workers, _, suffix = name.partition("-")
    if name == "trace":
        part = trace_segment(trace, sample=0.5, start_h=start_h, hours=TRACE_HOURS, limit=TRACE_WORKERS)
        initial = sum(event.at_s == 0.0 for event in part.events)
        compressed = TRACE_MINUTES / TRACE_HOURS / 60
        return initial, [(event.at_s * compressed, event.kind) for event in part.events[initial:]]
    times = range(1, 1000) if suffix == "preempted" else ()
    actions: tuple[Action, ...] = ("remove", "add")
    return int(workers), [(PREEMPT_EVERY_S * time, action) for time in times for action in actions]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fleets", nargs="+", default=["1", "2", "3", "2-preempted", "trace"])
    parser.add_argument("--steps", type=int, default=RECENT_STEPS + 10)
    parser.add_argument("--trace", type=Path, help="recorded spot trace of the fleet `trace`")
    parser.add_argument("--start", type=float, default=2.0, help="its hour at which the replay begins")
    options = parser.parse_args()
    first: RunProfile | None = None
    for fleet in options.fleets:
        run = Run(options.steps, *fleet_of(fleet, options.trace, options.start))
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
            "preemptions": sum(event.kind == "remove" for event in run.events),
        }
        print(json.dumps(figures), flush=True)


if __name__ == "__main__":
    main()
