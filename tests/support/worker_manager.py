"""What a rollout worker sees of a manager, played by a test: the join route, commands, and the log read back."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TypeVar

import redis

from rlboost.services.rollout_worker.ports import Membership
from rlboost.shared.http.access import issue_store_credential, peer_key
from rlboost.shared.ids import new_token
from rlboost.shared.messages import (
    Assign,
    Assignment,
    DeadLetter,
    Event,
    Message,
    Release,
    Revoke,
    SampleFailed,
    Sampling,
    TokenFrame,
    UseVersion,
    WorkerEvent,
    WorkerHeartbeat,
    WorkerJoined,
)
from rlboost.shared.messages.codec import PROTOCOL
from rlboost.shared.messages.token_rows import token_rows
from rlboost.shared.streams.bus import START, Bus, Entry, HashSet, position
from rlboost.shared.streams.names import (
    DEAD_LETTERS,
    TOKEN_LOG,
    WEIGHT_PEERS,
    WORKER_HEARTBEATS,
    WORKER_IDENTITIES,
    job_events,
    worker_commands,
    worker_reports,
)
from rlboost.shared.weights.access import ManifestKey
from rlboost.shared.wire import I32, U32, U64, floats, ints, pack
from tests.support.eventually import LIMIT_S, eventually

JOB = "job"
Key = tuple[int, int]
"""(sample, attempt)."""
M = TypeVar("M", bound=Message)
T = TypeVar("T")


class JoinServer:
    """Answers `POST /v1/join` to clients with the token, and lists the workers that joined as a manager does."""

    def __init__(self, token: str, redis_url: str, weight_store_url: str, **more: object) -> None:
        joined = {
            "redis_url": redis_url,
            "weight_store_url": weight_store_url,
            "store_credential": issue_store_credential(token, "w", time.time()),
            "manifest_key": ManifestKey(token).public,
            "peer_key": peer_key(token),
            "protocol": PROTOCOL,
        }

        def join(name: str) -> bytes:
            worker = f"{name}-{new_token()}"
            if not more:
                with redis.Redis.from_url(redis_url) as client:
                    client.hset(WORKER_IDENTITIES, worker, "{}")
                    client.hset(WEIGHT_PEERS, worker, "")
            return json.dumps({**joined, "worker": worker, **more}).encode()

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                known = self.path == "/v1/join" and self.headers["Authorization"] == f"Bearer {token}"
                request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                answer = join(request["name"]) if known else b"{}"
                self.send_response(200 if known else 401)
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@dataclass
class Generated:
    """What the log holds of one attempt of one sample."""

    first_offset: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    finish: int = 0

    @property
    def end(self) -> int:
        return self.first_offset + len(self.tokens)


def fold(log: Sequence[Entry]) -> dict[Key, Generated]:
    """Put the frames together; an overlap must repeat what is there, and a gap fails the test."""
    made: dict[Key, Generated] = {}
    for frame in (entry.message for entry in log):
        if not isinstance(frame, TokenFrame):
            continue
        tokens, logprobs, start = ints(frame.tokens), floats(frame.logprobs), 0
        for sample, attempt, offset, count, version, finish in token_rows(frame):
            row = made.setdefault((sample, attempt), Generated(offset))
            assert offset <= row.end, f"sample {sample}: a gap between {row.end} and {offset}"
            known = min(row.end - offset, count)
            new, at = tokens[start : start + count], offset - row.first_offset
            assert row.tokens[at : at + known] == new[:known], f"sample {sample}: a repeat differs"
            row.tokens += new[known:]
            row.logprobs += logprobs[start + known : start + count]
            row.versions += [version] * (count - known)
            row.finish = finish or row.finish
            start += count
    return made


def at_once(coroutine: Coroutine[object, object, T]) -> T:
    """Return the result of a coroutine that only lets others run, as those of the in-memory bus."""
    try:
        while coroutine.send(None) is None:
            pass
    except StopIteration as done:
        result: T = done.value
        return result
    raise AssertionError("the coroutine waits for something")


def _relayed(message: Message, stream: str) -> Message | None:
    """Return the message if it belongs in this stream, None if it does not."""
    match message:
        case TokenFrame() | SampleFailed():
            to = TOKEN_LOG
        case WorkerEvent(worker=worker, job_id=job_id, kind=kind, at=at, fields=fields):
            message, to = Event(kind=kind, at=at, source=worker, fields=fields), job_events(job_id)
        case DeadLetter():
            to = DEAD_LETTERS
        case _:
            to = WORKER_HEARTBEATS
    return message if to == stream else None


class WorkerManager:
    """Sends what the test says, and reads what workers say."""

    def __init__(self, bus: Bus) -> None:
        self.bus = bus

    async def accept(self, name: str = "w") -> Membership:
        """Answer a worker that joins."""
        worker = f"{name}-{new_token()}"
        await self.bus.transact([HashSet(WORKER_IDENTITIES, {worker: "{}"})])
        return Membership(worker, self.bus, weight_store_url="", store_credential="", manifest_key="", peer_key="")

    async def send(self, worker: str, *messages: Message) -> None:
        for message in messages:
            await self.bus.append(worker_commands(worker), message)

    async def log(self) -> list[Entry]:
        return await self.entries(TOKEN_LOG)

    async def generated(self) -> dict[Key, Generated]:
        return fold(await self.log())

    async def received(self, kind: type[M], worker: str = "") -> list[M]:
        messages = [entry.message for entry in await self.entries(WORKER_HEARTBEATS)]
        return [m for m in messages if isinstance(m, kind) and worker in {"", getattr(m, "worker", "")}]

    async def entries(self, stream: str) -> list[Entry]:
        """Return what a manager would have relayed to a stream from the workers' own, in order of writing."""
        workers = await self.bus.hash_all(WORKER_IDENTITIES)
        reports = [entry for worker in workers for entry in await self._all(worker_reports(worker))]
        reports.sort(key=lambda entry: position(entry.id))
        return [Entry(stream, entry.id, message) for entry in reports if (message := _relayed(entry.message, stream))]

    async def _all(self, stream: str) -> list[Entry]:
        found: list[Entry] = []
        while batch := await self.bus.read({stream: found[-1].id if found else START}, count=2048):
            found += batch
        return found

    async def joined(self, nth: int = 1, within_s: float = LIMIT_S) -> str:
        """Wait for the nth incarnation that joins; return its id."""

        async def ids() -> list[str]:
            found = list(dict.fromkeys(m.worker for m in await self.received(WorkerJoined)))
            return found if len(found) >= nth else []

        return (await eventually(ids, within_s=within_s))[nth - 1]

    async def last_heartbeat(self, worker: str) -> WorkerHeartbeat:
        heartbeats = await self.received(WorkerHeartbeat, worker)
        assert heartbeats, f"no heartbeat of {worker}"
        return heartbeats[-1]

    async def until(
        self, worker: str, state: str, version: int | None = None, within_s: float = LIMIT_S
    ) -> WorkerHeartbeat:
        """Wait until the newest heartbeat is of this state and version."""

        async def heartbeat() -> WorkerHeartbeat:
            last = await self.last_heartbeat(worker)
            assert last.state == state, f"{worker} is {last.state}"
            assert version is None or last.version == version, f"{worker} serves {last.version}"
            return last

        return await eventually(heartbeat, within_s=within_s)

    async def ready_worker(self, version: int = 0, nth: int = 1) -> str:
        """Wait for the nth incarnation and make it serve this version."""
        worker = await self.joined(nth)
        await self.send(worker, UseVersion(job_id=JOB, version=version))
        await self.until(worker, "ready", version)
        return worker

    async def until_generated(self, *keys: Key, tokens: int, within_s: float = LIMIT_S) -> dict[Key, Generated]:
        """Wait until the log has at least `tokens` tokens of each of these requests."""

        async def generated() -> dict[Key, Generated]:
            rows = await self.generated()
            for key in keys:
                assert key in rows, f"nothing of {key}"
                assert len(rows[key].tokens) >= tokens, f"{len(rows[key].tokens)} tokens of {key}"
            return rows

        return await eventually(generated, within_s=within_s)

    async def until_finished(self, *keys: Key, within_s: float = LIMIT_S) -> dict[Key, Generated]:
        """Wait until the log has the end of each of these requests."""

        async def generated() -> dict[Key, Generated]:
            rows = await self.generated()
            for key in keys:
                assert key in rows, f"nothing of {key}"
                assert rows[key].finish, f"{key} has not finished after {rows[key].end} tokens"
            return rows

        return await eventually(generated, within_s=within_s)


def assign(
    *samples: int,
    attempt: int = 1,
    version: int = 0,
    max_tokens: int = 16,
    tokens: Sequence[int] = (),
    prompt: Sequence[int] = (1, 2, 3),
) -> Assign:
    """Return a command to generate these samples, each with its own number as its seed."""
    return Assign(
        job_id=JOB,
        version=version,
        samples=[
            Assignment(
                sample=sample,
                attempt=attempt,
                prompt=pack(list(prompt), I32),
                tokens=pack(list(tokens), I32),
                sampling=Sampling(max_tokens=max_tokens),
                seed=sample,
            )
            for sample in samples
        ],
    )


def revoke(*keys: Key) -> Revoke:
    """Return a command to stop these."""
    return Revoke(samples=pack([sample for sample, _ in keys], U64), attempts=pack([a for _, a in keys], U32))


def release(*keys: Key) -> Release:
    """Return a command to give these back."""
    return Release(samples=pack([sample for sample, _ in keys], U64), attempts=pack([a for _, a in keys], U32))
