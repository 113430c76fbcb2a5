"""The trainer's loops.

*Commands*. Consumes: `jobs.commands`, `jobs.controls`. Produces: the next job for *jobs*; pauses and cancellations of
the active job. Waits for: the next command, which the rollout manager appends. Ends when: the service stops. All
trainers read all commands and apply those that a manager has signed. A job itself is claimed from their common consumer
group of `jobs.commands`, by a trainer without a job; its command stays pending until the job has ended, so that another
trainer can take over.

*Jobs*. Consumes: claimed jobs. Produces: the job's last report, in one transaction with the acknowledgement of its
command. Waits for: a job, then for its end, a cancellation, a takeover or the stop. Ends when: the service stops; the
command of an active job stays pending then.

*Lease*. Consumes: the state of the active job. Produces: a lease renewal each second, with the job's phase and current
wait. Waits for: the next second. Ends when: the service stops.

Two trainers never run the same job. A trainer acquires a job's lease only if it is free, and raises the lease's epoch
in the same step of Redis; each renewal, and the last report, requires that epoch. A trainer that was suspended for
longer than its lease learns of a takeover at its next renewal, and drops the job without a report.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import NamedTuple

import structlog

from rlboost.services.trainer.domain.job_states import Attempts, JobStates
from rlboost.services.trainer.job.job import LEASE_TTL_S, LEASE_WAIT_LIMIT_S, DeviceThread, Job, RetryingBus
from rlboost.services.trainer.job.shared_device import SharedDevice
from rlboost.services.trainer.run import Build, is_failure, run_job
from rlboost.shared.errors import (
    BusUnavailable,
    ConfigError,
    Fatal,
    Fenced,
    ProcessEnded,
    RLBoostError,
    WaitTimedOut,
    leaves,
)
from rlboost.shared.http.access import is_signed
from rlboost.shared.ids import new_token
from rlboost.shared.messages import JobCommand, JobReport, JobState, TrainerStatus
from rlboost.shared.process.lifecycle import until_stop
from rlboost.shared.process.waiting import Waits
from rlboost.shared.streams import names
from rlboost.shared.streams.bus import START, Ack, Append, Bus, Entry, HashDelete, HashSet, Op
from rlboost.shared.streams.fenced_lease import FencedLease
from rlboost.shared.variables import FAILED_IN_ORDER, KILLED_ON_REQUEST

log = structlog.get_logger(__name__)

_CLAIMED_AT_ONCE = 10_000


@dataclass(frozen=True, slots=True)
class Timing:
    """Intervals and limits of the loops."""

    block_s: float = 0.2
    """How long a read waits for the next command."""
    takeover_check_s: float = 1.0
    """How often a trainer without a job looks for jobs of dead trainers."""
    lease_renewal_interval_s: float = 1.0
    """How often the lease is renewed."""
    lease_wait_limit_s: float = LEASE_WAIT_LIMIT_S
    """How long a trainer waits for the lease of a job it has ended, while another trainer holds it."""
    last_call_limit_s: float = 600.0
    """How long the last call of an ended job may run on before the process ends, which alone stops it."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Maximum waits."""

    outage_s: float
    """For Redis to answer again."""
    samples_s: float
    """For the next sample."""


class Trainer:
    """Runs jobs, one at a time."""

    def __init__(  # noqa: PLR0913 - its identity, limits and collaborators, by keyword
        self,
        bus: Bus,
        build: Build,
        device: DeviceThread,
        waits: Waits,
        *,
        name: str,
        token: str,
        limits: Limits,
        timing: Timing = Timing(),
        price_per_hour: float = 0.0,
        last_exit: str = "",
        shared_device: str = "",
        device_call_limit_s: float = math.inf,
    ) -> None:
        """Bind to Redis and the adapters; the loops do the work.

        Args:
            bus: the broker.
            build: builds the resources of a job; called on `device`.
            device: the thread of all computation.
            waits: registry of waits.
            name: the trainer's name; reserved workers name the trainer whose device they share.
            token: the system's, under which managers sign commands.
            limits: how long each wait may take.
            timing: intervals and limits of the loops.
            price_per_hour: dollars that its jobs are charged for its machines, besides its reserved workers.
            last_exit: how the earlier process of this trainer ended, empty if unknown.
            shared_device: name of the device that it uses in turns with other trainers; empty: it has one alone.
            device_call_limit_s: longest call on a shared device while another job waits for it.

        """
        self._name = name
        self._token = token
        self._price_per_hour = price_per_hour
        self._last_exit = last_exit
        self._incarnation = f"{name}-{new_token()}"
        """Unique per process, to distinguish a restarted trainer from an earlier process that may still run."""
        self._bus = RetryingBus(bus, waits, limits.outage_s)
        self._build = build
        self._device = device
        self._shared_device = shared_device
        self._device_call_limit_s = device_call_limit_s
        self._waits = waits
        self._samples_limit_s = limits.samples_s
        self._jobs = JobStates(name)
        self._quarantined: set[str] = set()
        """Commands whose job file this trainer cannot parse; another trainer may claim them."""
        self._timing = timing
        self._cursors = {names.JOB_COMMANDS: START, names.JOB_CONTROLS: START}
        self._queue: asyncio.Queue[Job] = asyncio.Queue()
        self._current: Job | None = None
        self._takeovers_checked_at = -math.inf
        self._is_caught_up = False

    def not_ready_reason(self) -> str | None:
        """Return why the trainer is not ready, None if it is."""
        return None if self._is_caught_up else "the job commands are not read yet"

    def active_jobs(self) -> list[str]:
        """Return the id of the job that runs here, if there is one."""
        return [self._current.id] if self._current is not None else []

    # --- commands ---

    async def follow_commands(self, stop: asyncio.Event) -> None:
        """Apply all commands until the stop, and claim a job whenever there is none."""
        await self._follow()
        while not stop.is_set():
            if self._current is None and (job := await self._next_job()) is not None:
                self._current = job
                self._apply(job)
                self._queue.put_nowait(job)
            self._is_caught_up = True
            await self._follow(block_s=self._timing.block_s)

    async def _follow(self, block_s: float = 0.0) -> None:
        """Apply all commands in the streams, after waiting up to `block_s` for the first."""
        entries = await self._read(block_s)
        while entries:
            for entry in entries:
                self._cursors[entry.stream] = entry.id
                if (command := _signed_command(entry, self._token)) is not None:
                    self._jobs.apply(entry.id, command)
                    if self._is_caught_up:  # not for commands from before the start
                        log.info("command_applied", action=command.action, job=command.job_id)
                elif entry.stream == names.JOB_CONTROLS:  # the one that claims it dead-letters any other
                    log.warning("command_ignored", entry=entry.id, reason="no manager has signed it")
            if self._current is not None:
                self._apply(self._current)
            entries = await self._read(0.0)

    async def _read(self, block_s: float) -> list[Entry]:
        return await self._bus.retry(lambda bus: bus.read(self._cursors, block_s=block_s))

    def _apply(self, job: Job) -> None:
        if self._jobs.is_cancelled(job.id):
            job.cancelled.set()
        if self._jobs.is_paused(job.id):
            job.unpaused.clear()
        else:
            job.unpaused.set()

    # --- claims: new jobs, and started ones whose trainer is dead ---

    async def _next_job(self) -> Job | None:
        """Claim a job for this trainer, if there is one."""
        if (now := time.monotonic()) - self._takeovers_checked_at >= self._timing.takeover_check_s:
            self._takeovers_checked_at = now
            for entry, contested in await self._takeover_candidates():
                if (job := await self._claim(entry, contested=contested)) is not None:
                    return job
        stream, group = names.JOB_COMMANDS, names.TRAINER_GROUP
        while new := await self._bus.retry(lambda bus: bus.consume(stream, group, self._incarnation, count=1)):
            await self._follow()  # it may be newer than the last command read, and a repetition of one in between
            if await self._end_cancelled(new[0]):
                continue
            if (job := await self._claim(new[0], contested=False)) is not None:
                return job
        return None

    async def _pending(self) -> list[Entry]:
        """Return the commands of jobs that have started and not ended."""
        stream, group = names.JOB_COMMANDS, names.TRAINER_GROUP
        claimed = await self._bus.retry(
            lambda bus: bus.claim(stream, group, self._incarnation, min_idle_s=0, count=_CLAIMED_AT_ONCE)
        )
        return [entry for entry, _ in claimed]

    async def _takeover_candidates(self) -> list[tuple[Entry, bool]]:
        """Return the commands of started jobs that this trainer may take over.

        Each comes with `contested`: True unless this trainer ran the job last. Then several trainers may claim it at
        once, and only the one that gets the lease runs it.
        """
        pending = await self._pending()
        jobs = {
            entry.id: command.job_id
            for entry in pending
            if isinstance(command := entry.message, JobCommand)
            and (entry.id not in self._quarantined or self._jobs.is_cancelled(command.job_id))
        }
        if not jobs:
            return []
        owners = await self._bus.retry(lambda bus: bus.hash_all(names.JOB_TRAINERS))
        held = await self._bus.retry(
            lambda bus: bus.cap_and_read_leases([names.trainer_lease(job_id) for job_id in jobs.values()])
        )
        free = {
            entry_id
            for (entry_id, job_id), holder in zip(jobs.items(), held, strict=True)
            if self._jobs.may_take_over(job_id, owners.get(job_id), held=holder is not None)
        }
        return [(entry, owners.get(jobs[entry.id]) != self._name) for entry in pending if entry.id in free]

    async def _end_cancelled(self, entry: Entry) -> bool:
        """End the job of a new command if it was cancelled before any trainer took it; return True if it was."""
        command = _signed_command(entry, self._token)
        if command is None or not self._jobs.creates(entry.id, command) or not self._jobs.is_cancelled(command.job_id):
            return False
        report = JobReport(job_id=command.job_id, state="cancelled", step=0)
        await self._bus.transact(
            [Append(names.JOB_REPORTS, report), Ack(entry.stream, names.TRAINER_GROUP, (entry.id,))]
        )
        return True

    async def _claim(self, entry: Entry, *, contested: bool) -> Job | None:
        """Return the job of a claimed command if this trainer is to run it."""
        job = await self._job_of(entry)
        if job is None:
            return None
        held = await self._bus.retry(lambda _: self._hold(job))
        # The trainer's own job starts at once: the lease of its earlier process expires while the model is loaded.
        if job.superseded.is_set() or (contested and not held):
            return None
        await self._count_start(job)
        log.info("job_claimed", job=job.id)
        return job

    async def _job_of(self, entry: Entry) -> Job | None:
        """Return the job that a claimed command creates.

        None if it creates none: another command is acknowledged, an invalid entry goes to the dead-letter stream, and a
        job that cannot be parsed is quarantined.
        """
        command = _signed_command(entry, self._token)
        if command is None:
            reason = f"a {entry.message.tag} does not belong in this stream"
            if isinstance(entry.message, JobCommand):
                reason = "no manager has signed this command: give managers and trainers the same RLBOOST_TOKEN"
            await self._bus.retry(lambda bus: bus.dead_letter(entry.stream, names.TRAINER_GROUP, entry, reason))
            return None
        if not self._jobs.creates(entry.id, command):
            # A repetition, or a command of an older protocol, which had all commands in this stream.
            await self._bus.transact([Ack(entry.stream, names.TRAINER_GROUP, (entry.id,))])
            return None
        job_id = command.job_id
        job = Job(
            id=job_id,
            no=command.job_no,
            spec_json=command.spec_json,
            command=entry.id,
            lease=FencedLease(self._bus.raw, names.trainer_lease(job_id), names.trainer_epoch(job_id), LEASE_TTL_S),
            trainer=self._name,
            bus=self._bus,
            device=self._device_of_job(),
            waits=self._waits,
            limit_s=self._samples_limit_s,
        )
        if not self._jobs.is_cancelled(job_id) and (why := _parse_error(job)):
            # It stays unchanged, its command pending, for a trainer that can parse its job file.
            self._quarantined.add(entry.id)
            reason = (
                f"the trainer cannot parse the job file ({why}). The job is unchanged: start the version of rlboost "
                "that wrote it, or cancel the job from a manager that can parse it"
            )
            await job.emit_event("job_quarantined", trainer=self._name, reason=reason)
            return None
        return job

    def _device_of_job(self) -> DeviceThread:
        if not self._shared_device:
            return self._device
        return SharedDevice(
            self._device,
            self._bus,
            self._waits,
            name=self._shared_device,
            trainer=self._name,
            call_limit_s=self._device_call_limit_s,
        )

    async def _count_start(self, job: Job) -> None:
        stored = await self._bus.retry(lambda bus: bus.hash_all(names.JOB_ATTEMPTS))
        last_exit = None if self._last_exit in {KILLED_ON_REQUEST, FAILED_IN_ORDER} else self._last_exit
        job.attempts = Attempts.parse(stored.get(job.id)).started(self._name, last_exit)
        self._last_exit = ""
        counted = HashSet(names.JOB_ATTEMPTS, {job.id: job.attempts.to_json()})
        await self._bus.transact([counted])  # not fenced: it may die before it has the lease

    # --- jobs ---

    async def run_jobs(self, stop: asyncio.Event) -> None:
        """Run jobs until the stop."""
        while not stop.is_set():
            next_job = asyncio.create_task(self._queue.get(), name="next-job")
            await _first_of(stop.wait(), next_job)
            if not next_job.done():
                next_job.cancel()
                return
            job = next_job.result()
            with structlog.contextvars.bound_contextvars(job=job.id):
                try:
                    ending = await self._run(job, stop)
                except Exception as error:
                    await self._count_failure(job, error)
                    raise
                await self._finish(job, ending)
                await self._free_device(job, stop)
            self._current = None

    async def _run(self, job: Job, stop: asyncio.Event) -> _Ending | None:
        """Run a job and return how it ended, None if the stop came first.

        Raises:
            Retryable: Redis or the weight store was unavailable for too long; the job can continue in another process.
            Conflict: another process has committed weights, a trainer believed dead; the job can continue there.

        """
        if job.attempts is not None and (refusal := job.attempts.refusal) and not job.cancelled.is_set():
            job.step = job.attempts.step
            return _Ending("failed", refusal)
        self._waits.take_timed_out()  # before this job
        task = asyncio.create_task(run_job(job, self._build), name=f"job-{job.id}")
        try:
            await _first_of(stop.wait(), job.cancelled.wait(), job.superseded.wait(), task)
        finally:
            task.cancel()
        await asyncio.wait({task})
        await self._report_timeouts(job)
        if task.cancelled():
            return _Ending("cancelled") if job.cancelled.is_set() else None
        error = task.exception()
        if error is not None and any(isinstance(leaf, Fenced) for leaf in leaves(error)):
            log.warning("job_superseded", job=job.id, reason=str(error))
            job.superseded.set()  # a write was fenced before the next renewal of the lease
        if job.superseded.is_set():
            return None
        return _Ending("completed") if error is None else _ending_with(error)

    async def _count_failure(self, job: Job, error: Exception) -> None:
        """Count an error that ends this process as a death of its trainer only if another process of the job died."""
        if job.attempts is None or job.superseded.is_set():
            return
        died = next((str(leaf) for leaf in leaves(error) if isinstance(leaf, ProcessEnded)), None)
        attempts = job.attempts.reached(job.step, "")
        counted = HashSet(names.JOB_ATTEMPTS, {job.id: (attempts if died is None else attempts.died(died)).to_json()})
        with contextlib.suppress(BusUnavailable, Fenced):
            await self._bus.raw.transact([counted], job.lease.fence)

    async def _finish(self, job: Job, ending: _Ending | None) -> None:
        if ending is not None and not job.lease.is_held:
            try:
                await job.wait_for_lease(self._timing.lease_wait_limit_s)
            except WaitTimedOut as error:
                log.warning("job_superseded", job=job.id, reason=str(error))
                job.superseded.set()
            except Fenced:
                pass  # `superseded` is set, which is checked next
        job.is_finished = True
        if job.superseded.is_set():
            return
        ops: list[Op] = []
        if ending is not None:
            ops.append(HashDelete(names.JOB_ATTEMPTS, (job.id,)))
        elif job.attempts is not None:
            stopped = job.attempts.reached(job.step, "")
            ops.append(HashSet(names.JOB_ATTEMPTS, {job.id: stopped.to_json()}))
        if job.lease.is_held:
            ops += job.lease.release_ops(forget_epoch=ending is not None)
        if ending is not None:
            log.info("job_ended", state=ending.state, error=ending.error)
            report = JobReport(job_id=job.id, state=ending.state, step=job.step, error=ending.error, trainer=self._name)
            done = Ack(names.JOB_COMMANDS, names.TRAINER_GROUP, (job.command,))
            owned = HashDelete(names.JOB_TRAINERS, (job.id,))
            ops += [Append(names.JOB_REPORTS, report), done, owned]
        try:
            await self._bus.retry(lambda bus: bus.transact(ops, job.lease.fence))
        except Fenced as error:
            # Another trainer took over; or the transaction succeeded, and only its reply was lost.
            log.warning("job_superseded", job=job.id, reason=str(error))

    async def _free_device(self, job: Job, stop: asyncio.Event) -> None:
        """Wait for the last call of a job that has ended, after which the next job would wait without a limit.

        Raises:
            Fatal: it does not end: the next process of this trainer runs the next job.

        """
        limit_s, because = self._timing.last_call_limit_s, f"a call of job {job.id}, which has ended, still runs"
        try:
            async with self._waits.on("the device", because=because, limit_s=limit_s):
                await _first_of(stop.wait(), self._device.run(lambda: None))
        except WaitTimedOut as error:
            raise Fatal(
                f"a call of job {job.id} still runs {limit_s:g} s after the end of the job, such as a chat template "
                "or a download without end: this process ends, since nothing else stops it; start it again if nothing "
                "does"
            ) from error

    # --- lease ---

    async def renew_lease(self, stop: asyncio.Event) -> None:
        """Renew the lease of the active job until the stop."""
        while not stop.is_set():
            if (job := self._current) is not None and not job.is_finished:
                try:
                    await self._hold(job)
                    await self._report_timeouts(job)
                except BusUnavailable as error:
                    # Let it expire: without Redis, others must assume that this trainer is dead.
                    log.warning("lease_renewal_failed", error=str(error))
            await until_stop(stop, self._timing.lease_renewal_interval_s)

    async def _hold(self, job: Job) -> bool:
        """Acquire or renew the lease of a job, with the job's status as its value; return True if it is held."""
        waiting = self._waits.current()
        status = TrainerStatus(
            trainer=self._incarnation,
            phase=job.phase,
            step=job.step,
            phase_since=job.phase_since,
            price_per_hour=self._price_per_hour,
            waiting=waiting[0] if waiting else None,
            at=time.time(),
        )
        value = status.model_dump_json()

        async def confirm() -> bool:
            is_pending = any(entry.id == job.command for entry in await self._pending())
            if not is_pending:
                job.superseded.set()  # the previous holder has ended the job in the meantime
            return is_pending

        if not job.lease.is_held and not await job.lease.acquire(value, confirm=confirm):
            return False
        owned: list[Op] = [HashSet(names.JOB_TRAINERS, {job.id: self._name})]
        attempts = job.attempts and job.attempts.reached(job.step, "" if job.phase == "paused" else self._name)
        if attempts is not None and attempts != job.attempts:
            owned.append(HashSet(names.JOB_ATTEMPTS, {job.id: attempts.to_json()}))
        try:
            await job.lease.renew(value, owned)
        except Fenced as error:
            log.warning("job_superseded", job=job.id, reason=str(error))
            job.superseded.set()
            return False
        job.attempts = attempts
        job.owns_lease.set()
        return True

    async def _report_timeouts(self, job: Job) -> None:
        """Emit an event for each wait that has reached its limit."""
        for wait in self._waits.take_timed_out():
            await job.emit_event(
                "wait_limit_exceeded", subject=wait.subject, because=wait.because, limit_s=wait.limit_s
            )


class _Ending(NamedTuple):
    """How a job ended."""

    state: JobState
    error: str = ""


def _ending_with(error: BaseException) -> _Ending:
    """Return the job's failure; re-raise an error that is not the job's fault."""
    found = leaves(error)
    for leaf in found:
        if isinstance(leaf, RLBoostError) and is_failure(leaf):
            return _Ending("failed", str(leaf))
    for leaf in found:
        if not isinstance(leaf, RLBoostError):
            log.error("job_crashed", exc_info=leaf)
            return _Ending("failed", f"unexpected {type(leaf).__name__}: {leaf}; the trainer's log has the traceback")
    raise found[0]


def _signed_command(entry: Entry, token: str) -> JobCommand | None:
    """Return the command in an entry, None if no manager has signed one."""
    command = entry.message
    return command if isinstance(command, JobCommand) and is_signed(command, token) else None


def _parse_error(job: Job) -> str:
    """Return why this version cannot parse a stored job, an empty text if it can."""
    try:
        _ = job.spec
    except (ValueError, ConfigError) as error:
        return str(error)
    return ""


async def _first_of(*awaitables: Awaitable[object]) -> None:
    """Wait for the first to end; leave given tasks running, and cancel the other awaitables."""
    tasks = [asyncio.ensure_future(awaitable) for awaitable in awaitables]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task, awaitable in zip(tasks, awaitables, strict=True):
            if task is not awaitable:
                task.cancel()
