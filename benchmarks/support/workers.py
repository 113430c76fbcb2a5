"""Workers without engines: they obey the manager and write token frames as fast as they are asked to.

What goes over the wire is what real workers send; only the tokens are noise. One process plays many workers, so that
the load costs less than what it loads.
"""

from __future__ import annotations

import os
import socket
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import msgpack
import numpy as np
import numpy.typing as npt
import redis

from rlboost.shared.messages import (
    FINISH_LENGTH,
    FINISH_RELEASED,
    Assign,
    Drain,
    Message,
    Release,
    Revoke,
    StoreCredential,
    UseVersion,
    WorkerHeartbeat,
    WorkerJoined,
    WorkerLeft,
)
from rlboost.shared.messages.codec import PROTOCOL, decode, encode
from rlboost.shared.streams import names
from rlboost.shared.streams.bus import after
from rlboost.shared.wire import F32, I32, U8, U32, U64, ints, length, pack

BEAT_S = 0.5
LEASE_MS = 5000
TOKENS_PER_S = 40.0
"""Of a sample, as beats tell it: as if the batch were never too large, so that the manager fills every slot."""
_NOISE_TOKENS = 1 << 16
_NOISE = np.random.default_rng(0)
_TOKENS = _NOISE.integers(0, 150_000, _NOISE_TOKENS).astype(I32).tobytes()
_LOGPROBS = (-_NOISE.random(_NOISE_TOKENS)).astype(F32).tobytes()


class Row(NamedTuple):
    sample: int
    attempt: int
    offset: int
    """Tokens so far."""
    end: int
    """Tokens when it is complete."""


class LoadWorker:
    """One worker's samples as columns, a row each.

    Between two frames in which a sample begins or ends, a frame differs from the last in its offsets alone; that makes
    the load cheaper than what it loads.
    """

    def __init__(self, worker: str, slots: int) -> None:
        self.id, self.slots = worker, slots
        self.job_id, self.version, self.seq = "", -1, 0
        self.waiting: deque[Row] = deque()
        self._released: list[Row] = []
        self.rows = np.zeros((0, 4), np.int64)
        """A `Row` each."""
        self._offsets = np.zeros(0, U32)
        self._same: dict[str, bytes] = {}
        self._n = 1
        """Tokens of a sample in a frame."""
        self._plain_frames = 0
        """How many more frames no sample ends in."""

    def joined(self) -> WorkerJoined:
        return WorkerJoined(
            worker=self.id,
            role="preemptible",
            kind="load",
            slots=self.slots,
            host="here",
            pid=os.getpid(),
            price_per_hour=0.0,
            at=time.time(),
            protocol=PROTOCOL,
        )

    def beat(self) -> WorkerHeartbeat:
        return WorkerHeartbeat(
            worker=self.id,
            state="ready" if self.version >= 0 else "pulling",
            job_id=self.job_id,
            version=self.version,
            running=len(self.rows),
            pending=len(self.waiting),
            tokens_per_s=TOKENS_PER_S * len(self.rows),
            at=time.time(),
        )

    def obey(self, command: Message) -> bool:
        """Carry out a command; return True if the state changed, which a beat must say."""
        match command:
            case UseVersion(job_id=job_id, version=version):
                self.job_id, self.version = job_id, version
                return True
            case Assign(samples=samples):
                for s in samples:
                    self.waiting.append(Row(s.sample, s.attempt, length(s.tokens), s.sampling.max_tokens))
            case Drain() | StoreCredential():
                pass
            case Revoke(samples=samples):
                self._drop(set(ints(samples, U64)))
            case Release(samples=samples):
                self._released += self._drop(set(ints(samples, U64)))
            case _:
                raise AssertionError(command)
        return False

    def _drop(self, gone: set[int]) -> list[Row]:
        """Hold these samples no longer; return the rows that they had."""
        self._settle()
        rows = [Row(*row) for row in self.rows.tolist()]
        dropped = [row for row in (*rows, *self.waiting) if row.sample in gone]
        self._enter(self.rows[[row.sample not in gone for row in rows]])
        self.waiting = deque(row for row in self.waiting if row.sample not in gone)
        return dropped

    def frame(self, n: int) -> tuple[bytes, int] | None:
        """Return the bytes of a frame with the next `n` tokens of every sample, and how many tokens; None if idle."""
        self._n = n
        if self._released:
            return self._release_frame()
        if self.waiting and len(self.rows) < self.slots:
            self._begin([self.waiting.popleft() for _ in range(min(len(self.waiting), self.slots - len(self.rows)))])
        if not len(self.rows):
            return None
        if self._plain_frames > 0:
            self._plain_frames -= 1
            body = self._body({**self._same, "offsets": self._offsets.tobytes()}, n * len(self.rows))
            self._offsets += n
            return body, n * len(self.rows)
        return self._last_frame(n)

    def _release_frame(self) -> tuple[bytes, int]:
        """Return a frame that hands samples back."""
        rows, self._released = self._released, []
        columns = {
            "samples": pack([row.sample for row in rows], U64),
            "attempts": pack([row.attempt for row in rows], U32),
            "offsets": pack([row.offset for row in rows], U32),
            "counts": bytes(len(rows) * U32.itemsize),
            "versions": pack([self.version] * len(rows), U32),
            "finish": pack([FINISH_RELEASED] * len(rows), U8),
        }
        return self._body(columns, 0), 0

    def _begin(self, new: list[Row]) -> None:
        self._settle()
        self._enter(np.concatenate((self.rows, np.array(new, np.int64))))

    def _last_frame(self, n: int) -> tuple[bytes, int]:
        """Return a frame in which some sample ends."""
        self._settle()
        left = self.rows[:, 3] - self.rows[:, 2]
        counts, done = np.minimum(left, n), left <= n
        total = int(counts.sum())
        columns = {"counts": pack(counts, U32), "finish": pack(done * FINISH_LENGTH, U8)}
        body = self._body({**self._same, "offsets": self._offsets.tobytes(), **columns}, total)
        self.rows[:, 2] += counts
        self._enter(self.rows[~done])
        return body, total

    def _settle(self) -> None:
        self.rows[:, 2] = self._offsets

    def _enter(self, rows: npt.NDArray[np.int64]) -> None:
        self.rows, size, n = rows, len(rows), self._n
        self._offsets = rows[:, 2].astype(U32)
        self._same = {
            "samples": pack(rows[:, 0], U64),
            "attempts": pack(rows[:, 1], U32),
            "counts": pack(np.full(size, n), U32),
            "versions": pack(np.full(size, self.version), U32),
            "finish": bytes(size),
        }
        self._plain_frames = int(((rows[:, 3] - rows[:, 2] - 1) // n).min()) if size else 0

    def _body(self, columns: dict[str, bytes], total: int) -> bytes:
        at = (self.seq * 64) % (_NOISE_TOKENS - total) * I32.itemsize
        frame = {
            "t": "TokenFrame",
            "worker": self.id,
            "seq": self.seq,
            **columns,
            "tokens": _TOKENS[at : at + total * I32.itemsize],
            "logprobs": _LOGPROBS[at : at + total * F32.itemsize],
        }
        self.seq += 1
        body: bytes = msgpack.packb(frame)
        return body


class Frame(NamedTuple):
    stream: str
    body: bytes
    tokens: int


@dataclass
class Sent:
    """Frames on their way to the manager."""

    streams: set[str]
    position: tuple[int, int] | None
    """Of the last in the token log; None until all were relayed."""


Join = Callable[[str], str]


class Fleet:
    """Many load workers on one connection."""

    def __init__(self, url: str, workers: int, slots: int, prefix: str = "load", join: Join | None = None) -> None:
        """Let workers join.

        Args:
            url: of Redis.
            workers: how many.
            slots: of each.
            prefix: of their ids.
            join: makes an identity, returns its id: the worker then writes to its own stream. When None, all write
                where the manager would relay that to.

        """
        self._client = redis.Redis.from_url(url)
        self._writer = FrameWriter(url)
        self._join = join
        self._serial, self._prefix, self._slots = 0, prefix, slots
        self.workers: dict[str, LoadWorker] = {}
        self._cursors: dict[str, str] = {}
        self._beat_at = 0.0
        for _ in range(workers):
            self.join()

    def join(self) -> None:
        """Let one more worker come."""
        name = f"{self._prefix}-{os.getpid()}-{self._serial}"
        worker = LoadWorker(self._join(name) if self._join else name, self._slots)
        self._serial += 1
        self.workers[worker.id] = worker
        self._cursors[names.worker_commands(worker.id)] = "0-0"
        self._append(self._heartbeats(worker), worker.joined())
        self._beat([worker])

    def leave(self, worker: LoadWorker, *, silently: bool) -> None:
        """Let one go: saying so, or killed."""
        del self.workers[worker.id], self._cursors[names.worker_commands(worker.id)]
        self._client.delete(names.worker_lease(worker.id))
        if not silently:
            left = WorkerLeft(worker=worker.id, reason="load", at=time.time())
            self._append(self._heartbeats(worker), left)

    def _heartbeats(self, worker: LoadWorker) -> str:
        return names.worker_reports(worker.id) if self._join else names.WORKER_HEARTBEATS

    def step(self, n: int) -> list[Frame]:
        """Beat and obey when it is time; return a frame of each worker."""
        now = time.monotonic()
        if now - self._beat_at > BEAT_S:
            self._beat_at = now
            self._beat(list(self.workers.values()))
        self._obey()
        frames = [(worker.id, frame) for worker in self.workers.values() if (frame := worker.frame(n))]
        return [
            Frame(names.worker_reports(worker) if self._join else names.TOKEN_LOG, body, tokens)
            for worker, (body, tokens) in frames
        ]

    def send(self, frames: list[Frame]) -> Sent:
        """Write frames."""
        last = self._writer.write([(frame.stream, frame.body) for frame in frames])
        return Sent({frame.stream for frame in frames}, None if self._join else entry_position(last))

    def is_taken(self, sent: Sent) -> bool:
        """Return True if the manager's stored state covers these frames."""
        if sent.position is None:
            if any(self._client.xlen(stream) for stream in sent.streams):
                return False
            sent.position = entry_position(self._client.xinfo_stream(names.TOKEN_LOG)["last-generated-id"])
        return sent.position <= entry_position(self._client.hget(names.MANAGER_CURSORS, names.TOKEN_LOG) or b"0-0")

    def close(self) -> None:
        self._client.close()
        self._writer.close()

    def _obey(self) -> None:
        read: Any = self._client.xread(dict[Any, Any](self._cursors), count=4096)
        for stream, entries in read or ():
            name = stream.decode()
            worker = next(w for w in self.workers.values() if names.worker_commands(w.id) == name)
            self._cursors[name] = entries[-1][0].decode()
            changed = [worker.obey(decode(fields[b"m"])) for _, fields in entries]
            if any(changed):
                self._beat([worker])

    def _beat(self, workers: list[LoadWorker]) -> None:
        pipe = self._client.pipeline(transaction=False)
        for worker in workers:
            pipe.set(names.worker_lease(worker.id), "1", px=LEASE_MS)
            pipe.xadd(self._heartbeats(worker), {"m": encode(worker.beat())})
            commands = names.worker_commands(worker.id)
            pipe.xtrim(commands, minid=after(self._cursors[commands]), approximate=False)
        pipe.execute()

    def _append(self, stream: str, message: Message) -> None:
        self._client.xadd(stream, {"m": encode(message)})


class FrameWriter:
    """XADDs, many in flight at once, without a client library's cost per command."""

    def __init__(self, url: str) -> None:
        where = urlsplit(url)
        assert where.hostname
        self._socket = socket.create_connection((where.hostname, where.port or 6379))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def write(self, messages: list[tuple[str, bytes]]) -> bytes:
        """Append messages to streams; return the last one's entry id when Redis has all of them."""
        self._socket.sendall(b"".join([_xadd(stream.encode(), body) for stream, body in messages]))
        answer = b""
        while answer.count(b"\r\n") < 2 * len(messages):
            answer += self._socket.recv(1 << 16)
        if b"-ERR" in answer or b"-OOM" in answer:
            raise RuntimeError(answer.decode())
        return answer.split(b"\r\n")[-2]

    def close(self) -> None:
        self._socket.close()


def _xadd(stream: bytes, body: bytes) -> bytes:
    head = b"*5\r\n$4\r\nXADD\r\n$%d\r\n%b\r\n$1\r\n*\r\n$1\r\nm\r\n" % (len(stream), stream)
    return b"%b$%d\r\n%b\r\n" % (head, len(body), body)


def entry_position(entry_id: Any) -> tuple[int, int]:
    ms, _, seq = entry_id.partition(b"-")
    return int(ms), int(seq)
