"""What it costs that Redis writes to disk before it answers: `appendfsync always` beside `everysec` and `no`.

    OMP_NUM_THREADS=1 python -m benchmarks.redis_disk [--seconds 3] [--rounds 3]

Clients append frames to a stream, each waiting for its answer before the next, as workers do. All that Redis finds at
once it forces to disk together, so what a write costs falls with the number of clients. The three servers take turns,
on the same disk. One line a number of clients: writes a second and the median and slowest hundredth of the answers.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager

import redis.asyncio
import redis.exceptions
import stamina

from rlboost.local import redis_server
from rlboost.local.cluster import Ports

POLICIES = ("no", "everysec", "always")
CLIENTS = (1, 8, 64)
FRAME = bytes(2_000)
"""About 64 samples with 4 tokens each, as a worker flushes them."""
KEPT = 10_000


@contextmanager
def server(policy: str, ports: Ports) -> Iterator[str]:
    """Run a Redis with its file in a folder of its own; give its URL."""
    port = ports.of(policy)
    options = ("--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "yes", "--appendfsync", policy)
    with tempfile.TemporaryDirectory() as folder:
        command = [str(redis_server.find().path), *options, "--dir", folder]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        try:
            yield f"redis://127.0.0.1:{port}/0"
        finally:
            process.terminate()
            process.wait()


async def measure(url: str, n_clients: int, seconds: float) -> list[float]:
    """Return how long each write took, in seconds."""
    clients = [redis.asyncio.from_url(url) for _ in range(n_clients)]
    took_s: list[float] = []

    async def write(number: int) -> None:
        until = time.perf_counter() + seconds
        while (began := time.perf_counter()) < until:
            await clients[number].xadd(f"frames:{number}", {"m": FRAME}, maxlen=KEPT)
            took_s.append(time.perf_counter() - began)

    try:
        async for attempt in stamina.retry_context(on=redis.exceptions.ConnectionError, attempts=None, timeout=10):
            with attempt:
                await clients[0].ping()
        await asyncio.gather(*map(write, range(n_clients)))
    finally:
        for client in clients:
            await client.aclose()
    return took_s


async def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--seconds", type=float, default=3.0, help="of each measurement")
    parser.add_argument("--rounds", type=int, default=3)
    asked = parser.parse_args()
    ports = Ports()
    for n_clients in CLIENTS:
        found: dict[str, list[float]] = {policy: [] for policy in POLICIES}
        for _ in range(asked.rounds):
            for policy in POLICIES:
                with server(policy, ports) as url:
                    found[policy] += await measure(url, n_clients, asked.seconds)
        row: dict[str, object] = {"clients": n_clients}
        for policy, took_s in found.items():
            row[policy] = {
                "writes_per_s": round(len(took_s) / (asked.rounds * asked.seconds)),
                "p50_ms": round(1e3 * statistics.median(took_s), 2),
                "p99_ms": round(1e3 * statistics.quantiles(took_s, n=100)[-1], 2),
            }
        row["always_of_everysec"] = round(len(found["always"]) / len(found["everysec"]), 2)
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    asyncio.run(main())
