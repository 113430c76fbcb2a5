"""Seconds in which a manager that starts rebuilds its world from the token log.

    python -m benchmarks.replay [--samples 1024] [--tokens 8192] [--log-ratio 1 4]

So many samples are in flight with so many tokens each, written by workers of 64 samples in frames of 4 tokens a sample.
`log_ratio` is how many tokens the log holds for each one in flight: 1 is a log without anything that has ended; the
manager writes running samples again and trims when the log holds more than 4, so that is the worst it finds.

One JSON line per log. `recover_s` is on the wall and `recover_cpu_s` the process's own; `ready_s` is from starting
`python -m rlboost.services.rollout_manager` to its `/readyz`, with the interpreter's start and all imports.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.support.system import System, rss_bytes
from benchmarks.support.workers import FrameWriter, LoadWorker, Row
from rlboost.services.rollout_manager.domain.effects import Now
from rlboost.services.rollout_manager.domain.jobs import Job, to_json
from rlboost.services.rollout_manager.domain.world import World
from rlboost.services.rollout_manager.recovery import PoisonEntries, recover
from rlboost.shared.ids import SampleId
from rlboost.shared.job.spec import parse
from rlboost.shared.messages import Admitted, Closed, GroupRequested, Message, Placed, Sampling
from rlboost.shared.redis.bus import RedisBus
from rlboost.shared.streams import names
from rlboost.shared.streams.bus import Append, HashSet
from rlboost.shared.wire import I32, U32, U64, pack

GROUP_SIZE = 8
SLOTS = 64
TOKENS_A_FRAME = 4
JOB_ID = "load-1"
LIMIT_S = 5.0


def request_of(step: int, group: int, tokens: int) -> GroupRequested:
    return GroupRequested(
        job_id=JOB_ID,
        group=SampleId(1, False, step, group, 0).pack(),
        n=GROUP_SIZE,
        prompt=pack(range(64), I32),
        sampling=Sampling(max_tokens=tokens + 1),
        version=0,
        seed=1,
    )


async def write_log(url: str, samples: int, tokens: int, ratio: int) -> None:
    """Write a job and a log; what is in flight was admitted before everything else in it."""
    bus = RedisBus(url)
    spec = {"model": "m", "data": {"train": "t"}, "reward": {"function": "a:b"}, "steps": 9}
    job = Job(JOB_ID, 1, parse(spec), created_at=0.0, state="running", started_at=0.0)
    await bus.transact([HashSet(names.JOBS, {job.id: to_json(job)})])
    frames = FrameWriter(url)
    live = [request_of(ratio, group, tokens) for group in range(samples // GROUP_SIZE)]
    await write(bus, [Admitted(request=request) for request in live])
    for step in range(1, ratio):
        ended = [request_of(step, group, tokens) for group in range(samples // GROUP_SIZE)]
        await write(bus, [Admitted(request=request) for request in ended])
        ids = await generate(bus, frames, ended, tokens, f"gone{step}")
        await write(bus, [Closed(samples=pack(ids, U64))])
    await generate(bus, frames, live, tokens, "here")
    await bus.close()


async def generate(
    bus: RedisBus, frames: FrameWriter, requests: list[GroupRequested], tokens: int, prefix: str
) -> list[int]:
    """Place the groups' samples and write all their tokens; return their ids."""
    ids = [request.group + i for request in requests for i in range(request.n)]
    workers = []
    for first in range(0, len(ids), SLOTS):
        held = ids[first : first + SLOTS]
        worker = LoadWorker(f"{prefix}-{first}", SLOTS)
        worker.version = 0
        worker.waiting.extend(Row(sample, 1, 0, tokens + 1) for sample in held)
        workers.append(worker)
        n = len(held)
        attempts, offsets = pack([1] * n, U32), pack([0] * n, U32)
        await write(bus, [Placed(worker=worker.id, samples=pack(held, U64), attempts=attempts, offsets=offsets)])
    for _ in range(tokens // TOKENS_A_FRAME):
        frames.write([(names.TOKEN_LOG, frame[0]) for worker in workers if (frame := worker.frame(TOKENS_A_FRAME))])
    return ids


async def write(bus: RedisBus, messages: list[Message]) -> None:
    await bus.transact([Append(names.TOKEN_LOG, message) for message in messages])


def measure_recovery(url: str, pipe: Connection) -> None:
    """Recover in this process, which has held nothing yet."""

    async def body() -> dict[str, Any]:
        bus = RedisBus(url)
        before = rss_bytes(os.getpid())
        began, began_cpu = time.monotonic(), time.process_time()
        found = await recover(bus, lambda: World(2.0), Now(time.monotonic(), time.time()), PoisonEntries())
        result = {
            "recover_s": round(time.monotonic() - began, 2),
            "recover_cpu_s": round(time.process_time() - began_cpu, 2),
            "rss_mb": round((rss_bytes(os.getpid()) - before) / 1e6),
            "samples": len(found.world.ledger.samples),
            "tokens": found.world.ledger.tokens_live,
        }
        await bus.close()
        return result

    pipe.send(asyncio.run(body()))


def measure(samples: int, tokens: int, ratio: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as directory, System(Path(directory)) as system:
        asyncio.run(write_log(system.url, samples, tokens, ratio))
        entries = int(system.client.xlen(names.TOKEN_LOG))
        ours, theirs = multiprocessing.get_context("spawn").Pipe()
        process = multiprocessing.get_context("spawn").Process(target=measure_recovery, args=(system.url, theirs))
        process.start()
        result: dict[str, Any] = ours.recv()
        process.join()
        began = time.monotonic()
        system.start_manager()
        ready_s = round(time.monotonic() - began, 2)
        return {"log_ratio": ratio, "log_entries": entries, **result, "ready_s": ready_s}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=1024, help="in flight")
    parser.add_argument("--tokens", type=int, default=8192, help="of each")
    parser.add_argument("--log-ratio", type=int, nargs="+", default=[1, 4], help="tokens in the log for one in flight")
    args = parser.parse_args()
    for ratio in args.log_ratio:
        row = measure(args.samples, args.tokens, ratio)
        print(json.dumps({**row, "aim_s": LIMIT_S, "within": row["recover_s"] < LIMIT_S}), flush=True)


if __name__ == "__main__":
    main()
