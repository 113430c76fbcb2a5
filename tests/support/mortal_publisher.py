"""A publisher to kill during its upload: `python -m tests.support.mortal_publisher URL TOKEN JOB VERSION SEED MIB`.

It publishes tensors of 1 MiB. After `MIB` of them it prints a line and blocks.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Iterator

import numpy as np

from rlboost.shared.process.waiting import Waits
from rlboost.shared.weights.client import StoreClient
from rlboost.shared.weights.manifest import Shard
from rlboost.shared.weights.publisher import Publisher

MIB = 1 << 20


def shards(seed: int, n_mib: int) -> Iterator[Shard]:
    """Yield `n_mib` tensors of 1 MiB, random by `seed`."""
    rng = np.random.default_rng(seed)
    for number in range(n_mib):
        data = rng.integers(0, 256, MIB, dtype=np.uint8)
        yield Shard(f"layer.{number}", "uint8", (MIB,), (0,), (MIB,), data.data)


def _until_killed(seed: int, n_mib: int) -> Iterator[Shard]:
    yield from shards(seed, n_mib)
    print("upload blocked", flush=True)
    threading.Event().wait()


async def _main(url: str, token: str, job_id: str, version: int, seed: int, n_mib: int) -> None:
    async with StoreClient(url, token) as client:
        await Publisher(client, Waits(), chunk_bytes=MIB).publish(job_id, version, 0, _until_killed(seed, n_mib))


if __name__ == "__main__":
    asyncio.run(_main(*sys.argv[1:4], *map(int, sys.argv[4:7])))  # type: ignore[arg-type]
