"""A worker without an engine, for driving a manager: its tokens are a hash of who made them and what came before.

So a completion can be checked token by token: each must have been made by the worker that its span names, as the
continuation of exactly the tokens before it. A splice of two continuations shows.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

from rlboost.shared.bus import START, Append, Bus
from rlboost.shared.columns import F32, I32, U8, U32, U64, ints, pack
from rlboost.shared.command_digest import command_digest
from rlboost.shared.errors import BusUnavailable
from rlboost.shared.messages import (
    FINISH_LENGTH,
    FINISH_NONE,
    FINISH_RELEASED,
    Assign,
    Assignment,
    Dismissed,
    Drain,
    Message,
    Release,
    Resume,
    Revoke,
    Role,
    SampleFailed,
    StoreCredential,
    Suspend,
    TokenFrame,
    UseVersion,
    WorkerHeartbeat,
    WorkerJoined,
    WorkerLeft,
)
from rlboost.shared.messages.workers import WorkerState
from rlboost.shared.names import (
    TOKEN_LOG,
    WORKER_HEARTBEATS,
    worker_commands,
    worker_lease,
    worker_reports,
)
from rlboost.shared.protocol import PROTOCOL

RESIDENT_BYTES = 123_000_000
"""What each one says of its memory."""


def next_token(worker: str, version: int, tokens: list[int]) -> int:
    text = f"{worker}/{version}/{tokens}".encode()
    return int.from_bytes(hashlib.blake2s(text, digest_size=3).digest(), "little")


def check_completion(tokens: list[int], spans: list[tuple[str, int, int]]) -> None:
    """Assert that the spans add up and that each token continues what stands before it."""
    assert sum(n for _, _, n in spans) == len(tokens)
    at = 0
    for worker, version, n in spans:
        for i in range(at, at + n):
            assert tokens[i] == next_token(worker, version, tokens[:i]), f"token {i} does not continue its prefix"
        at += n


@dataclass
class Held:
    attempt: int
    tokens: list[int]
    max_tokens: int
    flushed: int
    done: bool = False
    released: bool = False

    @property
    def finish(self) -> int:
        if self.done:
            return FINISH_LENGTH
        return FINISH_RELEASED if self.released else FINISH_NONE


@dataclass
class SimWorker:
    """One incarnation. Every method is one thing that a real worker does."""

    bus: Bus
    id: str
    role: Role = "preemptible"
    slots: int = 4
    lease_s: float = 2.0
    kv_tokens: int = 0
    kv_block_tokens: int = 0
    max_request_tokens: int = 0
    returns_routed_experts: bool = True
    tokens_per_s: float = 0.0
    cursor: str = START
    state: WorkerState = "joining"
    job_id: str = ""
    version: int = -1
    assigned: tuple[str, int] | None = None
    held: dict[int, Held] = field(default_factory=dict)
    seq: int = 0
    unsent: TokenFrame | None = None
    """The frame that the bus has not accepted: without it, all later tokens of its samples would leave a gap."""
    dismissed: bool = False
    protocol: int = PROTOCOL
    own_stream: bool = False
    """It reports in its own stream, as a real worker; else it writes where the manager would relay that to."""

    async def report(self, message: Message, copies: int = 1) -> None:
        """Send a message, more than once when the reply to the first was lost."""
        stream = TOKEN_LOG if isinstance(message, TokenFrame | SampleFailed) else WORKER_HEARTBEATS
        if self.own_stream:
            stream = worker_reports(self.id)
        await self.bus.transact([Append(stream, message)] * copies)

    async def join(self) -> None:
        joined = WorkerJoined(
            worker=self.id,
            role=self.role,
            kind="sim",
            slots=self.slots,
            host="here",
            pid=1,
            price_per_hour=0.0,
            at=0.0,
            protocol=self.protocol,
        )
        await self.report(joined)
        await self.beat()

    async def beat(self) -> None:
        await self.bus.renew(worker_lease(self.id), "1", self.lease_s)
        running = min(len(self.held), self.slots)
        beat = WorkerHeartbeat(
            worker=self.id,
            state=self.state,
            job_id=self.job_id,
            version=self.version,
            running=running,
            pending=0,
            tokens_per_s=self.tokens_per_s,
            at=0.0,
            resident_bytes=RESIDENT_BYTES,
            kv_tokens=self.kv_tokens,
            kv_block_tokens=self.kv_block_tokens,
            max_request_tokens=self.max_request_tokens,
            returns_routed_experts=self.returns_routed_experts,
            command_digest=self.command_digest(),
            last_command=self.cursor,
            batch=running if self.tokens_per_s else 0.0,
            step_s=running / self.tokens_per_s if self.tokens_per_s else 0.0,
        )
        await self.report(beat)

    def command_digest(self) -> int:
        held = {i: held.attempt for i, held in self.held.items() if not held.released}
        suspended = self.state == "suspended"
        return command_digest(list(held), list(held.values()), self.assigned, suspended=suspended)

    async def obey(self) -> None:
        """Carry out the commands that are there."""
        for entry in await self.bus.read({worker_commands(self.id): self.cursor}):
            read, before = self.cursor, self.state
            self.cursor = entry.id
            try:
                await self._obey(entry.message)
            except BusUnavailable:
                self.cursor = read
                raise
            if before != self.state:
                await self.beat()

    async def _obey(self, command: Message) -> None:  # noqa: C901, PLR0912 - one flat table
        match command:
            case UseVersion(job_id=job_id, version=version):
                if job_id != self.job_id:
                    for held in self.held.values():
                        held.released = True
                await self.flush()
                self.job_id, self.version = self.assigned = job_id, version
                self.state = "ready" if self.state == "joining" else self.state
                await self.beat()
            case Assign(samples=samples, version=version):
                if self.state == "ready":
                    assert version == self.version, "assigned for a version that it does not serve"
                    for assignment in samples:
                        self._hold(assignment)
            case Revoke(samples=samples, attempts=attempts):
                for sample, attempt in zip(ints(samples, U64), ints(attempts, U32), strict=True):
                    if sample in self.held and self.held[sample].attempt <= attempt:
                        del self.held[sample]
            case Release(samples=samples, attempts=attempts):
                for sample, attempt in zip(ints(samples, U64), ints(attempts, U32), strict=True):
                    if sample in self.held and self.held[sample].attempt == attempt:
                        self.held[sample].released = True
            case Suspend():
                await self.flush()
                self.held.clear()
                self.state = "suspended"
            case Resume():
                self.state = "ready" if self.version >= 0 else "joining"
            case Drain():
                await self.leave()
            case StoreCredential():
                pass  # it downloads nothing
            case Dismissed():
                self.held.clear()
                self.dismissed = True
            case _:
                raise AssertionError(command)

    def _hold(self, assignment: Assignment) -> None:
        known = self.held.get(assignment.sample)
        if known is None or known.attempt < assignment.attempt:
            tokens = ints(assignment.tokens, I32)
            maximum = assignment.sampling.max_tokens
            self.held[assignment.sample] = Held(assignment.attempt, tokens, maximum, len(tokens))

    def generate(self, n: int = 1) -> None:
        """Make up to `n` tokens for each sample that it runs."""
        for held in [held for held in self.held.values() if not held.released][: self.slots]:
            for _ in range(n):
                if len(held.tokens) < held.max_tokens:
                    held.tokens.append(next_token(self.id, self.version, held.tokens))
            held.done = len(held.tokens) >= held.max_tokens

    def running(self) -> list[int]:
        """Return the samples that have a slot."""
        return list(self.held)[: self.slots]

    def frame(self) -> TokenFrame | None:
        """Return what was made since the last frame."""
        rows = [(i, h) for i, h in self.held.items() if len(h.tokens) > h.flushed or h.done or h.released]
        if not rows:
            return None
        made = [h.tokens[h.flushed :] for _, h in rows]
        frame = TokenFrame(
            worker=self.id,
            seq=self.seq,
            samples=pack([i for i, _ in rows], U64),
            attempts=pack([h.attempt for _, h in rows], U32),
            offsets=pack([h.flushed for _, h in rows], U32),
            counts=pack([len(tokens) for tokens in made], U32),
            versions=pack([self.version] * len(rows), U32),
            finish=pack([h.finish for _, h in rows], U8),
            tokens=pack([token for tokens in made for token in tokens], I32),
            logprobs=pack([-1.0 for tokens in made for _ in tokens], F32),
        )
        self.seq += 1
        for sample, held in rows:
            held.flushed = len(held.tokens)
            if held.done or held.released:
                del self.held[sample]
        return frame

    async def flush(self, copies: int = 1) -> None:
        """Send the frame, more than once when the reply of the first was lost; first the one that was not accepted."""
        while frame := self.unsent or self.frame():
            self.unsent = frame
            await self.report(frame, copies)
            self.unsent = None

    async def leave(self) -> None:
        """Flush and go."""
        await self.flush()
        await self.report(WorkerLeft(worker=self.id, reason="drained", at=0.0))
        self.held.clear()
        self.dismissed = True

    async def die(self) -> None:
        """The engine dies: what it made is in the log, and the last word names what it ran."""
        await self.flush()
        running_at_failure = pack(self.running(), U64)
        left = WorkerLeft(worker=self.id, reason="failed: it died", at=0.0, running_at_failure=running_at_failure)
        await self.report(left)
        self.held.clear()
        self.dismissed = True

    async def refuse(self, sample: int) -> None:
        """The engine cannot make this sample."""
        held = self.held.pop(sample)
        failed = SampleFailed(worker=self.id, sample=sample, attempt=held.attempt, reason="the engine refuses it")
        await self.report(failed)
