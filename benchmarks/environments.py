"""How long conversations take whose environment waits, all in one process, and what each costs.

    OMP_NUM_THREADS=1 python -m benchmarks.environments [--conversations 1024] [--turns 2] [--seconds 5] [--threads 1]

The whole path of a job: `EnvironmentPool` with one process. Each turn is 500 characters, each answer 2,000, and each
environment keeps its turns. `async` waits with `asyncio.sleep`; with `--threads` beyond 1, `plain` with `time.sleep` in
so many threads.

`ideal_s` is the time that one conversation waits. Memory is the process's largest resident set, in all and what
conversations added; `cpu_ms` is processor time of the process per call, `trainer_cpu_ms` that of the trainer's side.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import time
from pathlib import Path
from typing import Any

from benchmarks.support.environments import ANSWER
from rlboost.services.trainer.adapters.environment_pool import EnvironmentPool
from rlboost.shared.job.reward import EnvironmentSpec
from rlboost.shared.process.waiting import Waits
from rlboost.shared.user_code import USER_MODULES_SETTING

TURN = "t" * 500
SLACK_S = 60.0


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")


def peak_mb(pid: int) -> float:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024


async def measure(kind: str, conversations: int, turns: int, seconds: float, threads: int) -> dict[str, Any]:
    spec = EnvironmentSpec(
        function=f"benchmarks.support.environments:{kind}",
        arguments={"seconds": seconds},
        timeout_s=seconds + SLACK_S,
        threads=threads,
        concurrency=max(1024, conversations),
    )
    pool = EnvironmentPool(spec, Waits())

    async def converse(i: int) -> None:
        for turn in range(1, turns + 1):
            (result,) = await pool.step(i, {"prompt": TURN}, 0, [f"{TURN}{i}"] * turn)
            assert result.observation == ANSWER
        pool.release(i)

    await pool.start()
    try:
        pid = int(str((await pool.reset({}, 0)).prompt))
        base_mb, base_s, own_s = peak_mb(pid), cpu_s(pid), time.process_time()
        began = time.perf_counter()
        await asyncio.gather(*map(converse, range(conversations)))
        wall_s = time.perf_counter() - began
        calls = conversations * turns
        return {
            "kind": kind.lower(),
            "conversations": conversations,
            "turns": turns,
            "seconds": seconds,
            "threads": threads,
            "wall_s": round(wall_s, 1),
            "ideal_s": turns * seconds,
            "peak_mb": round(peak_mb(pid)),
            "kb_each": round((peak_mb(pid) - base_mb) * 1024 / conversations, 1),
            "cpu_ms": round((cpu_s(pid) - base_s) / calls * 1e3, 2),
            "trainer_cpu_ms": round((time.process_time() - own_s) / calls * 1e3, 2),
            "load": round(os.getloadavg()[0], 1),
            "cores": os.cpu_count(),
        }
    finally:
        await pool.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--conversations", type=int, default=1024)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--threads", type=int, default=1)
    asked = parser.parse_args()
    os.environ[USER_MODULES_SETTING] = "benchmarks"  # the user's code is here
    kind = "Plain" if asked.threads > 1 else "Async"
    row = asyncio.run(measure(kind, asked.conversations, asked.turns, asked.seconds, asked.threads))
    print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
