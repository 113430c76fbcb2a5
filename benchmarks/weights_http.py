"""Weights over HTTP on loopback: publish and pull, compared with the limits of the machine, as JSON lines.

    python -m benchmarks.weights_http [--mib 512] [--dir DIR]

The weight store is the real process. Figures are GB/s (10^9 bytes) of weights:

- `memory_copy`: one numpy copy;
- `loopback`: one plain socket, 1 MiB at a time, sender and receiver in one process;
- `write_and_sync`: files of 4 MiB written and forced to disk one after the other, in `--dir`;
- `publish`: every byte is new: hashed twice (chunk and tensor), sent, verified, forced to disk;
- `publish_unchanged`: the store has every byte already;
- `pull`: into an empty cache, verified; `pull_again`: the cache has it all, verified by another process before;
- `read`: tensors assembled from the cache.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import numpy.typing as npt

from benchmarks.support.weight_store import running_store
from rlboost.shared.process.lifecycle import loop_factory
from rlboost.shared.process.waiting import Waits
from rlboost.shared.weights.cache import Cache
from rlboost.shared.weights.client import StoreClient
from rlboost.shared.weights.manifest import Shard
from rlboost.shared.weights.publisher import Publisher
from rlboost.shared.weights.puller import Puller
from tests.support.service_process import TOKEN, ServiceProcess

JOB = "benchmark"
_MIB = 1 << 20


@contextmanager
def measured(what: str, n_bytes: int, store_pid: int | None = None) -> Iterator[None]:
    """Print the body's throughput, and what it took of this process's and the store's CPU time."""
    began, ours, its = time.perf_counter(), time.process_time(), cpu_s_of(store_pid)
    yield
    gb = n_bytes / 1e9
    row: dict[str, str | float] = {"what": what, "gb_per_s": round(gb / (time.perf_counter() - began), 3)}
    row["cpu_s_per_gb"] = round((time.process_time() - ours) / gb, 2)
    if store_pid is not None:
        row["store_cpu_s_per_gb"] = round((cpu_s_of(store_pid) - its) / gb, 2)
    print(json.dumps(row), flush=True)


def cpu_s_of(pid: int | None) -> float:
    if pid is None:
        return 0.0
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def memory_copy(source: npt.NDArray[np.uint8]) -> None:
    target = np.empty_like(source)
    target[:] = source  # touches the pages
    with measured("memory_copy", source.nbytes):
        target[:] = source


def loopback(n_bytes: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as sender:
        receiver, _ = server.accept()
        block, buffer = bytes(_MIB), bytearray(_MIB)

        def send() -> None:
            for _ in range(n_bytes // _MIB):
                sender.sendall(block)
            sender.shutdown(socket.SHUT_WR)

        thread = threading.Thread(target=send, name="sender")
        with receiver, measured("loopback", n_bytes):
            thread.start()
            while receiver.recv_into(buffer):
                pass
        thread.join()


def write_and_sync(directory: Path, n_bytes: int) -> None:
    block = os.urandom(4 * _MIB)
    path = directory / "probe"
    with measured("write_and_sync", n_bytes):
        for _ in range(n_bytes // len(block)):
            with path.open("wb") as file:
                file.write(block)
                file.flush()
                os.fsync(file.fileno())
    path.unlink()


def shards_of(weights: npt.NDArray[np.uint8]) -> list[Shard]:
    """Cut the bytes into bf16 matrices of 16 MiB."""
    shape = (2048, 4096)
    step = 16 * _MIB
    blocks = [weights[at : at + step] for at in range(0, weights.nbytes, step)]
    return [Shard(f"layer.{n}", "bfloat16", shape, (0, 0), shape, block.data) for n, block in enumerate(blocks)]


async def store_and_clients(store: ServiceProcess, weights: npt.NDArray[np.uint8], directory: Path) -> None:
    n_bytes = weights.nbytes
    shards = shards_of(weights)
    async with StoreClient(store.url, TOKEN) as client:
        publisher = Publisher(client, Waits())
        for version, what in enumerate(["publish", "publish_unchanged"]):
            with measured(what, n_bytes, store.pid):
                part = await publisher.publish(JOB, version, 0, shards)
                await publisher.commit(JOB, version, expect=version - 1, part_digests=[part.digest], config_json="{}")
        for what in ["pull", "pull_again"]:
            puller = Puller(client, Cache(directory / "cache"), Waits())
            with measured(what, n_bytes, store.pid):
                pulled = await puller.pull(JOB, 1)
            puller.close()
        with measured("read", n_bytes):
            for shard, (_, data) in zip(shards, pulled.tensors(), strict=True):
                found = data
                assert shard.name
        assert found == shards[-1].data


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=512, help="size of the weights, a multiple of 16")
    parser.add_argument("--dir", type=Path, default=None, help="where store and cache are; a temporary directory")
    options = parser.parse_args()
    weights = np.random.default_rng(0).integers(0, 256, options.mib * _MIB, dtype=np.uint8)
    with tempfile.TemporaryDirectory(dir=options.dir) as name:
        directory = Path(name)
        memory_copy(weights)
        loopback(weights.nbytes)
        write_and_sync(directory, weights.nbytes)
        runner = asyncio.Runner(loop_factory=loop_factory())  # as the services have it
        with running_store(directory) as (store, _), runner:
            runner.run(store_and_clients(store, weights, directory))


if __name__ == "__main__":
    main()
