"""What a worker beside a vLLM server takes of its idle time, and what that costs the server, as JSON lines.

    python -m benchmarks.borrowing [--bursts 100] [--gap-s 3.5] [--url http://127.0.0.1:8000 --model NAME]
    python -m benchmarks.borrowing --one-engine [--bursts 40] [--ttft-ms 100]

Server, worker, weight store and Redis are real processes on this machine's CPUs; the manager is a script that keeps the
worker's slots full whenever it is ready. Rounds of five bursts alternate: `alone`, with the worker stopped by SIGSTOP,
and `borrowed`. Ratios compare the two. Without --url, the benchmark starts vLLM with the model of examples/countdown.
With --one-engine the worker is the server, and a command stops its samples.

- `ttft_ratio_p50`, `ttft_ratio_p99`: time to the first token of the server's requests, borrowed over alone.
- `idle_used`: part of the time without a request in which the worker had the device.
- `yield_ms`: from the first request of a burst until the worker's engine had stopped and its tokens were sent; of the
  bursts that met a worker with the device.
- `capacity_used`: with --one-engine, tokens of samples per second in borrowed rounds, over those without any request.
- `lost`, `repeated`: samples that did not go on where they were, and tokens that were generated twice.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from statistics import median, quantiles

import httpx

from benchmarks.support.weight_store import running_store
from rlboost.shared.messages import Resume, Suspend, TokenFrame, UseVersion, WorkerHeartbeat
from rlboost.shared.messages.token_rows import token_rows
from rlboost.shared.process.waiting import Waits
from rlboost.shared.redis.bus import RedisBus
from rlboost.shared.streams.bus import START
from rlboost.shared.streams.names import worker_reports
from rlboost.shared.weights.client import StoreClient
from rlboost.shared.weights.publisher import Publisher
from rlboost.shared.weights.rest_models import CommitRequest
from rlboost.shared.weights.torch_tensors import named_shards
from rlboost.shared.wire import ints
from tests.support import published_model, vllm_engines
from tests.support.eventually import eventually
from tests.support.ports import reserved_port
from tests.support.service_process import TOKEN, ServiceProcess
from tests.support.worker_manager import JOB, JoinServer, WorkerManager, assign

MODEL = Path(__file__).parent.parent / "examples" / "countdown" / "base"
PER_ROUND = 5
SETTLE_S, CAPACITY_S = 4.0, 10.0
"""Until all seats are in use again, and for how long each round then measures the throughput without requests."""
START_LIMIT_S = 300.0
SLOTS = 8
SAMPLE_TOKENS = 400
BURST_S, REQUESTS_PER_S = 3.0, 5.0
"""How long requests come in a burst, and how many on average."""
WORKER_NICENESS = 19
"""The kernel shares CPUs by priority: the server comes first."""
ANSWER_TOKENS = 24


# --- the server -------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def vllm_server(folder: Path, port: int) -> AsyncIterator[str]:
    """Start vLLM on this machine's CPUs; yield its URL."""
    model = vllm_engines.copy_renderable(MODEL, folder / "model")
    env = os.environ | {
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "TORCHDYNAMO_DISABLE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    flags = {"model": model, "served-model-name": "m", "dtype": "float32", "max-model-len": 256, "max-num-seqs": 16}
    flags |= {"port": port, "kv-cache-memory-bytes": 64 << 20}
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--enforce-eager"]
    command += [text for name, value in flags.items() for text in (f"--{name}", str(value))]
    with (folder / "vllm.log").open("wb") as log:
        process = subprocess.Popen(command, env=env, stdout=log, stderr=log, start_new_session=True)  # noqa: ASYNC220 - it returns at once
    url = f"http://127.0.0.1:{port}"
    try:
        async with httpx.AsyncClient(trust_env=False) as client:

            async def is_healthy() -> bool:
                assert process.poll() is None, (folder / "vllm.log").read_text()[-2000:]
                try:
                    return (await client.get(f"{url}/health")).is_success
                except httpx.TransportError:
                    return False

            await eventually(is_healthy, within_s=START_LIMIT_S)
        yield url
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait()


@dataclass
class Load:
    """What the clients of the server saw in one kind of round."""

    ttft_s: list[float] = field(default_factory=list)
    began: list[float] = field(default_factory=list)
    """When each burst began (Unix)."""
    idle: list[tuple[float, float]] = field(default_factory=list)
    """From the end of each burst to the beginning of the next."""


async def ask(client: httpx.AsyncClient, url: str, model: str, load: Load, prompt: str) -> None:
    """Send one request; note the time to its first token."""
    body = {"model": model, "prompt": prompt, "max_tokens": ANSWER_TOKENS, "stream": True, "ignore_eos": True}
    began, first = time.monotonic(), 0.0
    async with client.stream("POST", f"{url}/v1/completions", json=body) as answer:
        answer.raise_for_status()
        async for line in answer.aiter_lines():
            if line.startswith("data: {") and not first:
                first = time.monotonic()
    load.ttft_s.append(first - began)


async def serve_round(url: str, model: str, load: Load, draw: random.Random, gap_s: float) -> None:
    """Send the bursts of one round."""
    async with httpx.AsyncClient(trust_env=False, timeout=120) as client:
        for number in range(PER_ROUND):
            idle_from = time.time()
            await asyncio.sleep(gap_s * draw.uniform(0.6, 1.4))
            load.began.append(time.time())
            load.idle.append((idle_from, load.began[-1]))
            async with asyncio.TaskGroup() as group:
                until = time.monotonic() + BURST_S
                while time.monotonic() < until:
                    prompt = f"{number} {draw.randrange(10**9)}"
                    group.create_task(ask(client, url, model, load, prompt), name="request")
                    await asyncio.sleep(draw.expovariate(REQUESTS_PER_S))


# --- the worker and its manager ---------------------------------------------------------------------------------------


class Filler:
    """Keeps a worker's slots full while it is ready; checks that samples go on with exactly the tokens they had."""

    def __init__(self, manager: WorkerManager, worker: str) -> None:
        self._manager = manager
        self._worker = worker
        self._tokens: dict[int, list[int]] = {}
        self._attempts: dict[int, int] = {}
        self._placed: set[int] = set()
        self._next = 1
        self._state = ""
        self._slots = SLOTS
        self.generated = self.repeated = self.lost = self.finished = 0

    async def run(self) -> None:
        """Read what the worker reports, and assign, until cancelled."""
        cursor, stream = START, worker_reports(self._worker)
        while True:
            for entry in await self._manager.bus.read({stream: cursor}, block_s=0.05, count=512):
                cursor = entry.id
                match entry.message:
                    case TokenFrame():
                        self._take(entry.message)
                    case WorkerHeartbeat(state=state, slots=slots):
                        self._slots = slots or SLOTS
                        if state == "suspended" != self._state:
                            self._placed.clear()
                        self._state = state
            if self._state == "ready" and len(self._placed) < self._slots:
                await self._fill()

    def _take(self, frame: TokenFrame) -> None:
        tokens, start = ints(frame.tokens), 0
        for sample, attempt, offset, count, _, finish in token_rows(frame):
            known = self._tokens.get(sample)
            if known is not None and attempt == self._attempts[sample]:
                self.lost += offset > len(known)
                self.repeated += max(0, len(known) - offset)
                known += tokens[start + len(known) - offset : start + count]
                self.generated += count
                if finish:
                    self._placed.discard(sample)
                if len(known) >= SAMPLE_TOKENS:
                    self.finished += 1
                    del self._tokens[sample]
            start += count

    async def _fill(self) -> None:
        waiting = [sample for sample in self._tokens if sample not in self._placed]
        for sample in waiting[: self._slots - len(self._placed)]:
            await self._assign(sample)
        while len(self._placed) < self._slots:
            self._tokens[self._next] = []
            await self._assign(self._next)
            self._next += 1

    async def _assign(self, sample: int) -> None:
        self._attempts[sample] = self._attempts.get(sample, 0) + 1
        self._placed.add(sample)
        command = assign(sample, attempt=self._attempts[sample], max_tokens=SAMPLE_TOKENS, tokens=self._tokens[sample])
        await self._manager.send(self._worker, command)


class Rate:
    """Tokens of samples per second, over some times."""

    def __init__(self, filler: Filler) -> None:
        self._filler = filler
        self._tokens, self._seconds = 0, 0.0

    async def during(self, what: Awaitable[None]) -> None:
        """Await this, and count its time."""
        before, began = self._filler.generated, time.monotonic()
        await what
        self._tokens += self._filler.generated - before
        self._seconds += time.monotonic() - began

    @property
    def per_s(self) -> float:
        """Return the rate."""
        return self._tokens / self._seconds


async def publish_folder(client: StoreClient, folder: Path) -> None:
    """Commit a model's folder as version 0."""
    part = await Publisher(client, Waits()).publish(JOB, 0, 0, named_shards(folder))
    config = (folder / "config.json").read_text()
    await client.commit(JOB, 0, CommitRequest(expect=-1, parts=(part.digest,), config_json=config))


async def measure_one_engine(folder: Path, port: int, bursts: int, gap_s: float, ttft_ms: float) -> None:
    """Run the rounds with a worker that is the server, and print the results."""
    loads, draw = {"alone": Load(), "borrowed": Load()}, random.Random(1)
    model = vllm_engines.copy_renderable(MODEL, folder / "model")
    (folder / "store").mkdir()
    with running_store(folder / "store") as (store, redis_url):
        async with StoreClient(store.url, TOKEN) as client:
            await publish_folder(client, model)
        join, bus = JoinServer(TOKEN, redis_url, store.url), RedisBus(redis_url)
        settings = {"URL": join.url, "NAME": "w", "SLOTS": str(SLOTS), "CACHE_DIR": str(folder / "cache")}
        settings |= {"LEASE_S": "60", "STALL_LIMIT_S": "600", "ENGINE": "vllm", "BASE_MODEL": str(model)}
        settings |= {"SERVE": f"127.0.0.1:{port}", "SERVE_TTFT_MS": str(ttft_ms), "KV_CACHE_BYTES": str(64 << 20)}
        settings |= {"SERVE_ARGS": '{"served_model_name": "m"}', "VLLM_ARGS": '{"max_model_len": 512}'}
        env = {f"RLBOOST_WORKER_{key}": value for key, value in settings.items()}
        worker = ServiceProcess("rollout_worker", "RLBOOST_WORKER_", folder, "redis://127.0.0.1:1/0", env)
        worker.launch()
        try:
            manager, url = WorkerManager(bus), f"http://127.0.0.1:{port}"
            name = await manager.joined(within_s=START_LIMIT_S)
            await manager.send(name, UseVersion(job_id=JOB, version=0))
            await manager.until(name, "ready", 0, within_s=START_LIMIT_S)
            filler = Filler(manager, name)
            capacity, used, other = Rate(filler), Rate(filler), Rate(filler)
            filling = asyncio.create_task(filler.run(), name="filler")
            await eventually(lambda: filler.generated > 100, within_s=START_LIMIT_S)
            await serve_round(url, "m", Load(), draw, gap_s)
            for number in range(2 * -(-bursts // PER_ROUND)):
                kind = ("alone", "borrowed")[number % 2]
                await manager.send(name, Suspend(step=number) if kind == "alone" else Resume(step=number))
                await manager.until(name, "suspended" if kind == "alone" else "ready", within_s=START_LIMIT_S)
                await asyncio.sleep(SETTLE_S)
                if kind == "borrowed":
                    await capacity.during(asyncio.sleep(CAPACITY_S))
                await (used if kind == "borrowed" else other).during(serve_round(url, "m", loads[kind], draw, gap_s))
                print(json.dumps({"round": number, "kind": kind, **summary(loads[kind])}), flush=True)
            filling.cancel()
            await asyncio.wait({filling})
            print(
                json.dumps(
                    {
                        **ratios(loads),
                        "capacity_tokens_per_s": round(capacity.per_s),
                        "capacity_used": round(used.per_s / capacity.per_s, 3),
                        "seats_reduced": worker.log().count('"seats_reduced"'),
                        "lost": filler.lost,
                        "repeated": filler.repeated,
                    }
                )
            )
        finally:
            worker.kill()
            await bus.close()
            join.close()


def spells(log: str) -> list[tuple[float, float]]:
    """Return the times (Unix) in which the worker had the device, from its log."""
    found: list[tuple[float, float]] = []
    taken: float | None = None
    for line in log.splitlines():
        if '"device_taken"' in line or '"device_yielded"' in line:
            entry = json.loads(line)
            at = datetime.fromisoformat(entry["timestamp"]).timestamp()
            if entry["event"] == "device_taken":
                taken = at
            elif taken is not None:
                found.append((taken, at))
                taken = None
    return [*found, *([(taken, time.time())] if taken is not None else [])]


def overlap(intervals: Sequence[tuple[float, float]], others: Sequence[tuple[float, float]]) -> float:
    """Return the seconds that are in an interval of each."""
    return sum(max(0.0, min(b, d) - max(a, c)) for a, b in intervals for c, d in others)


def percentile(values: Sequence[float], percent: int) -> float:
    """Return a percentile of at least two values."""
    return quantiles(values, n=100, method="inclusive")[percent - 1]


async def measure(folder: Path, url: str, model: str, bursts: int, gap_s: float) -> None:
    """Run the rounds and print the results."""
    loads, draw = {"alone": Load(), "borrowed": Load()}, random.Random(1)
    (folder / "store").mkdir()
    with running_store(folder / "store") as (store, redis_url):
        async with StoreClient(store.url, TOKEN) as client:
            await published_model.publish(client, JOB, 0, seed=0)
        join, bus = JoinServer(TOKEN, redis_url, store.url), RedisBus(redis_url)
        settings = {"URL": join.url, "NAME": "w", "SLOTS": str(SLOTS), "CACHE_DIR": str(folder / "cache")}
        settings |= {"BESIDE_URL": url, "LEASE_S": "60", "STALL_LIMIT_S": "600"}
        env = {f"RLBOOST_WORKER_{key}": value for key, value in settings.items()}
        worker = ServiceProcess("rollout_worker", "RLBOOST_WORKER_", folder, "redis://127.0.0.1:1/0", env)
        worker.launch()
        os.setpriority(os.PRIO_PROCESS, worker.pid, WORKER_NICENESS)
        try:
            manager = WorkerManager(bus)
            name = await manager.joined(within_s=START_LIMIT_S)
            await manager.send(name, UseVersion(job_id=JOB, version=0))
            await manager.until(name, "ready", 0, within_s=START_LIMIT_S)
            filler = Filler(manager, name)
            filling = asyncio.create_task(filler.run(), name="filler")
            await eventually(lambda: filler.generated > 100, within_s=START_LIMIT_S)
            await serve_round(url, model, Load(), draw, gap_s)  # the first requests compile and fill caches
            for number in range(2 * -(-bursts // PER_ROUND)):
                kind = ("alone", "borrowed")[number % 2]
                os.kill(worker.pid, signal.SIGSTOP if kind == "alone" else signal.SIGCONT)
                await asyncio.sleep(1.0)
                await serve_round(url, model, loads[kind], draw, gap_s)
                print(json.dumps({"round": number, "kind": kind, **summary(loads[kind])}), flush=True)
            os.kill(worker.pid, signal.SIGCONT)
            filling.cancel()
            await asyncio.wait({filling})
            report(loads, spells(worker.log()), filler)
        finally:
            worker.kill()
            await bus.close()
            join.close()


def summary(load: Load) -> dict[str, float]:
    """Return the percentiles of a load so far."""
    return {f"ttft_ms_p{p}": round(1e3 * percentile(load.ttft_s, p), 1) for p in (50, 99)}


def ratios(loads: dict[str, Load]) -> dict[str, object]:
    """Return the latencies of borrowed rounds over those of the others."""
    alone, borrowed = loads["alone"].ttft_s, loads["borrowed"].ttft_s
    compared = {f"ttft_ratio_p{p}": round(percentile(borrowed, p) / percentile(alone, p), 2) for p in (50, 90, 99)}
    return {**compared, "requests": [len(alone), len(borrowed)]}


def report(loads: dict[str, Load], had: Sequence[tuple[float, float]], filler: Filler) -> None:
    """Print the results."""
    borrowed = loads["borrowed"]
    idle_s = sum(end - begin for begin, end in borrowed.idle)
    yields = [1e3 * (end - at) for at in borrowed.began for begin, end in had if begin <= at <= end]
    result = {
        **ratios(loads),
        "idle_used": overlap(borrowed.idle, had) / idle_s,
        "yields": len(yields),
        "yield_ms_median": median(yields),
        "yield_ms_p90": percentile(yields, 90),
        "tokens_per_idle_s": filler.generated / idle_s,
        "finished": filler.finished,
        "lost": filler.lost,
        "repeated": filler.repeated,
    }
    print(json.dumps({name: round(each, 3) if isinstance(each, float) else each for name, each in result.items()}))


async def main(bursts: int, gap_s: float, url: str, model: str, *, one_engine: bool, ttft_ms: float) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if one_engine:
            with reserved_port() as port:
                await measure_one_engine(folder, port, bursts, gap_s, ttft_ms)
        elif url:
            await measure(folder, url, model, bursts, gap_s)
        else:
            with reserved_port() as port:
                async with vllm_server(folder, port) as started:
                    await measure(folder, started, "m", bursts, gap_s)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bursts", type=int, default=100)
    parser.add_argument("--gap-s", type=float, default=3.5)
    parser.add_argument("--url", default="")
    parser.add_argument("--model", default="m")
    parser.add_argument("--one-engine", action="store_true")
    parser.add_argument("--ttft-ms", type=float, default=100)
    given = parser.parse_args()
    numbers = given.bursts, given.gap_s, given.url, given.model
    asyncio.run(main(*numbers, one_engine=given.one_engine, ttft_ms=given.ttft_ms))
