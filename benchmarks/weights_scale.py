"""Versions of gigabytes: one publisher, the weight store and several pullers, as JSON lines.

    python -m benchmarks.weights_scale [--mib 2048] [--pullers 1,4,16] [--rounds 3] [--dir DIR]

The store and every puller are real processes on one machine, connected by loopback; files are in `--dir`. Rows:

- `publish`: every byte is new; `publish 1 %`: one value in a hundred moved by one step since the version before, as
  deltas; `wire_bytes` is what the store received, as a fraction of the version. Both end with the commit;
- `write after publish 1 %`: the store writes the chunks that the deltas lead to;
- `pull`: `--pullers` processes at once, each into an empty cache, verified;
- `pull from the directory`: one process that shares the store's file system;
- `curl`: one `curl` that fetches a file of the same size from nginx with `sendfile` into a file, not verified; left out
  where nginx is not installed. `of_curl` is the throughput of the single puller in the same round by that of curl.

`client_cpu_s_per_gb` and `server_cpu_s_per_gb` are processor seconds per 10^9 bytes transferred, those of a puller
without its imports. Throughput depends on what else the machine does; processor time much less. Every row is the median
of `--rounds` rounds. The rows `computed` are not measured: seconds that links need for models in bfloat16.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import numpy as np
import numpy.typing as npt

from benchmarks.support.weight_store import running_store
from benchmarks.weights_http import JOB, cpu_s_of, shards_of
from rlboost.shared.http.server import bind
from rlboost.shared.process.lifecycle import loop_factory
from rlboost.shared.process.waiting import Waits
from rlboost.shared.weights.cache import Cache
from rlboost.shared.weights.client import StoreClient
from rlboost.shared.weights.publisher import Publisher
from rlboost.shared.weights.puller import DirectorySource, Puller, StoreSource
from rlboost.shared.weights.rest_models import chunk_path
from tests.support.eventually import eventually
from tests.support.service_process import TOKEN, ServiceProcess

_TRANSFERS = 8
_SETTLE_S = 4.0
"""The host of a virtual machine takes freed memory back after about 2 s, and to get it again costs processor time: this
pause before every pull and `curl` keeps one from starting with memory that the one before has just freed."""
_MODELS = {"8B": 8.0e9, "32B": 32.0e9, "235B": 235.0e9}
_GBIT_PER_S = (10, 50, 400)
_DELTA_SHARE = 0.0062
"""Bytes of a delta of 1 % of the values, as a fraction of the version: 1.23 bytes per changed value of 2 bytes."""
Row = dict[str, float]


def cpu_s(who: int) -> float:
    usage = resource.getrusage(who)
    return usage.ru_utime + usage.ru_stime


async def pull(url: str, directory: Path, version: int, *, shared: bool) -> Row:
    """Pull a version; return the seconds and processor seconds."""
    async with StoreClient(url, TOKEN) as client:
        cache = Cache(directory)
        store = StoreSource(client, cache, concurrency=_TRANSFERS)
        source = DirectorySource(client, cache, store) if shared else store
        puller = Puller(client, cache, Waits(), source=source)
        await asyncio.sleep(_SETTLE_S)
        began, cpu = time.perf_counter(), cpu_s(resource.RUSAGE_SELF)
        await puller.pull(JOB, version)
        row = {"seconds": time.perf_counter() - began, "cpu_s": cpu_s(resource.RUSAGE_SELF) - cpu}
        puller.close()
    return row


def pull_all(store: ServiceProcess, directory: Path, n: int, gb: float, *options: str) -> Row:
    """Run `n` pullers at once."""
    command = [sys.executable, "-m", "benchmarks.weights_scale", "--pull", store.url, *options]
    server = cpu_s_of(store.pid)
    pullers = [
        subprocess.Popen([*command, "--dir", str(directory / str(k))], stdout=subprocess.PIPE, text=True)
        for k in range(n)
    ]
    rows: list[Row] = []
    for puller in pullers:
        out, _ = puller.communicate()
        rows.append(json.loads(out.splitlines()[-1]))
    shutil.rmtree(directory)
    return {
        "gb_per_s": n * gb / max(row["seconds"] for row in rows),
        "client_cpu_s_per_gb": sum(row["cpu_s"] for row in rows) / n / gb,
        "server_cpu_s_per_gb": (cpu_s_of(store.pid) - server) / n / gb,
    }


@contextmanager
def nginx(root: Path) -> Iterator[tuple[str, int]]:
    """Serve a folder with `sendfile`; give the URL and the worker's process id."""
    with bind("127.0.0.1", 0) as free:
        port = free.getsockname()[1]
    config = root / "nginx.conf"
    config.write_text(
        f"daemon off; pid {root}/nginx.pid; error_log {root}/nginx.log; user root; worker_processes 1; events {{}}\n"
        f"http {{ access_log off; sendfile on; tcp_nopush on; sendfile_max_chunk 0;"
        f" server {{ listen 127.0.0.1:{port}; root {root}; }} }}\n"
    )
    process = subprocess.Popen(["nginx", "-c", str(config)], stderr=subprocess.DEVNULL)
    try:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        while not children.read_text().split():
            time.sleep(0.05)
        yield f"http://127.0.0.1:{port}", int(children.read_text().split()[0])
    finally:
        process.terminate()
        process.wait()


def curl(url: str, worker: int, path: Path, gb: float) -> Row:
    time.sleep(_SETTLE_S)
    began, client, server = time.perf_counter(), cpu_s(resource.RUSAGE_CHILDREN), cpu_s_of(worker)
    subprocess.run(["curl", "-sf", "-o", str(path), url], check=True)
    row = {
        "gb_per_s": gb / (time.perf_counter() - began),
        "client_cpu_s_per_gb": (cpu_s(resource.RUSAGE_CHILDREN) - client) / gb,
        "server_cpu_s_per_gb": (cpu_s_of(worker) - server) / gb,
    }
    path.unlink()
    return row


async def publish(
    publisher: Publisher, store: ServiceProcess, version: int, weights: npt.NDArray[np.uint8], directory: Path
) -> tuple[Row, Row]:
    """Publish a version; return what it took until the commit, and until every chunk was written."""
    gb, began = weights.nbytes / 1e9, time.perf_counter()
    client, server = cpu_s(resource.RUSAGE_SELF), cpu_s_of(store.pid)
    received = await received_bytes(store)
    part = await publisher.publish(JOB, version, 0, shards_of(weights))
    await publisher.commit(JOB, version, expect=version - 1, part_digests=[part.digest], config_json="{}")
    published = {
        "gb_per_s": gb / (time.perf_counter() - began),
        "client_cpu_s_per_gb": (cpu_s(resource.RUSAGE_SELF) - client) / gb,
        "server_cpu_s_per_gb": (cpu_s_of(store.pid) - server) / gb,
        "wire_bytes": (await received_bytes(store) - received) / weights.nbytes,
    }
    began, server = time.perf_counter(), cpu_s_of(store.pid)
    paths = [chunk_path(directory / "store", chunk.digest) for chunk in part.chunks]
    await eventually(lambda: asyncio.to_thread(lambda: all(path.exists() for path in paths)), within_s=600)
    seconds = time.perf_counter() - began
    return published, {"gb_per_s": gb / seconds, "server_cpu_s_per_gb": (cpu_s_of(store.pid) - server) / gb}


async def received_bytes(store: ServiceProcess) -> float:
    async with httpx.AsyncClient(headers={"Authorization": f"Bearer {TOKEN}"}) as http:
        lines = (await http.get(f"{store.url}/metrics")).text.splitlines()
    (line,) = [line for line in lines if line.startswith("rlboost_weight_store_bytes_in_total ")]
    return float(line.split()[1])


def bf16(n_bytes: int) -> npt.NDArray[np.uint16]:
    return np.random.default_rng(0).integers(0, 1 << 16, n_bytes // 2, dtype=np.uint16)


def measure(options: argparse.Namespace, directory: Path) -> None:
    rows: defaultdict[str, list[Row]] = defaultdict(list)
    weights = bf16(options.mib << 20)
    gb = weights.nbytes / 1e9
    with running_store(directory, KEEP_VERSIONS="1") as (store, _), asyncio.Runner(loop_factory=loop_factory()) as loop:
        client = StoreClient(store.url, TOKEN)
        publisher = Publisher(client, Waits(), deltas=True)
        rows["publish"].append(loop.run(publish(publisher, store, 0, weights.view(np.uint8), directory))[0])
        for version in range(1, options.rounds + 1):
            weights[np.random.default_rng(version).integers(0, weights.size, weights.size // 100)] += 1
            deltas, whole = loop.run(publish(publisher, store, version, weights.view(np.uint8), directory))
            rows["publish 1 %"].append(deltas)
            rows["write after publish 1 %"].append(whole)
        for _ in range(options.rounds):
            if shutil.which("nginx"):
                weights.tofile(directory / "whole")
                with nginx(directory) as (url, worker):
                    rows["curl"].append(curl(f"{url}/whole", worker, directory / "copy", gb))
                (directory / "whole").unlink()
            for n in options.pullers:
                what = "puller" if n == 1 else "pullers"
                newest = ["--version", str(options.rounds)]
                rows[f"pull, {n} {what}"].append(pull_all(store, directory / "caches", n, gb, *newest))
            rows["pull from the directory"].append(pull_all(store, directory / "caches", 1, gb, *newest, "--shared"))
            if "curl" in rows and 1 in options.pullers:
                single, reference = rows["pull, 1 puller"][-1], rows["curl"][-1]
                single["of_curl"] = single["gb_per_s"] / reference["gb_per_s"]
        loop.run(client.close())
    for what, found in rows.items():
        medians = {name: round(statistics.median(row[name] for row in found), 3) for name in found[0]}
        print(json.dumps({"what": what, "gb": round(gb, 2), **medians}), flush=True)


def computed() -> None:
    for model, parameters in _MODELS.items():
        for gbit in _GBIT_PER_S:
            full = 2 * parameters * 8 / gbit / 1e9
            row = {"what": "computed", "model": model, "gbit_per_s": gbit, "full_s": round(full, 2)}
            print(json.dumps({**row, "delta_of_1_percent_s": round(full * _DELTA_SHARE, 3)}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=2048, help="size of a version, a multiple of 16")
    parser.add_argument(
        "--pullers", type=lambda text: [int(n) for n in text.split(",")], default=[1, 4, 16], help="such as 1,4,16"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dir", type=Path, default=None, help="where store and caches are; a temporary directory")
    parser.add_argument("--pull", default="", help=argparse.SUPPRESS)
    parser.add_argument("--version", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--shared", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.pull:
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            print(json.dumps(runner.run(pull(options.pull, options.dir, options.version, shared=options.shared))))
        return
    with tempfile.TemporaryDirectory(dir=options.dir) as name:
        measure(options, Path(name))
    computed()


if __name__ == "__main__":
    main()
