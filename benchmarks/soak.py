"""Whether the memory of manager and Redis follows work in flight, not history: exits with 1 where either is not flat.

    python -m benchmarks.soak [--minutes 5]

A real manager on a real Redis; load workers that come, leave and die, two jobs at a time that end and are followed by
others, steps of a few seconds. What the manager lets expire of an ended job after some days is removed at once here, as
if the days had passed; a key of an ended job that would never expire stays, and shows.

Flat: over what follows a warm-up of a fifth of the time, the mean of the last third is at most 5 % and 8 MB above that
of the first third. A JSON line every few seconds, and a last one with the slopes an hour and their standard errors.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.support.system import System, rss_bytes
from benchmarks.support.trainer import RequestingTrainer
from benchmarks.support.workers import Fleet
from rlboost.shared.streams import names

WORKERS = 6
SLOTS = 16
TICK_S = 0.02
TOKENS_A_TICK = 8
CHANGE_EVERY_S = 2.0
"""How often a worker goes and another comes."""
STEPS_A_JOB = 40
JOBS_AT_ONCE = 2
ALLOWED_SHARE = 0.05
ALLOWED_BYTES = 8e6
WARM_UP = 0.2


class Soak:
    """The load, one tick after another."""

    def __init__(self, system: System) -> None:
        self._system = system
        self._random = random.Random(0)
        self._fleet = Fleet(system.url, WORKERS, SLOTS)
        self._jobs: list[RequestingTrainer] = []
        self._changed_at = time.monotonic()
        self.jobs_begun = self.workers_gone = self.samples = self.tokens = 0

    def tick(self) -> None:
        """Let workers flush and trainers take; when it is time, replace a worker, or a job by the next."""
        if frames := self._fleet.step(TOKENS_A_TICK):
            self._fleet.send(frames)
        if time.monotonic() - self._changed_at > CHANGE_EVERY_S:
            self._changed_at = time.monotonic()
            worker = self._random.choice(list(self._fleet.workers.values()))
            self._fleet.leave(worker, silently=self._random.random() < 0.5)
            self._fleet.join()
            self.workers_gone += 1
        for job in list(self._jobs):
            job.step()
            if job.steps_done >= STEPS_A_JOB:
                self._end(job)
        while len(self._jobs) < JOBS_AT_ONCE:
            self.jobs_begun += 1
            self._jobs.append(self._new_job())

    def _new_job(self) -> RequestingTrainer:
        groups = WORKERS * SLOTS // 8 // JOBS_AT_ONCE
        return RequestingTrainer(
            self._system.url, self.jobs_begun, groups=groups, groups_per_step=4, mean_tokens=128, seed=self.jobs_begun
        )

    def _end(self, job: RequestingTrainer) -> None:
        job.end()
        self._jobs.remove(job)
        self.samples += job.samples
        self.tokens += job.tokens

    def close(self) -> None:
        self._fleet.close()
        for job in self._jobs:
            job.end()

    def let_days_pass(self) -> None:
        """Remove what expires of jobs that have ended."""
        client = self._system.client
        running = {job.job_id for job in self._jobs}
        for key in client.scan_iter(f"{names.PREFIX}job:*", count=1000):
            if key.decode().split(":")[2] not in running and client.ttl(key) > 0:
                client.delete(key)

    def largest_keys(self, n: int = 8) -> dict[str, int]:
        """Return the keys that take most of Redis's memory."""
        client = self._system.client
        sizes = {key.decode(): int(client.memory_usage(key, samples=0) or 0) for key in client.scan_iter(count=1000)}
        return dict(sorted(sizes.items(), key=lambda item: -item[1])[:n])


def slope_per_hour(seconds: list[float], values: list[float]) -> tuple[float, float]:
    """Return the slope of a line through the points and its standard error, by hour."""
    x, y = np.array(seconds) / 3600.0, np.array(values)
    x = x - x.mean()
    slope = float((x * y).sum() / (x * x).sum())
    left = y - y.mean() - slope * x
    return slope, float(np.sqrt((left**2).sum() / max(1, len(x) - 2) / (x * x).sum()))


def is_flat(values: list[float]) -> bool:
    """Return True if the last third is about as low as the first."""
    third = max(1, len(values) // 3)
    first, last = np.mean(values[:third]), np.mean(values[-third:])
    return bool(last <= first * (1 + ALLOWED_SHARE) + ALLOWED_BYTES)


def run(minutes: float) -> dict[str, Any]:
    """Soak, print a line now and then; return the result."""
    with tempfile.TemporaryDirectory() as directory, System(Path(directory)) as system:
        pid = system.start_manager()
        soak = Soak(system)
        began, end_s, every_s = time.monotonic(), minutes * 60.0, max(0.5, minutes * 60.0 / 240)
        at: list[float] = []
        figures: dict[str, list[float]] = {"manager": [], "redis": []}
        while (now_s := time.monotonic() - began) < end_s:
            soak.tick()
            if now_s >= len(at) * every_s:
                soak.let_days_pass()
                at.append(now_s)
                figures["manager"].append(rss_bytes(pid))
                figures["redis"].append(system.client.info("memory")["used_memory"])
                if len(at) % 12 == 1:
                    print(json.dumps(_row(soak, now_s, figures)), flush=True)
            time.sleep(TICK_S)
        left = {"dead_letters": system.client.xlen(names.DEAD_LETTERS), "largest_keys_bytes": soak.largest_keys()}
        soak.close()
        system.stop_manager()
        return {**_result(soak, at, figures), **left}


def _row(soak: Soak, now_s: float, figures: dict[str, list[float]]) -> dict[str, Any]:
    megabytes = {f"{name}_mb": round(values[-1] / 1e6, 1) for name, values in figures.items()}
    counts = {"jobs": soak.jobs_begun, "workers_gone": soak.workers_gone, "samples": soak.samples}
    return {"at_s": round(now_s), **megabytes, **counts}


def _result(soak: Soak, at: list[float], figures: dict[str, list[float]]) -> dict[str, Any]:
    first = int(len(at) * WARM_UP)
    result: dict[str, Any] = {**_row(soak, at[-1], figures), "tokens": soak.tokens}
    for name, values in figures.items():
        slope, error = slope_per_hour(at[first:], values[first:])
        result[f"{name}_mb_per_hour"] = round(slope / 1e6, 1)
        result[f"{name}_mb_per_hour_error"] = round(error / 1e6, 1)
        result[f"{name}_flat"] = is_flat(values[first:])
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=5.0)
    result = run(parser.parse_args().minutes)
    print(json.dumps(result))
    return 0 if result["manager_flat"] and result["redis_flat"] else 1


if __name__ == "__main__":
    sys.exit(main())
