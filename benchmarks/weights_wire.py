"""What a worker waits for and what goes over its link: a fresh one, one with an old version, whole and as deltas.

    python -m benchmarks.weights_wire [--mib 64] [--versions 68] [--gbit 1] [--dir DIR]

The weight store is the real process; between it and the worker is a link of `--gbit` (a token bucket for all of the
worker's connections). The model is synthetic: normal values of standard deviation 0.02 in bf16 with a float32 master
copy. Every step adds to each value a normal one, of which half of the variance is the same at all steps, as gradients
that agree and noise; its size is chosen so that about 1 % of the bf16 values change. What part does is measured, and
printed first. Each row is one pull, verified, of the newest version:

- `full`: no deltas; `chain`: only those between neighbours; `composed`: all that the store has;
- `fresh`: nothing is cached; `base`: the first version is, as in a machine image with the public model; `lag N`: the
  version N steps earlier is.

`wire_mb` is what the link carried (10^6 bytes, headers and documents included), `seconds` what the pull took.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from benchmarks.support.shaped_link import ShapedLink
from benchmarks.support.weight_store import running_store
from rlboost.shared.process.lifecycle import loop_factory
from rlboost.shared.process.waiting import Waits
from rlboost.shared.weights.cache import Cache
from rlboost.shared.weights.client import StoreClient
from rlboost.shared.weights.delta_graph import VersionEdges
from rlboost.shared.weights.manifest import Shard
from rlboost.shared.weights.publisher import Publisher
from rlboost.shared.weights.puller import Puller
from tests.support.service_process import TOKEN, ServiceProcess

JOB = "benchmark"
MODES = ("full", "chain", "composed")
STEP_SIZE = 3e-7
_COLUMNS = 4096
_COMPOSE_LIMIT_S = 60.0


class Model:
    """A float32 master copy, and what is published of it: bf16, rounded to nearest even."""

    def __init__(self, n_bytes: int) -> None:
        """Draw the first version."""
        rng = np.random.default_rng(0)
        self._rng = rng
        rows = n_bytes // 2 // _COLUMNS
        self._master = rng.standard_normal((rows, _COLUMNS), dtype=np.float32) * np.float32(0.02)
        self._drift, self._noise = rng.standard_normal((2, rows, _COLUMNS), dtype=np.float32) * np.float32(
            STEP_SIZE / 2**0.5
        )
        self.bits = self._rounded()

    def step(self) -> float:
        """Move all values; return what part of the bf16 ones changed."""
        # Rolled by some rows, one draw does for the noise of every step.
        shift = int(self._rng.integers(len(self._noise)))
        self._master += self._drift
        self._master[shift:] += self._noise[: len(self._noise) - shift]
        self._master[:shift] += self._noise[len(self._noise) - shift :]
        before, self.bits = self.bits, self._rounded()
        return float((before != self.bits).mean())

    def shards(self) -> Iterator[Shard]:
        """Yield matrices of 16 MiB."""
        rows = (16 << 20) // 2 // _COLUMNS
        for number, at in enumerate(range(0, len(self.bits), rows)):
            block = self.bits[at : at + rows]
            yield Shard(f"layer.{number}", "bfloat16", block.shape, (0, 0), block.shape, block.data)

    def _rounded(self) -> npt.NDArray[np.uint16]:
        bits = self._master.view(np.uint32)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


class Restricted(StoreClient):
    """A client that sees only some of the edges."""

    def __init__(self, url: str, mode: str) -> None:
        """See every edge (`composed`), those between neighbours (`chain`) or none (`full`)."""
        super().__init__(url, TOKEN)
        self._mode = mode

    async def route(self, job_id: str, version: int, have: int) -> tuple[VersionEdges, ...]:
        if self._mode == "full":
            return ()
        if self._mode == "composed":
            return await super().route(job_id, version, have)
        documents = [await edges_to(self, job_id, at) for at in range(version, have, -1)]
        only_next = {"from_base": None}
        return tuple(
            document.model_copy(update={**only_next, "hops": document.hops[:1]}) for document in documents if document
        )


async def edges_to(client: StoreClient, job_id: str, version: int) -> VersionEdges | None:
    """Return the edges to one version."""
    documents = await StoreClient.route(client, job_id, version, version - 1)
    return next((document for document in documents if document.version == version), None)


async def publish(client: StoreClient, publisher: Publisher, version: int, model: Model) -> None:
    """Publish and commit; return when the store has composed what there is to compose."""
    part = await publisher.publish(JOB, version, 0, model.shards())
    await publisher.commit(JOB, version, expect=version - 1, part_digests=[part.digest], config_json="{}")
    if version == 0:
        await client.pin(JOB, 0)
        return
    expected = sum(version >= span for span in (1, 2, 4, 8)) + (version > 8 and version % 8 == 0)
    async with asyncio.timeout(_COMPOSE_LIMIT_S):
        while True:
            document = await edges_to(client, JOB, version)
            if document is not None and len(list(document.all_hops())) == expected:
                break
            await asyncio.sleep(0.05)


async def cached(client: StoreClient, version: int, cache: Path) -> None:
    """Fill a cache with a version, not over the slow link."""
    puller = Puller(client, Cache(cache), Waits())
    await puller.pull(JOB, version)
    puller.close()


async def pull(link: ShapedLink, mode: str, version: int, cache: Path, expected: bytes) -> dict[str, float]:
    """Pull over the link; return what it took."""
    async with Restricted(link.url, mode) as client:
        puller = Puller(client, Cache(cache), Waits())
        before, began = link.bytes_down, time.perf_counter()
        pulled = await puller.pull(JOB, version)
        row = {
            "wire_mb": round((link.bytes_down - before) / 1e6, 2),
            "seconds": round(time.perf_counter() - began, 2),
            "fallbacks": puller.last.fallbacks,
        }
        assert b"".join(bytes(data) for _, data in pulled.tensors()) == expected
        puller.close()
    return row


async def measure(store: ServiceProcess, directory: Path, options: argparse.Namespace) -> None:
    model = Model(options.mib << 20)
    newest = options.versions
    lags = [lag for lag in (1, 8, 64) if lag < newest]
    changed: list[float] = []
    async with StoreClient(store.url, TOKEN) as client:
        publisher = Publisher(client, Waits(), deltas=True)
        for version in range(newest + 1):
            if version:
                changed.append(model.step())
            await publish(client, publisher, version, model)
            if version == 0:
                await cached(client, version, directory / "base")
            elif newest - version in lags:
                await cached(client, version, directory / f"lag {newest - version}")
        print(json.dumps({"model_mb": model.bits.nbytes / 1e6, "changed_a_step": round(float(np.mean(changed)), 4)}))
        rows: list[dict[str, str | float]] = []
        with ShapedLink(store.port, bits_per_s=options.gbit * 1e9) as link:
            for what in ("fresh", "base", *(f"lag {lag}" for lag in lags)):
                for mode in MODES if what != "fresh" else MODES[:1]:
                    cache = directory / f"{what} {mode}"
                    if what != "fresh":
                        shutil.copytree(directory / what, cache, copy_function=os.link)
                    found = await pull(link, mode, newest, cache, model.bits.tobytes())
                    rows.append({"what": what, "mode": mode, **found})
                    print(json.dumps(rows[-1]), flush=True)
    table(rows)


def table(rows: list[dict[str, str | float]]) -> None:
    """Print the rows side by side."""
    print(f"\n{'':8}" + "".join(f"{mode:>22}" for mode in MODES))
    for what in dict.fromkeys(row["what"] for row in rows):
        found = {row["mode"]: f"{row['wire_mb']:.2f} MB {row['seconds']:.2f} s" for row in rows if row["what"] == what}
        print(f"{what:8}" + "".join(f"{found.get(mode, '-'):>22}" for mode in MODES))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=64, help="size of the model, a multiple of 16")
    parser.add_argument("--versions", type=int, default=68, help="how many steps are published, 9 at least")
    parser.add_argument("--gbit", type=float, default=1.0, help="speed of the link, 10^9 bits a second")
    parser.add_argument("--dir", type=Path, default=None, help="where store and caches are; a temporary directory")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.dir) as name:
        directory = Path(name)
        runner = asyncio.Runner(loop_factory=loop_factory())  # as the services have it
        with running_store(directory, KEEP_DELTAS=str(options.versions)) as (store, _), runner:
            runner.run(measure(store, directory, options))


if __name__ == "__main__":
    main()
