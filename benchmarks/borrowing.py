"""What a worker beside a vLLM server takes of its idle time, and what that costs the server, as JSON lines.

    python -m benchmarks.borrowing [--bursts 100] [--gap-s 3.5] [--url http://127.0.0.1:8000 --model NAME]

Server, worker, weight store and Redis are real processes on this machine's CPUs; the manager is a script that keeps the
worker's slots full whenever it is ready. Rounds of five bursts alternate: `alone`, with the worker stopped by SIGSTOP,
and `borrowed`. Ratios compare the two. Without --url, the benchmark starts vLLM with the model of examples/countdown.

- `ttft_ratio_p50`, `ttft_ratio_p99`: time to the first token of the server's requests, borrowed over alone.
- `idle_used`: part of the time without a request in which the worker had the device.
- `yield_ms`: from the first request of a burst until the worker's engine had stopped and its tokens were sent; of the
  bursts that met a worker with the device.
- `lost`, `repeated`: samples that did not go on where they were, and tokens that were generated twice.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from statistics import median, quantiles

import httpx

from benchmarks.support.weight_store import running_store
from rlboost.shared.messages import TokenFrame, UseVersion, WorkerHeartbeat
from rlboost.shared.messages.token_rows import token_rows
from rlboost.shared.redis.bus import RedisBus
from rlboost.shared.streams.bus import START
from rlboost.shared.streams.names import worker_reports
from rlboost.shared.weights.client import StoreClient
from rlboost.shared.wire import ints
from tests.support import published_model
from tests.support.eventually import eventually
from tests.support.ports import reserved_port
from tests.support.service_process import TOKEN, ServiceProcess
from tests.support.worker_manager import JOB, JoinServer, WorkerManager, assign

MODEL = Path(__file__).parent.parent / "examples" / "countdown" / "base"
PER_ROUND = 5
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
    model = folder / "model"
    shutil.copytree(MODEL, model)
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    tokenizer["model"]["unk_token"] = next(iter(tokenizer["model"]["vocab"]))  # vLLM renders texts of its own
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))
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
                    case WorkerHeartbeat(state=state):
                        if state == "suspended" != self._state:
                            self._placed.clear()
                        self._state = state
            if self._state == "ready" and len(self._placed) < SLOTS:
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
        for sample in waiting[: SLOTS - len(self._placed)]:
            await self._assign(sample)
        while len(self._placed) < SLOTS:
            self._tokens[self._next] = []
            await self._assign(self._next)
            self._next += 1

    async def _assign(self, sample: int) -> None:
        self._attempts[sample] = self._attempts.get(sample, 0) + 1
        self._placed.add(sample)
        command = assign(sample, attempt=self._attempts[sample], max_tokens=SAMPLE_TOKENS, tokens=self._tokens[sample])
        await self._manager.send(self._worker, command)


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


def report(loads: dict[str, Load], had: Sequence[tuple[float, float]], filler: Filler) -> None:
    """Print the results."""
    alone, borrowed = loads["alone"], loads["borrowed"]
    idle_s = sum(end - begin for begin, end in borrowed.idle)
    yields = [1e3 * (end - at) for at in borrowed.began for begin, end in had if begin <= at <= end]
    result = {
        **{f"ttft_ratio_p{p}": percentile(borrowed.ttft_s, p) / percentile(alone.ttft_s, p) for p in (50, 90, 99)},
        "requests": [len(alone.ttft_s), len(borrowed.ttft_s)],
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


async def main(bursts: int, gap_s: float, url: str, model: str) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if url:
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
    given = parser.parse_args()
    asyncio.run(main(given.bursts, given.gap_s, given.url, given.model))
