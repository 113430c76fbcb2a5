"""The worker's connection to the manager: everything that it writes to Redis, as its current incarnation.

Everything goes to the incarnation's own stream, from which the manager relays it. Flushes never overlap, so frames
arrive in order. Heartbeats never overlap, so none follows the `WorkerLeft` of its incarnation.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import structlog

from rlboost.services.rollout_worker.domain.frames import UnsentQueue
from rlboost.services.rollout_worker.domain.load import LoadMeters, Memory, build_heartbeat
from rlboost.services.rollout_worker.domain.parity_check import ParityCheckFailed
from rlboost.services.rollout_worker.domain.requests import Emission
from rlboost.services.rollout_worker.domain.session import Session
from rlboost.services.rollout_worker.generator import Generator
from rlboost.services.rollout_worker.ports import Join, Membership
from rlboost.shared.errors import BusUnavailable, CredentialRejected
from rlboost.shared.ids import WeightsRef
from rlboost.shared.messages import (
    FINISH_RELEASED,
    Assignment,
    Message,
    PreemptionNotice,
    Role,
    WorkerEvent,
    WorkerJoined,
    WorkerLeft,
    WorkerLog,
    WorkerState,
)
from rlboost.shared.messages.codec import PROTOCOL, encode
from rlboost.shared.process.logs import BUFFER, LogBuffer
from rlboost.shared.process.waiting import Waits, retry_while
from rlboost.shared.streams import names
from rlboost.shared.streams.bus import START, Append, Bus, Entry, Renew, Trim, after, dead_letter_op, report_dead_letter
from rlboost.shared.wire import I32, U64, length, pack

log = structlog.get_logger(__name__)

REDIS_LIMIT_S = 600.0
"""A worker exits after Redis has been unavailable for this long."""
RETRY_INTERVAL_S = 0.25
REJECTION_LIMIT_S = 10.0
"""A worker that Redis rejects for this long joins again. After a restart of Redis, the manager restores its user."""
STARTING_LEASE_S = 20.0
"""Lease while there is no engine: importing a large library may block the whole process for seconds, and a worker that
holds no samples need not be missed quickly."""
_MAX_UNREAD = 10_000
"""No more heartbeats are sent while the manager has this many of the worker's messages unread."""


@dataclass(frozen=True, slots=True)
class WorkerIdentity:
    """The fields of `WorkerJoined` that do not change."""

    role: Role
    kind: str
    slots: int
    price_per_hour: float
    host: str
    pid: int
    trainer: str = ""
    """Name of the trainer whose device it shares."""
    startup_s: float = 0.0
    """Time from the start of the process until it joined first."""


@dataclass(slots=True)
class Incarnation:
    """One registration with the manager; a worker that rejoins becomes a new one."""

    session: Session
    unsent: UnsentQueue
    bus: Bus
    cursor: str = START
    """Entry id of the last command read."""
    joined: bool = False

    @property
    def worker(self) -> str:
        """Return the incarnation's id."""
        return self.session.worker

    @property
    def reports(self) -> str:
        """Return the stream of everything that the incarnation reports."""
        return names.worker_reports(self.worker)


class ManagerConnection:
    """Writes heartbeats, tokens, events and dead letters of one worker, in order, to the worker's own stream.

    Every method raises `BusUnavailable` when Redis does not answer, and may then be called again.

    Args:
        membership: the first incarnation.
        join: returns the next one.
        generator: provides emissions and load.
        identity: what the worker reports when it joins.
        lease_s: the worker counts as lost this long after its last heartbeat.
        waits: lists what is waited for.
        memory: returns the memory in use.
        log_lines: log lines of this process; heartbeats carry the newest.

    """

    def __init__(
        self,
        membership: Membership,
        join: Join,
        generator: Generator,
        identity: WorkerIdentity,
        lease_s: float,
        waits: Waits,
        memory: Callable[[], Memory] = Memory,
        log_lines: LogBuffer = BUFFER,
    ) -> None:
        self._join = join
        self._memory = memory
        self._log_lines = log_lines
        self._generator = generator
        self._identity = identity
        self._lease_s = lease_s
        self._waits = waits
        self._flush_lock = asyncio.Lock()
        self._heartbeat_lock = asyncio.Lock()
        self._left = self._has_joined = False
        self.meters = LoadMeters(identity.slots)
        self.incarnation = _new_incarnation(membership, None)
        self._reported: tuple[WorkerState, WeightsRef | None, dict[str, int], int] | None = None

    @property
    def session(self) -> Session:
        """Return the session of the current incarnation."""
        return self.incarnation.session

    async def retry_until_ok(self, what: str, call: Callable[[], Awaitable[object]]) -> None:
        """Repeat an idempotent call while Redis is unavailable.

        Raises:
            WaitTimedOut: Redis was unavailable for `REDIS_LIMIT_S`.
            CredentialRejected: Redis rejected this incarnation for `REJECTION_LIMIT_S`.

        """
        rejected_since: float | None = None

        def is_outage(error: Exception) -> bool:
            nonlocal rejected_since
            if not isinstance(error, CredentialRejected):
                rejected_since = None
                return isinstance(error, BusUnavailable)
            rejected_since = rejected_since or time.monotonic()
            return time.monotonic() - rejected_since <= REJECTION_LIMIT_S

        async with self._waits.on("Redis", because=what, limit_s=REDIS_LIMIT_S):
            await retry_while(is_outage, call, first_s=RETRY_INTERVAL_S, longest_s=RETRY_INTERVAL_S, jitter_s=0.0)

    # --- tokens -------------------------------------------------------------------------------------------------------

    async def flush(self) -> None:
        """Send every emission that Redis does not have yet."""
        async with self._flush_lock:
            began, incarnation = time.monotonic(), self.incarnation
            emissions, stats = self._generator.take_emissions(), self._generator.stats()
            running = 0 if self._generator.is_paused else stats.running
            self.meters.on_emissions(emissions, running, began, stats.accepted_total)
            if emissions:
                incarnation.session.on_emissions(emissions)
                incarnation.unsent.add(emissions)
            while batch := incarnation.unsent.batch():
                await incarnation.bus.transact([Append(incarnation.reports, message) for message in batch])
                incarnation.unsent.sent(len(batch))
            if emissions:
                self.meters.on_flushed(time.monotonic() - began)

    def release_unstarted(self, samples: Sequence[Assignment]) -> None:
        """Report with the next flush that samples which never reached the engine are released."""
        self.incarnation.unsent.add([_unstarted(sample) for sample in samples])

    # --- heartbeats ---------------------------------------------------------------------------------------------------

    async def send_heartbeat(self) -> None:
        """Renew the lease and send a heartbeat, preceded by `WorkerJoined` if it is the incarnation's first."""
        async with self._heartbeat_lock:
            if self._left:
                return
            incarnation, stats, now = self.incarnation, self._generator.stats(), time.time()
            session, bus = incarnation.session, incarnation.bus
            load = self.meters.measure(stats, self._memory(), time.monotonic())
            heartbeat = build_heartbeat(
                session,
                stats,
                load,
                capabilities=self._generator.capabilities,
                last_command=incarnation.cursor,
                waiting=next(iter(self._waits.current()), None),
                at=now,
            )
            lease_s = self._lease_s if self._generator.exists else max(self._lease_s, STARTING_LEASE_S)
            await bus.transact([Renew(names.worker_lease(incarnation.worker), session.state, lease_s)])
            if incarnation.joined and await bus.length(incarnation.reports) > _MAX_UNREAD:
                return  # no manager reads them; the newest heartbeat counts, and the first after it has read
            joined = [] if incarnation.joined else [self._joined(incarnation.worker, now)]
            # Only this worker reads its commands, so those read may be trimmed.
            read = Trim(names.worker_commands(incarnation.worker), after(incarnation.cursor))
            messages = (*joined, heartbeat, *self._log())
            await bus.transact([*(Append(incarnation.reports, message) for message in messages), read])
            if not incarnation.joined:
                log.info(
                    "worker_joined", worker=incarnation.worker, role=self._identity.role, slots=self._identity.slots
                )
                incarnation.joined = self._has_joined = True
            self._reported = (heartbeat.state, session.serving, session.alongside, heartbeat.slots)

    @property
    def has_reported_suspension(self) -> bool:
        """Return True if the last heartbeat said `suspended`."""
        return self._reported is not None and self._reported[0] == "suspended"

    @property
    def state_changed(self) -> bool:
        """Return True if state or weights differ from the last heartbeat."""
        session = self.session
        return self._reported != (session.state, session.serving, session.alongside, session.seats)

    def _joined(self, worker: str, now: float) -> WorkerJoined:
        identity = self._identity
        return WorkerJoined(
            protocol=PROTOCOL,
            worker=worker,
            role=identity.role,
            kind=identity.kind,
            slots=identity.slots,
            host=identity.host,
            pid=identity.pid,
            price_per_hour=identity.price_per_hour,
            at=now,
            trainer=identity.trainer,
            kv_tokens=0,  # not known before there is an engine: see `WorkerHeartbeat`
            startup_s=0.0 if self._has_joined else identity.startup_s,
        )

    async def send_preemption_notice(self, reason: str, lead_s: float) -> None:
        """Report that this machine will be gone in `lead_s` seconds."""
        notice = PreemptionNotice(worker=self.incarnation.worker, lead_s=lead_s, reason=reason, at=time.time())
        await self._report(notice)

    async def leave(self, reason: str, *, engine_failed: bool = False) -> None:
        """Send `WorkerLeft`, the worker's last message.

        Args:
            reason: shown to users.
            engine_failed: True if a running sample may have caused the failure.

        """
        # Samples that are pending in the engine have not run.
        ran = self._generator.running().intersection(self.session.held.items()) if engine_failed else ()
        async with self._heartbeat_lock:
            self._left = True
            await self._send_left(reason, sorted(sample for sample, _ in ran))

    async def rejoin(self, reason: str, *, is_rejected: bool = False) -> None:
        """End this incarnation, whose requests the engine has aborted, and start the next. Retries until Redis answers.

        Args:
            reason: shown to users.
            is_rejected: Redis no longer accepts this incarnation, so its unsent tokens are discarded.

        Raises:
            WaitTimedOut, CredentialRejected: see `retry_until_ok`; this incarnation has not ended.
            ConfigError, Fatal: see `Join`.

        """
        old = self.incarnation
        log.warning("worker_rejoining", worker=old.worker, reason=reason)
        if not is_rejected:
            await self.retry_until_ok("flush before rejoining", self.flush)
        async with self._flush_lock, self._heartbeat_lock:
            if is_rejected:
                self._generator.take_emissions()
            else:
                await self.retry_until_ok("leave before rejoining", lambda: self._send_left(reason))
            self.incarnation = _new_incarnation(await self._join(), old.session.serving)
            self.session.loaded.update(old.session.loaded)
            self._reported = None
        await old.bus.close()

    async def _send_left(self, reason: str, running_at_failure: Sequence[int] = ()) -> None:
        worker = self.incarnation.worker
        left = WorkerLeft(
            worker=worker, reason=reason, at=time.time(), running_at_failure=pack(running_at_failure, U64)
        )
        reports = self.incarnation.reports
        await self.incarnation.bus.transact([Append(reports, message) for message in (*self._log(), left)])
        log.info("worker_left", worker=worker, reason=reason)

    def _log(self) -> list[WorkerLog]:
        """Return the newest log lines for the log of the job; none before there is one."""
        session = self.session
        weights = session.target or session.serving
        lines = self._log_lines.take() if weights else []
        if weights is None or not lines:
            return []
        times, texts = [line.at for line in lines], [line.text for line in lines]
        return [WorkerLog(worker=self.incarnation.worker, job_id=weights.job_id, times=times, texts=texts)]

    # --- events and dead letters --------------------------------------------------------------------------------------

    async def dead_letter(self, entry: Entry, reason: str) -> None:
        """Dead-letter a command that violates the protocol, or that cannot be executed."""
        report_dead_letter(entry.stream, entry.id, reason)
        worker, reports, body = self.incarnation.worker, self.incarnation.reports, encode(entry.message)
        op = dead_letter_op(entry.stream, entry.id, worker, reason, body, time.time(), to=reports)
        await self.incarnation.bus.transact([op])

    async def report_weights_unavailable(self, weights: WeightsRef, reason: str) -> None:
        """Emit an event: the assigned weights cannot be pulled."""
        log.warning("weights_unavailable", job=weights.job_id, version=weights.version, reason=reason)
        await self._emit_event(weights.job_id, "weights_unavailable", version=weights.version, reason=reason)

    async def report_weights_refused(self, weights: WeightsRef, reason: str) -> None:
        """Emit an event: the assigned weights do not fit the engine. The manager takes note of it."""
        log.warning("weights_refused", job=weights.job_id, version=weights.version, reason=reason)
        await self._emit_event(weights.job_id, "weights_refused", version=weights.version, reason=reason)

    async def report_not_shared(self, weights: WeightsRef, reason: str, *, lasting: bool = False) -> None:
        """Emit an event: this worker cannot serve the weights next to others, only instead of them.

        The manager has the next version tried again, unless it is `lasting`.
        """
        log.warning("adapter_not_shared", job=weights.job_id, version=weights.version, reason=reason)
        job_id, version = weights
        await self._emit_event(job_id, "adapter_not_shared", version=version, reason=reason, lasting=float(lasting))

    async def report_parity_failure(self, error: ParityCheckFailed) -> None:
        """Emit an event: the engine failed the parity check, with the differences if they are the reason."""
        fields: dict[str, str | float] = {"reason": str(error)}
        if (verdict := error.verdict) is not None:
            numbers = {"mean": verdict.mean, "worst": verdict.worst, "tolerated_mean": verdict.mean_tolerance}
            fields |= {name: value for name, value in numbers.items() if math.isfinite(value)}
        await self._emit_event(error.weights.job_id, "parity_check_failed", version=error.weights.version, **fields)

    async def report_rebalance_recommendation(self, reason: str) -> None:
        """Emit an event, if a job is assigned: this machine is at elevated risk of preemption."""
        log.warning("rebalance_recommended", reason=reason)
        if self.session.target is not None:
            await self._emit_event(self.session.target.job_id, "rebalance_recommended", reason=reason)

    async def report_serving_trouble(self, reason: str) -> None:
        """Emit an event, if a job is assigned: something is wrong with the serving engine beside this worker."""
        log.warning("serving_trouble", reason=reason)
        if self.session.target is not None:
            await self._emit_event(self.session.target.job_id, "serving_trouble", reason=reason)

    async def _emit_event(self, job_id: str, kind: str, **fields: str | float) -> None:
        worker = self.incarnation.worker
        await self._report(WorkerEvent(worker=worker, job_id=job_id, kind=kind, at=time.time(), fields=fields))

    async def _report(self, message: Message) -> None:
        await self.incarnation.bus.append(self.incarnation.reports, message)


def _new_incarnation(membership: Membership, serving: WeightsRef | None) -> Incarnation:
    return Incarnation(Session(membership.worker, serving), UnsentQueue(membership.worker), membership.bus)


def _unstarted(sample: Assignment) -> Emission:
    return Emission(sample.sample, sample.attempt, length(sample.tokens, I32), [], [], 0, FINISH_RELEASED)
