"""Everything that a worker writes to Redis, under the incarnation that it is now.

Two kinds of writes never overlap with their own: flushes, so that frames are in order; and what goes to
`workers.beats`, so that no beat follows the `WorkerLeft` of its incarnation.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import structlog

from services.rollout_worker.domain.canary import Verdict
from services.rollout_worker.domain.frames import Outbox
from services.rollout_worker.domain.session import Session, Weights
from services.rollout_worker.domain.throughput import Throughput
from services.rollout_worker.generator import Generator
from services.rollout_worker.ports import Emission, Memory
from shared import names
from shared.bus import START, Append, Bus, Entry, Trim, after
from shared.codec import encode
from shared.columns import I32, U64, length, pack
from shared.errors import BusUnavailable
from shared.ids import new_token
from shared.messages import (
    FINISH_RELEASED,
    Assignment,
    DeadLetter,
    Event,
    Role,
    WorkerBeat,
    WorkerJoined,
    WorkerLeft,
    WorkerNotice,
    WorkerState,
)
from shared.waiting import Waits

log = structlog.get_logger(__name__)

REDIS_LIMIT_S = 600.0
"""A worker gives up when Redis does not answer for so long."""
RETRY_S = 0.25
STARTING_LEASE_S = 20.0
"""Lease while there is no engine: importing a large library may stop the whole process for seconds, and a worker that
holds no samples may be missed late."""
_BEATS_KEPT = 100_000
_EVENTS_KEPT = 20_000
_DEAD_LETTERS_KEPT = 10_000


@dataclass(frozen=True, slots=True)
class Identity:
    """What a worker says of itself when it joins."""

    name: str
    role: Role
    kind: str
    slots: int
    price_per_hour: float
    host: str
    pid: int
    trainer: str = ""
    """Name of the trainer whose device it shares."""


@dataclass(slots=True)
class Incarnation:
    """One life in the manager's eyes."""

    session: Session
    outbox: Outbox
    cursor: str = START
    """How far its commands were read."""
    announced: bool = False

    @property
    def worker(self) -> str:
        """Return the incarnation's id."""
        return self.session.worker


@dataclass(slots=True)
class FlushTimes:
    """How long flushes took, from the engine to Redis's answer."""

    count: int = 0
    sum_s: float = 0.0


class Link:
    """The worker's tie to the token log and to the manager.

    Every method raises `BusUnavailable` when Redis does not answer and may then be called again, unless it insists.
    """

    def __init__(
        self,
        bus: Bus,
        generator: Generator,
        identity: Identity,
        lease_s: float,
        waits: Waits,
        memory: Callable[[], Memory] = Memory,
    ) -> None:
        self._bus = bus
        self._memory = memory
        self._generator = generator
        self._identity = identity
        self._lease_s = lease_s
        self._waits = waits
        self._throughput = Throughput()
        self._flushing = asyncio.Lock()
        self._beating = asyncio.Lock()
        self._gone = False
        self.flushes = FlushTimes()
        self.tokens_per_s = 0.0
        self.memory = Memory()
        self.me = self._incarnate(None)
        self._said: tuple[WorkerState, Weights | None] | None = None

    def _incarnate(self, serving: Weights | None) -> Incarnation:
        worker = f"{self._identity.name}-{new_token()}"
        return Incarnation(Session(worker, serving), Outbox(worker))

    async def insist(self, what: str, call: Callable[[], Awaitable[object]]) -> None:
        """Repeat an idempotent call for as long as Redis is away."""
        async with self._waits.on("Redis", because=what, limit_s=REDIS_LIMIT_S):
            while True:
                try:
                    await call()
                except BusUnavailable as error:
                    log.warning("redis_away", error=str(error), during=what)
                    await asyncio.sleep(RETRY_S)
                else:
                    return

    # --- the token log ------------------------------------------------------------------------------------------------

    async def flush(self) -> None:
        """Send everything that the engine has made and that the log does not have."""
        async with self._flushing:
            began, me = time.monotonic(), self.me
            made = self._generator.drain()
            if made:
                me.session.made(made)
                me.outbox.add(made)
            while batch := me.outbox.batch():
                await self._bus.transact([Append(names.TOKEN_LOG, message) for message in batch])
                me.outbox.sent(len(batch))
            if made:
                self.flushes.count += 1
                self.flushes.sum_s += time.monotonic() - began

    def give_back(self, samples: Sequence[Assignment]) -> None:
        """Have the next flush say of samples that the engine never had that they go on elsewhere."""
        self.me.outbox.add([_untouched(sample) for sample in samples])

    # --- beats --------------------------------------------------------------------------------------------------------

    async def beat(self) -> None:
        """Say that the worker is there, first of all who it is, and with what load."""
        async with self._beating:
            if self._gone:
                return
            me, stats, now = self.me, self._generator.stats(), time.time()
            self.tokens_per_s = self._throughput.update(stats.tokens_made_total, time.monotonic())
            self.memory = self._memory()
            job_id, version = me.session.serving or ("", -1)
            beat = WorkerBeat(
                worker=me.worker,
                state=me.session.state,
                job_id=job_id,
                version=version,
                # The engine takes out what was aborted at its next step: until then it is not ours any more.
                running=min(stats.running, len(me.session.held)),
                pending=stats.pending + me.session.early,
                tokens_per_s=self.tokens_per_s,
                at=now,
                resident_bytes=self.memory.resident_bytes,
                device_used_bytes=self.memory.device_used_bytes,
                device_total_bytes=self.memory.device_total_bytes,
                **self._generator.kv,
            )
            lease_s = self._lease_s if self._generator.exists else max(self._lease_s, STARTING_LEASE_S)
            await self._bus.renew(names.worker_lease(me.worker), me.session.state, lease_s)
            joined = [] if me.announced else [Append(names.WORKER_BEATS, self._joined(me.worker, now), _BEATS_KEPT)]
            # Nobody else reads its commands: those that it has read may go.
            read = Trim(names.worker_commands(me.worker), after(me.cursor))
            await self._bus.transact([*joined, Append(names.WORKER_BEATS, beat, _BEATS_KEPT), read])
            if not me.announced:
                log.info("joined", worker=me.worker, role=self._identity.role, slots=self._identity.slots)
                me.announced = True
            self._said = (beat.state, me.session.serving)

    @property
    def has_news(self) -> bool:
        """Tell whether the last beat said something else than the next one will."""
        return self._said != (self.me.session.state, self.me.session.serving)

    def _joined(self, worker: str, now: float) -> WorkerJoined:
        who = self._identity
        return WorkerJoined(
            worker=worker,
            role=who.role,
            kind=who.kind,
            slots=who.slots,
            host=who.host,
            pid=who.pid,
            price_per_hour=who.price_per_hour,
            at=now,
            trainer=who.trainer,
            kv_tokens=0,  # there is no engine yet that could tell: beats do
        )

    async def give_notice(self, reason: str, lead_s: float) -> None:
        """Say that this machine will be gone in `lead_s` seconds."""
        notice = WorkerNotice(worker=self.me.worker, lead_s=lead_s, reason=reason, at=time.time())
        await self._bus.append(names.WORKER_BEATS, notice, _BEATS_KEPT)

    async def leave(self, reason: str, *, engine_failed: bool = False) -> None:
        """Say the last word: nothing of this worker follows it.

        Args:
            reason: for people.
            engine_failed: whether what the engine ran may have been the cause.

        """
        # Those that wait in the engine, for a slot or for room in its cache, have done nothing.
        ran = self._generator.running().intersection(self.me.session.held.items()) if engine_failed else ()
        async with self._beating:
            self._gone = True
            await self._say_left(reason, sorted(sample for sample, _ in ran))

    async def rejoin(self, reason: str) -> None:
        """End this incarnation, whose samples the engine has forgotten, and become another. Insists."""
        log.warning("joining_anew", worker=self.me.worker, reason=reason)
        await self.insist("flush before joining anew", self.flush)
        async with self._flushing, self._beating:
            await self.insist("leave before joining anew", lambda: self._say_left(reason))
            self.me = self._incarnate(self.me.session.serving)
            self._said = None

    async def _say_left(self, reason: str, died_with: Sequence[int] = ()) -> None:
        left = WorkerLeft(worker=self.me.worker, reason=reason, at=time.time(), died_with=pack(died_with, U64))
        await self._bus.append(names.WORKER_BEATS, left, _BEATS_KEPT)
        log.info("left", worker=self.me.worker, reason=reason)

    # --- complaints ---------------------------------------------------------------------------------------------------

    async def bury(self, entry: Entry, reason: str) -> None:
        """Put a command that makes no sense among the dead letters."""
        log.error("protocol_error", reason=reason, entry=entry.id)
        letter = DeadLetter(
            stream=entry.stream,
            entry_id=entry.id,
            consumer=self.me.worker,
            reason=reason,
            body=encode(entry.message),
            at=time.time(),
        )
        await self._bus.append(names.DEAD_LETTERS, letter, _DEAD_LETTERS_KEPT)

    async def report_unavailable(self, weights: Weights, reason: str) -> None:
        """Tell people that weights which the manager wants served cannot be had."""
        log.warning("weights_unavailable", job=weights[0], version=weights[1], reason=reason)
        await self._tell(weights[0], "weights_unavailable", version=weights[1], reason=reason)

    async def report_canary(self, version: int, verdict: Verdict) -> None:
        """Tell people that the engine disagrees with the trainer about the weights of its job."""
        if self.me.session.wanted is not None:
            fields = {"mean": verdict.mean, "worst": verdict.worst, "tolerated_mean": verdict.mean_tolerance}
            await self._tell(self.me.session.wanted[0], "canary_failed", version=version, **fields)

    async def report_advice(self, reason: str) -> None:
        """Tell people, if there is a job, that this machine is likelier than others to be taken away soon."""
        log.warning("likely_to_be_taken", reason=reason)
        if self.me.session.wanted is not None:
            await self._tell(self.me.session.wanted[0], "worker_likely_to_be_taken", reason=reason)

    async def _tell(self, job_id: str, kind: str, **fields: str | float) -> None:
        event = Event(kind=kind, at=time.time(), source=self.me.worker, fields=fields)
        await self._bus.append(names.job_events(job_id), event, _EVENTS_KEPT)


def _untouched(sample: Assignment) -> Emission:
    return Emission(sample.sample, sample.attempt, length(sample.tokens, I32), [], [], 0, FINISH_RELEASED)
