"""What the path over HTTP costs a trainer of its own, against the trainer service's path over Redis, in one run.

    python -m benchmarks.external [--groups 128] [--size 8] [--tokens 512] [--rounds 3]

A real manager on a real Redis; load workers write frames as real workers do. Groups are requested and collected on
three paths: `redis`, as the trainer service does; `msgpack` and `json`, by the routes of an external job
(`docs/own-trainer.md`). Rounds alternate, the best one of each path counts.

One JSON line per path, then a table. `tokens_per_s` is at the client, from the first request to the last sample.
`manager_cpu_s` and `client_cpu_s` are processor seconds per million tokens; `ratio` is the manager's, against `redis`.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import msgpack
import redis
from rich.console import Console
from rich.table import Table

from benchmarks.manager_stalls import generate
from benchmarks.support.system import TOKEN, System, cpu_s
from rlboost.shared.ids import SampleId
from rlboost.shared.messages import GroupRequested, SampleFinished, Sampling, WeightsCommitted
from rlboost.shared.messages.codec import decode, encode
from rlboost.shared.streams import names
from rlboost.shared.wire import I32, floats, ints, pack

PROMPT_TOKENS = 256
FRAME_TOKENS = 64
"""Tokens of a sample in a frame: the fleet is not what limits."""
JOB_NO = 1
GROUPS_PER_REQUEST = 64
MSGPACK = "application/msgpack"


class Load(NamedTuple):
    groups: int
    size: int
    tokens: int

    @property
    def samples(self) -> int:
        return self.groups * self.size


class Collected(NamedTuple):
    path: str
    seconds: float
    manager_cpu_s: float
    client_cpu_s: float
    tokens: int

    def row(self, plain: Collected) -> dict[str, Any]:
        millions = self.tokens / 1e6
        return {
            "path": self.path,
            "tokens_per_s": round(self.tokens / self.seconds),
            "manager_cpu_s": round(self.manager_cpu_s / millions, 3),
            "client_cpu_s": round(self.client_cpu_s / millions, 3),
            "ratio": round(self.manager_cpu_s / millions / (plain.manager_cpu_s / plain.tokens * 1e6), 2),
        }


# --- the three paths: each requests a step's groups and returns how many tokens it has got ---------------------------


class OverRedis:
    def __init__(self, client: Any, job_id: str) -> None:
        self._client, self._job_id = client, job_id

    def attach(self) -> None:
        """Do nothing: the trainer service holds its job."""

    def close(self) -> None:
        self._client.close()

    def collect(self, step: int, load: Load, cursor: str) -> int:
        prompt, sampling = pack(range(PROMPT_TOKENS), I32), Sampling(max_tokens=load.tokens, whole_logprobs=True)
        pipe = self._client.pipeline()
        for number in range(load.groups):
            group = SampleId(JOB_NO, False, step, number, 0).pack()
            request = GroupRequested(
                job_id=self._job_id, group=group, n=load.size, prompt=prompt, sampling=sampling, version=0, seed=0
            )
            pipe.xadd(names.rollouts_requested(self._job_id), {"m": encode(request)})
        pipe.execute()
        found = tokens = 0
        while found < load.samples:
            for _, entries in self._client.xread({names.rollouts_finished(self._job_id): cursor}, 512, 250) or ():
                for entry, fields in entries:
                    cursor, message = entry, decode(fields[b"m"])
                    if isinstance(message, SampleFinished):
                        found, tokens = found + 1, tokens + len(ints(message.tokens))
                        floats(message.logprobs)
        return tokens


class OverHttp:
    def __init__(self, url: str, job_id: str, *, as_json: bool) -> None:
        authorization = {"Authorization": f"Bearer {TOKEN}"}
        self._http = httpx.Client(base_url=f"{url}/v1/jobs/{job_id}", headers=authorization, timeout=60)
        self._as_json = as_json

    def close(self) -> None:
        self._http.close()

    def attach(self) -> None:
        self._epoch = self._http.post("/trainer", json={"trainer": "benchmark", "replace": True}).json()["epoch"]

    def collect(self, step: int, load: Load, cursor: str) -> int:
        prompt: Any = list(range(PROMPT_TOKENS)) if self._as_json else pack(range(PROMPT_TOKENS), I32)
        groups = [
            {"step": step, "number": i, "prompt": prompt, "n": load.size, "sampling": {"max_tokens": load.tokens}}
            for i in range(load.groups)
        ]
        for at in range(0, len(groups), GROUPS_PER_REQUEST):
            body = {"epoch": self._epoch, "groups": groups[at : at + GROUPS_PER_REQUEST]}
            content = json.dumps(body).encode() if self._as_json else msgpack.packb(body)
            kind = "application/json" if self._as_json else MSGPACK
            self._http.post("/groups", content=content, headers={"Content-Type": kind}).raise_for_status()
        found = tokens = 0
        while found < load.samples:
            query = {"epoch": self._epoch, "after": cursor, "wait_s": 5, "limit": 512}
            answer = self._http.get("/finished", params=query, headers={} if self._as_json else {"Accept": MSGPACK})
            read = answer.raise_for_status().json() if self._as_json else msgpack.unpackb(answer.content)
            cursor = read["cursor"]
            for sample in read["samples"]:
                got = sample["tokens"] if self._as_json else ints(sample["tokens"])
                if not self._as_json:
                    floats(sample["logprobs"])
                found, tokens = found + 1, tokens + len(got)
        return tokens


# --- measuring --------------------------------------------------------------------------------------------------------


def measured(name: str, path: OverRedis | OverHttp, step: int, load: Load, manager: int, end: str) -> Collected:
    """Measure one step; `end` is the id of the last finished sample before it."""
    path.attach()
    before, own, began = cpu_s(manager), time.process_time(), time.monotonic()
    tokens = path.collect(step, load, end)
    seconds = time.monotonic() - began
    return Collected(name, seconds, cpu_s(manager) - before, time.process_time() - own, tokens)


def run(load: Load, rounds: int) -> list[dict[str, Any]]:
    """Measure all paths; return a row for each."""
    with tempfile.TemporaryDirectory() as folder, System(Path(folder)) as system:
        manager = system.start_manager()
        with httpx.Client(base_url=system.manager_url, headers={"Authorization": f"Bearer {TOKEN}"}) as http:
            job = http.post("/v1/jobs", json={"kind": "external", "name": "load", "model": "none"}).json()["id"]
        committed = WeightsCommitted(job_id=job, version=0, manifest_digest="", n_bytes=0, at=time.time())
        client: Any = redis.Redis.from_url(system.url)
        client.xadd(names.WEIGHTS_COMMITTED, {"m": encode(committed)})
        tokens, ended = multiprocessing.Value("i", FRAME_TOKENS), multiprocessing.Event()
        fleet = multiprocessing.Process(target=generate, args=(system.url, system.manager_url, tokens, ended))
        fleet.start()
        paths: dict[str, OverRedis | OverHttp] = {
            "redis": OverRedis(client, job),
            "msgpack": OverHttp(system.manager_url, job, as_json=False),
            "json": OverHttp(system.manager_url, job, as_json=True),
        }
        try:
            made: dict[str, list[Collected]] = {name: [] for name in paths}
            for step in range(rounds * len(paths)):
                name = list(paths)[step % len(paths)]
                last = client.xrevrange(names.rollouts_finished(job), count=1)
                end = last[0][0].decode() if last else "0-0"
                made[name].append(measured(name, paths[name], step, load, manager, end))
        finally:
            ended.set()
            fleet.join()
            for path in paths.values():
                path.close()
    best = {name: min(of, key=lambda one: one.manager_cpu_s) for name, of in made.items()}
    return [one.row(best["redis"]) for one in best.values()]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and print what was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("groups", 128), ("size", 8), ("tokens", 512), ("rounds", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args(arguments)
    rows = run(Load(given.groups, given.size, given.tokens), given.rounds)
    table = Table(*rows[0])
    for row in rows:
        print(json.dumps(row), flush=True)
        table.add_row(*map(str, row.values()))
    Console().print(table)


if __name__ == "__main__":
    main()
