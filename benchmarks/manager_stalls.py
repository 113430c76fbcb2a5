"""For how long the manager's event loop runs nothing else, while clients load its endpoint.

    python -m benchmarks.manager_stalls [--seconds 30] [--streams 200] [--sessions 2000] [--prompt-mb 20]

A real manager on a real Redis; load workers write frames as real workers do. Three loads, each alone and then all
together: clients that stream completions; open sessions of agents that make calls, with histories of several turns; and
clients that send large prompts, as token ids, as text, and as chats of one and of many messages.

One JSON line per case, then a table. `longest_ms` is the longest time without a tick of the loop, `cpu_ms` the most
processor time of its thread between two ticks: other processes on the machine lengthen the first only. `over_50` counts
those with more than 50 ms of processor time. `--places` prints where the thread was in the longest ones.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import os
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from multiprocessing.sharedctypes import Synchronized
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit

import redis
from rich.console import Console
from rich.table import Table

from benchmarks.support.system import TOKEN, System, cpu_s
from benchmarks.support.workers import Fleet
from rlboost.shared.ids import SampleId
from rlboost.shared.job.agent import SESSION, SessionId, SessionRecord, key_of_start, session_key
from rlboost.shared.job.spec import parse, to_json
from rlboost.shared.messages import JobCommand, JobReport, Sampling, WeightsCommitted
from rlboost.shared.messages.codec import encode
from rlboost.shared.streams import names

WORDS = 150_000
"""As many tokens as current models have, one a word."""
CONTEXT = 1 << 22
"""Tokens of the model's context, so that a prompt of 20 MB fits."""
ANSWER_TOKENS = 128
PROMPT_WORDS = 300
RESULT_WORDS = 100
"""Of what an agent sends with a further call."""
FRAME_EVERY_S = 0.05
FAST_TOKENS = 32
"""Tokens of a sample in a frame while histories grow; then one."""
START_LIMIT_S = 120.0
SLOTS, WORKERS = 512, 8
CALLS_PER_S = 20.0
BUSY = 100
"""Sessions that make further calls; the others wait for a tool."""
MAX_TURNS = 64
GOAL_MS = 50.0
JOB_NO, JOB_ID = 1, "load-1"
LEASE_MS = 600_000


def write_model(folder: Path) -> Path:
    """Write a tokenizer with a chat template, and return the folder."""
    from tokenizers import Tokenizer, models, pre_tokenizers  # noqa: PLC0415 - only this process needs it

    folder.mkdir()
    vocabulary = {"<unk>": 0, "<user>": 1, "<end>": 2} | {f"w{i:05}": i for i in range(3, WORDS)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"max_position_embeddings": CONTEXT, "vocab_size": WORDS, "eos_token_id": 2}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>"}))
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}<user> {{ m.content }} <end> {% endfor %}"
        "{% if add_generation_prompt %}<user>{% endif %}"
    )
    return folder


def words(n: int, first: int = 3) -> str:
    """Return a text of `n` tokens."""
    return " ".join(f"w{3 + (first + i) % (WORDS - 3):05}" for i in range(n))


# --- the fleet and the trainer ----------------------------------------------------------------------------------------


def create_job(url: str, model: Path) -> None:
    spec = {
        "model": str(model),
        "data": {"train": "t"},
        "reward": {"function": "a:b"},
        "steps": 9,
        "sampling": {"max_tokens": ANSWER_TOKENS},
    }
    create = JobCommand(
        command_id=JOB_ID, action="create", job_id=JOB_ID, job_no=JOB_NO, spec_json=to_json(parse(spec))
    )
    committed = WeightsCommitted(job_id=JOB_ID, version=0, manifest_digest="", n_bytes=0, at=time.time())
    with redis.Redis.from_url(url) as client:
        client.xadd(names.JOB_COMMANDS, {"m": encode(create)})
        client.xadd(names.JOB_REPORTS, {"m": encode(JobReport(job_id=JOB_ID, state="running", step=0))})
        client.xadd(names.WEIGHTS_COMMITTED, {"m": encode(committed)})
        client.set(names.trainer_lease(JOB_ID), json.dumps({"waiting": None}), px=LEASE_MS)


def generate(url: str, join_url: str, tokens: Synchronized[int], ended: Event) -> None:
    """Play the fleet: each sample gets so many tokens in each frame."""
    system = System.__new__(System)  # only to join
    system.manager_url = join_url
    fleet = Fleet(url, WORKERS, SLOTS, join=system.join)
    while not ended.is_set():
        began = time.monotonic()
        if frames := fleet.step(tokens.value):
            fleet.send(frames)
        time.sleep(max(0.0, FRAME_EVERY_S - (time.monotonic() - began)))
    fleet.close()


# --- clients ----------------------------------------------------------------------------------------------------------


class Client:
    """One connection of HTTP/1.1, cheaper than what it loads."""

    def __init__(self, url: str) -> None:
        where = urlsplit(url)
        self._address = where.hostname or "", where.port or 80
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def post(self, path: str, key: str, body: bytes) -> tuple[int, bytes]:
        """Return status and body of the response, which is read to its end."""
        reader, writer = self._streams or await asyncio.open_connection(*self._address, limit=1 << 26)
        self._streams = reader, writer
        head = f"POST {path} HTTP/1.1\r\nHost: m\r\nAuthorization: Bearer {key}\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        headers = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        status = int(headers.split(" ", 2)[1])
        if "transfer-encoding: chunked" in headers:
            return status, await reader.readuntil(b"\r\n0\r\n\r\n")
        n_bytes = int(headers.split("content-length: ")[1].split("\r\n")[0])
        return status, await reader.readexactly(n_bytes)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._streams is not None:
            self._streams[1].close()
            with contextlib.suppress(OSError):
                await self._streams[1].wait_closed()


@dataclass
class Load:
    """Clients of one kind; `run` until cancelled."""

    url: str
    counts: Counter[str] = field(default_factory=Counter)

    def count(self, kind: str, status: int, text: bytes) -> None:
        self.counts[f"{kind}_{status}"] += 1
        if status == 500:
            raise RuntimeError(f"{kind}: {text[:1000]!r}")


class Streams(Load):
    """Clients that stream completions, each the next when one has ended."""

    async def run(self, n: int) -> None:
        body = {"model": JOB_ID, "stream": True, "max_tokens": ANSWER_TOKENS, "ignore_eos": True}

        async def one(i: int) -> None:
            messages = [{"role": "user", "content": words(PROMPT_WORDS, i)}]
            request = json.dumps({**body, "messages": messages}).encode()
            async with Client(self.url) as client:
                while True:
                    self.count("stream", *await client.post("/v1/chat/completions", TOKEN, request))

        await asyncio.gather(*map(one, range(n)))


class Agents(Load):
    """Open sessions; some of them make calls at a rate, each with its whole history."""

    def open(self, url: str, n: int) -> Self:
        """Open `n` sessions, as a trainer does."""
        self._histories = [[{"role": "user", "content": words(PROMPT_WORDS, i)}] for i in range(n)]
        self._keys = [""] * n
        with redis.Redis.from_url(url) as client, client.pipeline(transaction=False) as pipe:
            for i in range(n):
                sample = SampleId(JOB_NO, False, 0, i, 0).pack()
                record = SessionRecord(
                    sample=sample,
                    version=0,
                    first=n + i,
                    stride=n,
                    max_turns=MAX_TURNS,
                    n_ids=min(MAX_TURNS, (1 << 16) // n - 2),
                    seed=1,
                    sampling=Sampling(max_tokens=ANSWER_TOKENS, whole_logprobs=True),
                )
                session = SessionId(JOB_ID, sample)
                self._keys[i] = key_of_start(session_key(TOKEN, session), "a")
                pipe.hset(session.redis_key, SESSION, record.model_dump_json())
            pipe.execute()
        return self

    async def call(self, client: Client, i: int) -> None:
        history = self._histories[i]
        body = {"model": "policy", "messages": history}
        status, text = await client.post("/v1/chat/completions", self._keys[i], json.dumps(body).encode())
        self.count("call", status, text)
        if status == 200:
            message = json.loads(text)["choices"][0]["message"]
            history += [message, {"role": "user", "content": words(RESULT_WORDS, len(history))}]

    async def begin(self) -> None:
        """Make the first call of each session, all together, as at the start of a step."""
        await self._all(len(self._keys), len(self._keys))

    async def grow(self, turns: int) -> None:
        """Let the busy sessions have this many turns."""
        for _ in range(turns - 1):
            await self._all(min(BUSY, len(self._keys)), BUSY)

    async def _all(self, n: int, connections: int) -> None:
        waiting = iter(range(n))

        async def some() -> None:
            async with Client(self.url) as client:
                for i in waiting:
                    await self.call(client, i)

        await asyncio.gather(*(some() for _ in range(connections)))

    async def run(self) -> None:
        async def one(i: int) -> None:
            await asyncio.sleep(i / CALLS_PER_S)
            async with Client(self.url) as client:
                while True:
                    began = time.monotonic()
                    await self.call(client, i)
                    await asyncio.sleep(max(0.0, BUSY / CALLS_PER_S - (time.monotonic() - began)))

        await asyncio.gather(*map(one, range(min(BUSY, len(self._keys)))))


class LargePrompts(Load):
    """A client for each kind of large prompt, which sends them one after the other."""

    def write(self, n_bytes: int) -> Self:
        """Write the requests, which takes longer than to send them."""
        ids = list(range(3, 100_000)) * (1 + n_bytes // 600_000)
        text = words(n_bytes // 7)
        parts = [text[i : i + 2000] for i in range(0, len(text), 2000)]
        base = {"model": JOB_ID, "max_tokens": 8}
        cut = json.dumps({**base, "prompt": ids})[: n_bytes - 2].rpartition(",")[0]
        one, many = ([{"role": "user", "content": part} for part in texts] for texts in ([text], parts))
        self._requests = [
            ("ids", "/v1/completions", f"{cut}]}}".encode()),
            ("text", "/v1/completions", json.dumps({**base, "prompt": text}).encode()),
            ("chat", "/v1/chat/completions", json.dumps({**base, "messages": one}).encode()),
            ("chat_of_many", "/v1/chat/completions", json.dumps({**base, "messages": many}).encode()),
        ]
        return self

    async def run(self) -> None:
        async def one(kind: str, path: str, body: bytes) -> None:
            while True:
                async with Client(self.url) as client:
                    self.count(kind, *await client.post(path, TOKEN, body))

        await asyncio.gather(*(one(*request) for request in self._requests))


# --- measuring --------------------------------------------------------------------------------------------------------


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as directory, System(Path(directory)) as system:
        stalls = Path(directory) / "stalls.jsonl"
        pid = system.start_manager("benchmarks.support.watched_manager", WATCH_FILE=str(stalls))
        create_job(system.url, write_model(Path(directory) / "model"))
        ended, tokens = multiprocessing.Event(), multiprocessing.Value("i", FAST_TOKENS)
        fleet = multiprocessing.Process(
            target=generate, args=(system.url, system.manager_url, tokens, ended), daemon=True
        )
        fleet.start()
        try:
            return asyncio.run(_measure(args, system, stalls, pid, tokens))
        finally:
            ended.set()
            fleet.join(10)


async def _measure(
    args: argparse.Namespace, system: System, stalls: Path, pid: int, tokens: Synchronized[int]
) -> list[dict[str, Any]]:
    url = system.manager_url
    streams, large = Streams(url), LargePrompts(url).write(int(args.prompt_mb * 1e6))
    agents = Agents(url).open(system.url, args.sessions)
    await _until_served(url)
    loads: dict[str, Callable[[], Coroutine[Any, Any, None]]] = {
        "streams": lambda: streams.run(args.streams),
        "sessions": agents.run,
        "large prompts": large.run,
    }

    async def watch(name: str, running: list[Coroutine[Any, Any, None]], limit_s: float) -> dict[str, Any]:
        for load in (streams, agents, large):
            load.counts.clear()
        began, cpu = time.time(), cpu_s(pid)
        tasks = [asyncio.create_task(one) for one in running]
        done, _ = await asyncio.wait(tasks, timeout=limit_s, return_when=asyncio.FIRST_EXCEPTION)
        for task in done:
            task.result()
        until = time.time()
        used = cpu_s(pid) - cpu
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        found = [line for line in _lines(stalls) if began < line["at"] < until]
        row = {
            "case": name,
            "seconds": round(until - began, 1),
            **dict(sorted((streams.counts + agents.counts + large.counts).items())),
            "manager_busy": round(used / (until - began), 2),
            "longest_ms": max((line["wall_ms"] for line in found), default=0.0),
            "cpu_ms": max((line["cpu_ms"] for line in found), default=0.0),
            "over_50": sum(line["cpu_ms"] > GOAL_MS for line in found),
            "load": round(os.getloadavg()[0], 1),
        }
        print(json.dumps(row), flush=True)
        for line in sorted(found, key=lambda line: -line["cpu_ms"])[: args.places]:
            times = (line[name] for name in ("wall_ms", "cpu_ms", "gc_ms"))
            print("   ", *times, Counter(line["places"]).most_common(3), flush=True)
        await asyncio.sleep(2.0)  # what was cancelled ends
        return row

    rows = [await watch("sessions begin", [agents.begin()], START_LIMIT_S)]
    await agents.grow(args.turns)
    tokens.value = 1
    for name, run in loads.items():
        rows.append(await watch(name, [run()], args.seconds))
    rows.append(await watch("all", [run() for run in loads.values()], args.seconds))
    return rows


def _lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


async def _until_served(url: str) -> None:
    request = json.dumps({"model": JOB_ID, "prompt": [3, 4], "max_tokens": 2}).encode()
    limit = time.monotonic() + START_LIMIT_S
    async with Client(url) as client:
        while (answer := await client.post("/v1/completions", TOKEN, request))[0] != 200:
            if time.monotonic() > limit:
                raise RuntimeError(f"the job is not served: {answer}")
            await asyncio.sleep(0.2)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=30.0, help="of each case")
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--sessions", type=int, default=2000)
    parser.add_argument("--turns", type=int, default=16, help="of the sessions that make calls, before measuring")
    parser.add_argument("--prompt-mb", type=float, default=20.0)
    parser.add_argument("--places", type=int, default=0, help="of how many stalls to print where they were")
    print_table(measure(parser.parse_args(arguments)))


def print_table(rows: list[dict[str, Any]]) -> None:
    columns = {"longest ms": "longest_ms", "most CPU ms": "cpu_ms", "over 50 ms": "over_50", "busy": "manager_busy"}
    table = Table("load", *columns)
    for row in rows:
        table.add_row(row["case"], *(f"{row[key]:,}" for key in columns.values()))
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
