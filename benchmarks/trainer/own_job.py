"""The Countdown job by our engine and trainer in this process; prints as JSON wall and processor seconds a step.

It is `benchmarks.plain_loop` step by step: no Redis, no manager, no weight store.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time

import torch

from benchmarks.plain_loop import JOB, PlainLoop
from rlboost.shared.job.file import load
from tests.support.jobs import parse_rl


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=6)
    args = parser.parse_args()
    torch.set_num_threads(1)
    loop = PlainLoop(parse_rl(load(JOB)))
    steps = []
    for step in range(args.steps):
        wall, cpu = time.perf_counter(), time.process_time()
        await loop.step(step)
        steps.append([time.perf_counter() - wall, time.process_time() - cpu])
    await loop.engine.close()
    print(json.dumps({"steps": steps, "tokens": loop.tokens}))


if __name__ == "__main__":
    asyncio.run(main())
