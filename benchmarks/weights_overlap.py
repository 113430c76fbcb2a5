"""From the end of a step to the new version in a reserved worker's cache, fetched ahead of the commit and not.

    python -m benchmarks.weights_overlap [--mib 256] [--rounds 5] [--gbit 1 0]

The weight store, the publisher and the worker's puller are a process each. Publisher and worker have a link of `--gbit`
each way to the store (token buckets; 0 is none). Every version is of other random bytes. In each round one version is
published that the worker fetches ahead and one that it does not, the first of them in turn.

`publish_s` goes from the beginning of the upload to the commit, `pull_s` from there until the version is whole in the
worker's cache, verified; `seconds` is both. `ahead_mb` is what had come before the pull.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from benchmarks.support.shaped_link import ShapedLink
from benchmarks.support.weight_store import running_store
from shared import logs
from shared.lifecycle import loop_factory
from shared.waiting import Waits
from shared.weights.cache import Cache
from shared.weights.client import StoreClient
from shared.weights.following import DraftFollower
from shared.weights.publisher import Publisher, Shard
from shared.weights.puller import Puller
from tests.support.service_process import TOKEN

JOB = "benchmark"
_ROWS = 4 << 20
Row = dict[str, float]


async def work(url: str, cache: Path) -> None:
    """Be the worker: obey `follow` and `pull VERSION`, a line each, and answer a pull with a line."""
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    async with StoreClient(url, TOKEN) as client:
        puller = Puller(client, Cache(cache), Waits())
        follower = DraftFollower(client, puller)
        following: asyncio.Task[None] | None = None

        async def follow() -> None:
            while True:
                await follower.follow(JOB)

        while line := (await reader.readline()).decode().split():
            if line[0] == "follow":
                following = asyncio.create_task(follow())
                continue
            await puller.pull(JOB, int(line[1]))
            print(json.dumps([time.monotonic(), puller.last.bytes_prefetched]), flush=True)
            if following is not None:
                following.cancel()
                await asyncio.wait({following})
                following = None
        puller.close()


class Bench:
    """A publisher here, a worker in its own process."""

    def __init__(self, publisher: Publisher, worker: asyncio.subprocess.Process, n_bytes: int) -> None:
        self._publisher = publisher
        self._worker = worker
        self._n_bytes = n_bytes
        self._version = 0

    async def publish(self, *, ahead: bool) -> Row:
        """Publish one version; return what it took until the worker had it."""
        version, self._version = self._version, self._version + 1
        data = np.random.default_rng(version).integers(0, 256, self._n_bytes, dtype=np.uint8)
        shards = [
            Shard(f"layer.{at}", "uint8", (len(piece),), (0,), (len(piece),), piece.data)
            for at in range(0, self._n_bytes, _ROWS)
            if len(piece := data[at : at + _ROWS])
        ]
        if ahead:
            await self._say("follow")
        began = time.monotonic()
        part = await self._publisher.publish(JOB, version, 0, shards)
        digests = [part.digest]
        await self._publisher.commit(JOB, version, expect=version - 1, part_digests=digests, config_json="{}")
        committed = time.monotonic()
        await self._say(f"pull {version}")
        assert self._worker.stdout is not None
        ended, n_ahead = json.loads(await self._worker.stdout.readline())
        return {
            "publish_s": committed - began,
            "pull_s": ended - committed,
            "seconds": ended - began,
            "ahead_mb": n_ahead / 1e6,
        }

    async def _say(self, line: str) -> None:
        assert self._worker.stdin is not None
        self._worker.stdin.write(f"{line}\n".encode())
        await self._worker.stdin.drain()


async def measure(port: int, directory: Path, gbit: float, options: argparse.Namespace) -> None:
    with ExitStack() as stack:
        urls = [f"http://127.0.0.1:{port}"] * 2
        if gbit:
            links = [ShapedLink(port, bits_per_s=gbit * 1e9, both_ways=True) for _ in urls]
            urls = [stack.enter_context(link).url for link in links]
        command = ["-m", "benchmarks.weights_overlap", "--worker", urls[1], str(directory / f"cache-{gbit}")]
        pipe = asyncio.subprocess.PIPE
        worker = await asyncio.create_subprocess_exec(sys.executable, *command, stdin=pipe, stdout=pipe)
        async with StoreClient(urls[0], TOKEN) as client:
            bench = Bench(Publisher(client, Waits()), worker, options.mib << 20)
            await bench.publish(ahead=False)
            rows: dict[bool, list[Row]] = {False: [], True: []}
            for number in range(options.rounds):
                for ahead in (number % 2 == 0, number % 2 == 1):
                    rows[ahead].append(await bench.publish(ahead=ahead))
                    print(json.dumps({"gbit": gbit, "ahead": ahead} | _rounded(rows[ahead][-1])), flush=True)
        assert worker.stdin is not None
        worker.stdin.close()
        await worker.wait()
    for ahead, found in rows.items():
        medians = {f"median_{name}": statistics.median(row[name] for row in found) for name in found[0]}
        print(json.dumps({"gbit": gbit, "ahead": ahead} | _rounded(medians)), flush=True)
    ratios = [usual["seconds"] / early["seconds"] for usual, early in zip(rows[False], rows[True], strict=True)]
    print(json.dumps({"gbit": gbit, "ratios": [round(ratio, 2) for ratio in ratios]}), flush=True)


def _rounded(row: Row) -> Row:
    return {name: round(value, 2) for name, value in row.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=256, help="size of the model")
    parser.add_argument("--rounds", type=int, default=5, help="versions published either way")
    parser.add_argument("--gbit", type=float, nargs="+", default=[1.0, 0.0], help="links' speeds; 0: not limited")
    parser.add_argument("--worker", nargs=2, metavar=("URL", "DIR"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    logs.configure("weights_overlap", level="WARNING", form="json")
    with asyncio.Runner(loop_factory=loop_factory()) as runner:  # as the services have it
        if options.worker:
            runner.run(work(options.worker[0], Path(options.worker[1])))
            return
        for gbit in options.gbit:
            with tempfile.TemporaryDirectory() as name, running_store(Path(name), KEEP_VERSIONS="2") as (store, _):
                runner.run(measure(store.port, Path(name), gbit, options))


if __name__ == "__main__":
    main()
