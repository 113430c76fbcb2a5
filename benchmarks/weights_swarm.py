"""Many workers that join at once: what the weight store sends, and how long the last one waits.

    python -m benchmarks.weights_swarm [--mib 64] [--peers 16] [--gbit 0.5]

The store is the real process; all workers share a link of `--gbit` to it (a token bucket). Each worker is a
process; between workers there is no limit but this machine. One row a rule:

- `star`: every worker pulls from the store;
- `swarm`: workers serve each other;
- `swarm, a fifth killed`: likewise, and that part of them gets SIGKILL when half of all bytes have arrived.

`store_mb` is what the store's link carried (10^6 bytes), `of_payload` the same in payloads, `seconds` the time from the
start of the processes until the last survivor had all of it, verified; `link_floor_s` is how long the link takes for
what it carried.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from benchmarks.support.shaped_link import ShapedLink
from benchmarks.support.weight_store import running_store
from rlboost.shared.process.waiting import Waits
from rlboost.shared.weights.client import StoreClient
from rlboost.shared.weights.manifest import Shard, digest_of
from rlboost.shared.weights.publisher import Publisher
from tests.support.service_process import TOKEN, ServiceProcess

JOB = "benchmark"
CHUNK_BYTES = 1 << 20
_LIMIT_S = 300.0


async def publish(store: ServiceProcess, weights: np.typing.NDArray[np.uint8]) -> int:
    """Publish version 0; return the number of its chunks."""
    async with StoreClient(store.url, TOKEN) as client:
        publisher = Publisher(client, Waits(), chunk_bytes=CHUNK_BYTES)
        shard = Shard("w", "uint8", weights.shape, (0,), weights.shape, weights.data)
        part = await publisher.publish(JOB, 0, 0, [shard])
        await publisher.commit(JOB, 0, expect=-1, part_digests=[part.digest], config_json="{}")
    return len(part.chunks)


def run(link: ShapedLink, redis_url: str, directory: Path, peers: int, *options: str, kill_at: int = 0) -> float:
    """Run the pulls; return the seconds. A fifth of the peers is killed once `kill_at` blobs have arrived; 0: none."""
    directory.mkdir()
    command = [sys.executable, "-m", "tests.support.weight_peers", "--peers", str(peers), "--dir", str(directory)]
    command += ["--store", link.url, "--redis", redis_url, "--token", TOKEN, "--job", JOB, "--version", "0", *options]
    began = time.perf_counter()
    with (directory / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
    assert process.stdout is not None
    with process.stdout:
        pids = [int(pid) for pid in process.stdout.readline().split()]
    alive = list(range(peers))
    try:
        while not all((directory / f"peer-{number}.digest").exists() for number in alive):
            if time.perf_counter() - began > _LIMIT_S:
                raise TimeoutError(f"not done after {_LIMIT_S:.0f} s: {(directory / 'log').read_text()[-2000:]}")
            if kill_at and sum(1 for _ in directory.glob("peer-*/chunks/*")) >= kill_at:
                for number in alive[: peers // 5]:
                    os.kill(pids[number], signal.SIGKILL)
                alive, kill_at = alive[peers // 5 :], 0
            time.sleep(0.02)
        return time.perf_counter() - began
    finally:
        for number in alive:
            os.kill(pids[number], signal.SIGTERM)
        process.wait()


def measure(store: ServiceProcess, redis_url: str, directory: Path, options: argparse.Namespace) -> None:
    weights = np.random.default_rng(0).integers(0, 256, options.mib << 20, dtype=np.uint8)
    chunks = asyncio.run(publish(store, weights))
    cases: dict[str, tuple[list[str], int]] = {
        "star": (["--alone"], 0),
        "swarm": ([], 0),
        "swarm, a fifth killed": ([], options.peers * chunks // 2),
    }
    for name, (more, kill_at) in cases.items():
        where = directory / name.replace(" ", "-")
        with ShapedLink(store.port, bits_per_s=options.gbit * 1e9) as link:
            seconds = run(link, redis_url, where, options.peers, *more, kill_at=kill_at)
            sent = link.bytes_down
        results = {path.read_text().split()[0] for path in where.glob("*.digest")}
        assert results == {digest_of(digest_of(weights.data).encode())}, f"{name}: not what was published"
        row = {
            "what": name,
            "peers": options.peers,
            "payload_mb": round(weights.nbytes / 1e6, 1),
            "store_mb": round(sent / 1e6, 1),
            "of_payload": round(sent / weights.nbytes, 2),
            "seconds": round(seconds, 1),
            "link_floor_s": round(sent * 8 / options.gbit / 1e9, 1),
        }
        print(json.dumps(row), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=64, help="size of the model")
    parser.add_argument("--peers", type=int, default=16, help="how many workers join at once")
    parser.add_argument("--gbit", type=float, default=0.5, help="the store's link, 10^9 bits a second")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        with running_store(directory) as (store, redis_url):
            measure(store, redis_url, directory, options)


if __name__ == "__main__":
    main()
