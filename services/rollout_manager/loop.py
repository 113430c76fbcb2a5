"""The manager's loop.

Consumes: job commands and reports, requested groups, the token log, heartbeats, committed weights; the streams of
    workers, whose entries it first relays to the token log and to the heartbeats; and what autoscaling and the renewal
    of credentials have decided. The world changes in turns only; `create_job` adds its job between two turns.
Produces: token-log records, worker commands, finished samples, events; each turn writes them in one transaction,
    together with the positions up to which the streams were read.
Waits for: the next entry or tick, in `Bus.read_with_raw`; as a standby, for the death of the leader or the end of its
    lease, in `_stand_by`.
Ends when: the stop is set. After a write without a reply, and at the start, the manager acquires leadership and
    rebuilds the world from the log. A superseded manager cannot write: it discards its world and becomes a standby.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import structlog
from pydantic import ValidationError

from rlboost.services.rollout_manager.access import WorkerIdentities
from rlboost.services.rollout_manager.domain.apply_messages import (
    apply_frames,
    apply_message,
    apply_order,
    pause_without_trainer,
)
from rlboost.services.rollout_manager.domain.decide import compact, decide, forget_ended
from rlboost.services.rollout_manager.domain.effects import Effect, Now, bookkeeping, event, operations, save_job
from rlboost.services.rollout_manager.domain.jobs import Job
from rlboost.services.rollout_manager.domain.wait_status import OVERDUE_S, overdue_waits
from rlboost.services.rollout_manager.domain.workers import STALL_LIMIT_S
from rlboost.services.rollout_manager.domain.world import World
from rlboost.services.rollout_manager.leadership import LEASE_S, Leadership, ManagerRecord, manager_record
from rlboost.services.rollout_manager.ports import LeaderWatch
from rlboost.services.rollout_manager.recovery import (
    SHARED_STREAMS,
    PoisonEntries,
    PoisonFound,
    StopTrainer,
    apply_in_batches,
    are_below,
    is_trimmed_when_read,
    recover,
    restore_lost_jobs,
    with_dead_letters,
)
from rlboost.services.rollout_manager.waiters import CompletionWaiters
from rlboost.shared.errors import BusUnavailable, Fatal, Fenced, Unprocessable
from rlboost.shared.messages import (
    DeadLetter,
    PreemptionNotice,
    Role,
    SampleFailed,
    TokenFrame,
    TrainerStatus,
    WorkerEvent,
    WorkerHeartbeat,
    WorkerJoined,
    WorkerLeft,
    WorkerLog,
)
from rlboost.shared.messages.codec import fields_of
from rlboost.shared.process.lifecycle import until_stop
from rlboost.shared.process.stalls import let_others_run
from rlboost.shared.process.waiting import count_timeout
from rlboost.shared.progress import CountProgress
from rlboost.shared.streams import names
from rlboost.shared.streams.bus import (
    MAX_DEAD_LETTERS,
    START,
    AppendRaw,
    Bus,
    Entry,
    Op,
    RawEntry,
    ReadSize,
    Remove,
    Trim,
    after,
    dead_letter_op,
    report_dead_letter,
)

log = structlog.get_logger(__name__)

# --- relay ------------------------------------------------------------------------------------------------------------
#
# The transaction that relays what workers have reported to the streams that all services may rely on (invariant 9).
#
# A worker can write only to its own stream, so the stream tells who wrote a message. Relayed entries leave the worker's
# stream in the same transaction: each is relayed once, whenever the manager is killed, and a stream needs no cursor.


_TOKEN_LOG = names.TOKEN_LOG, None
_HEARTBEATS = names.WORKER_HEARTBEATS, None
_DESTINATIONS: dict[str, tuple[str, int | None]] = {
    TokenFrame.tag: _TOKEN_LOG,
    SampleFailed.tag: _TOKEN_LOG,
    WorkerJoined.tag: _HEARTBEATS,
    WorkerHeartbeat.tag: _HEARTBEATS,
    WorkerEvent.tag: _HEARTBEATS,
    WorkerLog.tag: _HEARTBEATS,
    PreemptionNotice.tag: _HEARTBEATS,
    WorkerLeft.tag: _HEARTBEATS,
    DeadLetter.tag: (names.DEAD_LETTERS, MAX_DEAD_LETTERS),
}
"""Message that a worker may send -> the stream that it belongs to, and how many entries that retains."""
MAX_REPORT_BYTES, MAX_FRAME_BYTES = 4 << 20, 128 << 20
"""Of other reports, and of a frame: it has all routed experts of a sample that ends."""


def destination(worker: str, role: Role, fields: Mapping[str, Any]) -> tuple[str, int | None]:
    """Return the stream that a message from a worker's own stream belongs to, and its maximum length.

    Args:
        worker: the stream's owner, the only worker that can write to it.
        role: the worker's.
        fields: the message's fields, which its reader validates.

    Raises:
        Unprocessable: a worker may not send it, or it names another worker.

    """
    tag = str(fields.get("t"))
    if tag not in _DESTINATIONS:
        raise Unprocessable(f"worker {worker} sent a {tag[:100]}, which no worker may send")
    author = fields.get("consumer" if tag == DeadLetter.tag else "worker")
    if author != worker:
        raise Unprocessable(f"worker {worker} sent a {tag} in the name of {str(author)[:100]!r}")
    if tag == WorkerJoined.tag and fields.get("role") != role:
        raise Unprocessable(f"worker {worker} joined as {role}, not as {str(fields.get('role'))[:100]!r}")
    return _DESTINATIONS[tag]


def relay(reports: Iterable[RawEntry], owners: Mapping[str, str], roles: Mapping[str, Role]) -> list[Op]:
    """Return the operations that relay these entries, as they are, and remove them from the workers' streams.

    Args:
        reports: entries of workers' streams, those of one stream in order.
        owners: workers' streams -> their owners, of all streams among these.
        roles: worker id -> its role, of all owners.

    """
    relayed: defaultdict[str, list[str]] = defaultdict(list)
    ops: list[Op] = []
    for report in reports:
        worker = owners[report.stream]
        relayed[report.stream].append(report.id)
        try:
            fields = fields_of(report.body) if report.n_bytes <= MAX_FRAME_BYTES else {}
            if report.n_bytes > (MAX_FRAME_BYTES if fields.get("t") == TokenFrame.tag else MAX_REPORT_BYTES):
                text = f"worker {worker} sent {report.n_bytes} bytes, more than any report has"
                raise Unprocessable(text)  # noqa: TRY301 - as `destination` does
            stream, max_len = destination(worker, roles[worker], fields)
        except Unprocessable as error:
            report_dead_letter(report.stream, report.id, str(error))
            ops.append(dead_letter_op(report.stream, report.id, "manager", str(error), report.body, time.time()))
        else:
            ops.append(AppendRaw(stream, report.body, max_len))
    return [*ops, *(Remove(stream, tuple(ids)) for stream, ids in relayed.items())]


# --- trainer leases ---------------------------------------------------------------------------------------------------
#
# What the trainers do and wait for, as their leases on jobs tell.


async def check_trainers(bus: Bus, world: World, now: Now) -> list[Effect]:
    """Record the present value of each running job's trainer lease, and report waits that last too long."""
    running = [job for job in world.jobs.active() if job.record.state != "pending"]
    values = await bus.lease_values([names.trainer_lease(job.id) for job in running])
    for job, value in zip(running, values, strict=True):
        try:
            status = TrainerStatus.model_validate_json(value) if value else None
        except ValidationError as error:  # as if the trainer were silent
            log.warning("trainer_status_unreadable", job=job.id, reason=str(error))
            continue
        job.progress.on_trainer_status(status, now.wall)
    effects: list[Effect] = pause_without_trainer(world, now)
    for job_id, wait in overdue_waits(world.jobs, world.fleet, now):
        subject, because = wait["for"], wait["because"]
        effects.append(event("wait_limit_exceeded", now, job_id, subject=subject, because=because, limit_s=OVERDUE_S))
        count_timeout(subject, because, OVERDUE_S, job=job_id)
    return effects


# --- manager ----------------------------------------------------------------------------------------------------------


BLOCK_S = 0.05
"""Longest wait for an entry: the time between two ticks of an idle manager."""
TURN_S = 0.01
"""Shortest turn: entries that arrive within it are handled together."""
TRIM_EVERY_S = 1.0
TRAINER_CHECK_EVERY_S = 0.5
BATCH = 1024
FIRST_ENTRY_S = 1e-4
"""Assumed time of one entry, before the first large read."""
MIN_BATCH = 16
"""The least that one read takes of each stream of small entries, however many workers there are."""


Change = Callable[[World, Now], list[Effect]]


class _Batch(NamedTuple):
    """What one turn applies."""

    entries: list[Entry]
    is_caught_up: bool
    """True if every stream was read to its end."""


class _Observed(NamedTuple):
    """What one turn has found; the world has all of it but the last two, which are decided about."""

    now: Now
    advanced: dict[str, str]
    """Stream -> its last entry, for each stream with new entries."""
    effects: list[Effect]
    dead: list[str]
    """Silent workers whose lease has run out."""
    mismatched: list[str]
    """Workers that have missed commands."""
    n_entries: int
    applied_s: float
    """How long the world took to take the entries."""


class Manager:
    """Reads, decides, writes; `world` is what the REST API shows."""

    def __init__(  # noqa: PLR0913 - its limits and collaborators, by keyword
        self,
        bus: Bus,
        *,
        lease_s: float,
        redis_limit_s: float,
        clock: Callable[[], Now] | None = None,
        record: ManagerRecord | None = None,
        leader_lease_s: float = LEASE_S,
        identities: WorkerIdentities | None = None,
        leader_watch: LeaderWatch | None = None,
        prices: Mapping[str, float] = MappingProxyType({}),
        stall_limit_s: float = STALL_LIMIT_S,
        stop_trainer: StopTrainer | None = None,
    ) -> None:
        """Create a standby; the world is empty until it is recovered.

        Args:
            bus: the broker.
            lease_s: a worker without a lease is lost after this time without a heartbeat.
            redis_limit_s: how long to retry while Redis is unavailable.
            clock: returns the current time; the system's clocks when None.
            record: describes this manager in the leader's lease; managers on one Redis need different addresses.
            leader_lease_s: how long a leader may be silent until another manager takes over.
            identities: the workers' Redis users and roles; without Redis users when None.
            leader_watch: notices a leader's death sooner.
            prices: kind -> dollars per hour of one worker that has no price of its own.
            stall_limit_s: for how long a worker may always hold samples without sending tokens; see `domain.stalls`.
            stop_trainer: see `recover`.

        """
        self._bus = bus
        self._leader_watch = leader_watch
        self._stop_trainer = stop_trainer
        self._now = clock or _now
        self._new_world = partial(World, lease_s, prices, stall_limit_s)
        self._redis_limit_s = redis_limit_s
        self._leadership = Leadership(bus, record or manager_record("", 0, ""), leader_lease_s)
        self.identities = identities or WorkerIdentities(bus)
        self.world = self._new_world()
        self.completion_waiters = CompletionWaiters()
        self.recovered = False
        self._outage = ""
        """Why this manager cannot work at present; empty while Redis answers."""
        self._rebuild: CountProgress | None = None
        """How far the rebuild of the world is; None outside of one."""
        self.turn_began_at: float | None = None
        """When the current turn began (Unix seconds), None between turns. While this manager leads, only a slow Redis
        makes a turn long."""
        self._cursors: dict[str, str] = {}
        self._read_size = ReadSize(BATCH, FIRST_ENTRY_S)
        self._audit_texts: dict[str, str] = {}
        self._closed_streams: list[str] = []
        """Streams whose stored cursors are to be deleted."""
        self._trimmed_at = 0.0
        self._trainers_checked_at = -math.inf
        self._poison = PoisonEntries()
        self._turning = asyncio.Lock()
        """Serializes what changes the world: `turn`, and the end of `create_job`."""
        self._changes: list[Change] = []
        """What other loops have decided since the last turn."""
        self._pending_trims: list[Op] = []
        """Trims of what stored cursors and restated records have made superfluous, due at the next turn."""

    async def run(self, stop: asyncio.Event) -> None:
        """Lead or stand by until the stop."""
        unavailable_since: float | None = None
        while not stop.is_set():
            try:
                if not self.recovered and not await self.try_lead():
                    unavailable_since, self._outage = None, ""
                    await self._stand_by(stop)
                    continue
                unavailable_since, self._outage = None, ""
                began, self.turn_began_at = time.monotonic(), time.time()
                try:
                    await self.turn(BLOCK_S)
                finally:
                    self.turn_began_at = None
                await until_stop(stop, max(0.0, TURN_S - (time.monotonic() - began)))
            except Fenced as error:
                # `try_lead` steps down if another manager leads; after a lost reply to a write, none does.
                self.recovered = False
                log.warning("leadership_unknown", reason=str(error))
            except BusUnavailable as error:
                self.recovered = False
                self._outage = f"Redis does not answer the manager: {error}"
                unavailable_since = unavailable_since or time.monotonic()
                outage_s = time.monotonic() - unavailable_since
                if outage_s > self._redis_limit_s:
                    raise Fatal(
                        f"{error}; gave up after {outage_s:.0f} s: start Redis, then start the manager"
                    ) from error
                log.warning("redis_unavailable", error=str(error), outage_s=round(outage_s, 1))
                await until_stop(stop, 0.5)
        self.recovered = False
        self.completion_waiters.close("the manager is shutting down")
        await self._leadership.resign()

    async def _stand_by(self, stop: asyncio.Event) -> None:
        """Wait until it is time to check the lease, or until the leader has died."""
        leader, wait_s = self._leadership.other_leader, self._leadership.check_every_s
        if leader is None or self._leader_watch is None:
            await until_stop(stop, wait_s)
        elif await self._leader_watch.has_died(leader.url, wait_s):
            self._leadership.replace_dead(leader)

    @property
    def url(self) -> str:
        """Return where clients reach this manager."""
        return self._leadership.record.url

    @property
    def leads(self) -> bool:
        """Return True if this manager leads and has recovered the world."""
        return self.recovered and self._leadership.leads

    @property
    def idle_reason(self) -> str:
        """Return why no manager serves at present: a rebuild of the world, or an outage; empty if unknown."""
        if self._rebuild is None:
            return self._outage
        text = self._rebuild.text()
        return "the manager restores its state from Redis" + (f": {text}" if text else "")

    @property
    def other_leader(self) -> ManagerRecord | None:
        """Return the record of the manager that leads instead of this one, None if there is none."""
        return self._leadership.other_leader

    async def try_lead(self) -> bool:
        """Become the leader and rebuild the world, unless another manager leads; return True on success.

        Raises:
            Fenced: another manager became the leader in the meantime.
            BusUnavailable: it is unknown who leads: try again.

        """
        self.recovered = False
        if not await self._leadership.try_acquire():
            if self._cursors:
                self._step_down("another manager became the leader during an outage")
            return False
        self._rebuild = CountProgress("entries of the token log")
        try:
            await self.identities.load()
            recovered = await recover(
                self._bus,
                self._new_world,
                self._now(),
                self._poison,
                self._keep_lease,
                self._rebuild,
                self._stop_trainer,
            )
        finally:
            self._rebuild = None
        if self._leadership.redis_lost_data:
            recovered.effects.extend(restore_lost_jobs(recovered.world, self.world, self._now()))
        self.world, self._cursors = recovered.world, recovered.cursors
        self._changes.clear()
        self._audit_texts.clear()
        self._pending_trims.clear()
        # Store the cursors of this recovery now, so that what it counted is not counted again.
        await self._commit(recovered.effects, dict(self._cursors))
        self._leadership.redis_lost_data = False
        self.recovered = True
        return True

    async def _keep_lease(self) -> None:
        await self._bus.transact(self._leadership.recovery_renewal(self._now().mono), self._leadership.fence)

    def _step_down(self, reason: str) -> None:
        self.recovered = False
        self.world = self._new_world()
        self._changes.clear()
        self._cursors.clear()
        self._audit_texts.clear()
        self.completion_waiters.close(reason)
        log.warning("leadership_lost", reason=reason)

    async def write(self, ops: Sequence[Op]) -> None:
        """Apply a client's operations as the leader.

        Raises:
            Fenced: this manager does not lead, or no longer does; nothing was written.
            BusUnavailable: it is unknown whether the operations took effect.

        """
        fence = self._leadership.fence
        try:
            await self._bus.transact(ops, fence)
        except (BusUnavailable, Fenced):
            self._leadership.invalidate(fence)  # the loop notices at its next commit
            raise

    async def create_job(self, job: Job, commands: Sequence[Op], models: Sequence[Job] = ()) -> None:
        """Write the records of a new job and of its other models, and the commands of its trainer.

        The world has them when this returns.

        Raises:
            Fenced: see `write`.
            BusUnavailable: see `write`.

        """
        await self.write([*operations(map(save_job, (job, *models))), *commands])
        async with self._turning:  # a turn that runs now reads the command
            for record in (job, *models):
                if self.leads and record.id not in self.world.jobs:
                    self.world.jobs.add(record)

    def at_next_turn(self, change: Change) -> None:
        """Have the next turn change the world, unless the world is rebuilt before."""
        self._changes.append(change)

    async def turn(self, block_s: float = 0.0) -> None:
        """Read new entries, waiting up to `block_s` for the first one; decide; write."""
        async with self._turning:
            await self._turn(block_s)

    async def turn_end(self) -> None:
        """Wait until no turn is in progress: what the world has is written then, unless a commit failed."""
        async with self._turning:
            pass

    async def _turn(self, block_s: float) -> None:
        try:
            seen = await self._observe(block_s)
        except PoisonFound as found:
            # Nothing of this turn was written: a rebuilt world applies the same entries, without the one that failed.
            log.warning("world_rebuilt", reason=str(found))
            await self.try_lead()
            return
        await let_others_run()  # to apply the entries took long
        began = time.perf_counter()
        effects = [*seen.effects, *self._decide(seen)]
        self._read_size.took(seen.n_entries, seen.applied_s + time.perf_counter() - began)
        await let_others_run()  # to write them takes long, too
        await self._trim()  # what the previous turn found due: the cursors that allow it are stored by now
        effects += await self._maintain(seen.now)
        await self._commit(effects, seen.advanced)
        self.completion_waiters.notify(self.world, seen.now.wall)
        self._follow_jobs()

    async def _observe(self, block_s: float) -> _Observed:
        """Read and apply new entries, and the leases of trainers and of silent workers."""
        batch = await self._read(block_s)
        await let_others_run()  # its entries were decoded just now
        now, began = self._now(), time.perf_counter()
        effects = self._apply(batch.entries, now)
        applied_s = time.perf_counter() - began
        if now.mono - self._trainers_checked_at >= TRAINER_CHECK_EVERY_S:
            self._trainers_checked_at = now.mono
            effects += await check_trainers(self._bus, self.world, now)
        silent = self.world.fleet.silent_workers(now.mono)
        leases = await self._bus.cap_and_read_leases([names.worker_lease(worker) for worker in silent])
        vanished = self.world.fleet.vanished(silent, now.mono) if batch.is_caught_up else set()
        dead = [worker for worker, lease in zip(silent, leases, strict=True) if lease is None or worker in vanished]
        mismatched = await self._mismatched(caught_up=batch.is_caught_up)
        advanced = {entry.stream: self._cursors[entry.stream] for entry in batch.entries}
        return _Observed(now, advanced, effects, dead, mismatched, len(batch.entries), applied_s)

    def _decide(self, seen: _Observed) -> list[Effect]:
        changes, self._changes = self._changes, []
        changed = [effect for change in changes for effect in change(self.world, seen.now)]
        clients = self.completion_waiters.clients
        return [*changed, *decide(self.world, seen.now, seen.dead, clients, seen.mismatched)]

    async def _read(self, block_s: float) -> _Batch:
        """Read new entries of all streams; relay what workers have reported, and read that too."""
        roles = self.identities.roles
        owners = {names.worker_reports(worker): worker for worker in roles}
        n_workers = max(1, len(roles))
        count = min(max(MIN_BATCH, BATCH // n_workers), max(1, self._read_size.count // n_workers))
        entries, reports = await self._bus.read_with_raw(self._cursors, owners, count=count, block_s=block_s)
        self._read_size.update(entries, reports)
        if not reports:
            return _Batch(entries, are_below(count, entries))
        await self._bus.transact(relay(reports, owners, roles), self._leadership.fence)
        cursors = self._cursors | {entry.stream: entry.id for entry in entries}
        count_relayed = self._read_size.count
        relayed = await self._bus.read(cursors, count=count_relayed)
        return _Batch(entries + relayed, are_below(count, reports) and are_below(count_relayed, relayed))

    def _apply(self, entries: list[Entry], now: Now) -> list[Effect]:
        world = self.world
        self._cursors.update((entry.stream, entry.id) for entry in entries)
        applied = apply_in_batches(
            sorted(entries, key=lambda entry: apply_order(entry.message)),
            lambda frames: apply_frames(world, frames),
            lambda entry: apply_message(world, entry.message, entry.id, now),
            self._poison,
        )
        return with_dead_letters(applied, now)

    async def _mismatched(self, *, caught_up: bool) -> list[str]:
        """Return the workers that have read all of their commands and still differ from what they were assigned."""
        fleet = self.world.fleet
        if not caught_up:
            fleet.restart_command_checks()
        if not (mismatched := fleet.mismatched()):
            return []
        cursors = {names.worker_commands(worker.id): worker.command_check.last_command for worker in mismatched}
        unread = {entry.stream for entry in await self._bus.read(cursors, count=1)}
        for worker in mismatched:
            worker.command_check.restart()
        return [worker.id for worker in mismatched if names.worker_commands(worker.id) not in unread]

    async def _trim(self) -> None:
        # In a transaction of its own, before any write: Redis accepts it when its memory is full.
        trims, self._pending_trims = self._pending_trims, []
        await self._bus.transact(trims, self._leadership.fence)

    async def _maintain(self, now: Now) -> list[Effect]:
        """Once in `TRIM_EVERY_S`, compact the log, drop what ended long ago, and note what the next turn is to trim."""
        if now.mono - self._trimmed_at <= TRIM_EVERY_S:
            return []
        self._trimmed_at = now.mono
        self._pending_trims = self._due_trims()
        effects = [*compact(self.world.ledger), *self._forget_ended(now)]
        await self.identities.maintain(self.world.fleet, now.mono, self.write)
        return effects

    async def _commit(self, effects: list[Effect], advanced: dict[str, str]) -> None:
        """Write the effects of one turn, the positions up to which streams were read, and the audits."""
        changed = {}
        for job in self.world.jobs.values():
            if job.is_audited and self._audit_texts.get(job.id) != (text := job.audit.model_dump_json()):
                self._audit_texts[job.id] = text
                changed[job.id] = job.audit
        closed_streams, self._closed_streams = self._closed_streams, []
        ops = [*operations(effects), *bookkeeping(advanced, changed, closed_streams)]
        ops += self._leadership.renewal(self._now().mono)
        await self._bus.transact(ops, self._leadership.fence)
        self.completion_waiters.end(effects)

    def _forget_ended(self, now: Now) -> list[Effect]:
        effects = forget_ended(self.world.jobs, now.wall)
        audited = {job.id for job in self.world.jobs.values() if job.is_audited}
        self._audit_texts = {job_id: text for job_id, text in self._audit_texts.items() if job_id in audited}
        return effects

    def _follow_jobs(self) -> None:
        """Read the request streams of active jobs only."""
        active = {names.rollouts_requested(job.id) for job in self.world.jobs.active()}
        for stream in active - self._cursors.keys():
            self._cursors[stream] = START
        for stream in self._cursors.keys() - active - SHARED_STREAMS.keys():
            del self._cursors[stream]
            self._closed_streams.append(stream)

    def _due_trims(self) -> list[Op]:
        oldest = self.world.ledger.oldest_entry(self._cursors[names.TOKEN_LOG])
        read = [Trim(stream, after(cursor)) for stream, cursor in self._cursors.items() if is_trimmed_when_read(stream)]
        return [Trim(names.TOKEN_LOG, oldest), *read]


def _now() -> Now:
    return Now(time.monotonic(), time.time())
