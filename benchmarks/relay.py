"""Processor time of the manager per relayed frame, next to that of reading and decoding the same frames.

    python -m benchmarks.relay [--workers 16] [--samples 64] [--tokens 4] [--rounds 6]

Frames of many workers wait in the workers' streams of a real Redis. Relaying reads them, checks whose they are, and
moves them to the token log; then they are read and decoded from there, as the manager does next. One JSON line with the
least microseconds per frame of all rounds: others that use the processor only add to them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from pathlib import Path

from benchmarks.support.system import System
from benchmarks.support.workers import FrameWriter, LoadWorker, Row
from rlboost.services.rollout_manager.loop import relay
from rlboost.shared.messages import Role
from rlboost.shared.redis.bus import RedisBus
from rlboost.shared.streams import names
from rlboost.shared.streams.bus import START, Delete, Fence

FRAMES_PER_WORKER = 64
"""Of each round."""


async def relay_all(bus: RedisBus, roles: dict[str, Role], fence: Fence) -> float:
    """Move every waiting frame to the token log; return microseconds of processor time per frame."""
    owners = {names.worker_reports(worker): worker for worker in roles}
    began, n_frames = time.process_time(), 0
    while reports := (await bus.read_with_raw({}, owners, count=FRAMES_PER_WORKER))[1]:
        await bus.transact(relay(reports, owners, roles), fence)
        n_frames += len(reports)
    return (time.process_time() - began) / n_frames * 1e6


async def read_all(bus: RedisBus) -> float:
    """Read and decode the token log; return microseconds of processor time per frame."""
    began, n_frames, cursor = time.process_time(), 0, START
    while entries := await bus.read({names.TOKEN_LOG: cursor}, count=1024):
        cursor = entries[-1].id
        n_frames += len(entries)
    return (time.process_time() - began) / n_frames * 1e6


async def measure(url: str, n_workers: int, samples: int, tokens: int, rounds: int) -> tuple[float, float]:
    bus, writer = RedisBus(url), FrameWriter(url)
    workers = [LoadWorker(f"load-{i}", samples) for i in range(n_workers)]
    for worker in workers:
        worker.version = 0
        worker.waiting.extend(Row(sample, 1, 0, 1 << 20) for sample in range(samples))
    roles: dict[str, Role] = {worker.id: "preemptible" for worker in workers}
    fence = Fence(names.MANAGER_EPOCH, await bus.increment(names.MANAGER_EPOCH))
    relaying, reading = [], []
    for _ in range(rounds):
        for worker in workers:
            frames = [frame[0] for _ in range(FRAMES_PER_WORKER) if (frame := worker.frame(tokens))]
            writer.write([(names.worker_reports(worker.id), body) for body in frames])
        relaying.append(await relay_all(bus, roles, fence))
        reading.append(await read_all(bus))
        await bus.transact([Delete(names.TOKEN_LOG)])
    writer.close()
    await bus.close()
    return min(relaying), min(reading)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=16)
    parser.add_argument("--samples", type=int, default=64, help="samples a frame")
    parser.add_argument("--tokens", type=int, default=4, help="tokens of a sample in a frame")
    parser.add_argument("--rounds", type=int, default=6)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory, System(Path(directory)) as system:
        relaying, reading = asyncio.run(measure(system.url, args.workers, args.samples, args.tokens, args.rounds))
    row = {
        "frame": f"{args.samples} x {args.tokens}",
        "relay_us": round(relaying, 1),
        "read_us": round(reading, 1),
        "ratio": round(relaying / reading, 2),
    }
    print(json.dumps(row))


if __name__ == "__main__":
    main()
