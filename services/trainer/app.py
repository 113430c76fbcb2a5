"""The trainer's loops.

*Commands*. Consumes: `jobs.commands`. Produces: the next job for *jobs*; pauses and cancellations of the active job.
Waits for: the next command, which the rollout manager appends. Ends when: the service stops. All trainers read all
commands and apply those that a manager has signed. A job itself is claimed from their common consumer group, by a
trainer without a job; its command stays pending until the job has ended, so that another trainer can take over.

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
import json
import math
import time
from collections.abc import Awaitable
from dataclasses import dataclass

import structlog

from rlboost.services.trainer.claims import JobClaims, signed_command
from rlboost.services.trainer.domain.job_states import JobStates
from rlboost.services.trainer.ending import Ending, ending_with
from rlboost.services.trainer.job.active import LEASE_WAIT_LIMIT_S, ActiveJob, JobHost
from rlboost.services.trainer.job.run import run_job
from rlboost.services.trainer.ports.resources import JobResourcesFactory
from rlboost.services.trainer.runtime.device import DeviceThread
from rlboost.services.trainer.runtime.job_streams import JobStreams, RetryingBus
from rlboost.shared.errors import BusUnavailable, Fenced, WaitTimedOut, leaves
from rlboost.shared.ids import new_token
from rlboost.shared.job import spec as job_spec
from rlboost.shared.messages import JobReport, TrainerStatus
from rlboost.shared.process.lifecycle import until_stop
from rlboost.shared.process.waiting import Waits
from rlboost.shared.streams import names
from rlboost.shared.streams.bus import Ack, Append, Bus, HashDelete, HashSet, Op
from rlboost.shared.streams.entries import START, Entry

log = structlog.get_logger(__name__)


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
        build: JobResourcesFactory,
        device: DeviceThread,
        waits: Waits,
        *,
        name: str,
        token: str,
        limits: Limits,
        timing: Timing = Timing(),
        price_per_hour: float = 0.0,
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

        """
        self._name = name
        self._token = token
        self._price_per_hour = price_per_hour
        self._incarnation = f"{name}-{new_token()}"
        """Unique per process, to distinguish a restarted trainer from an earlier process that may still run."""
        self._bus = RetryingBus(bus, waits, limits.outage_s)
        self._build = build
        self._waits = waits
        self._host = JobHost(name, self._bus, device, waits, limits.samples_s)
        self._jobs = JobStates(name)
        self._claims = JobClaims(self._bus, self._jobs, name=name, incarnation=self._incarnation, token=token)
        self._timing = timing
        self._cursor = START
        self._queue: asyncio.Queue[ActiveJob] = asyncio.Queue()
        self._current: ActiveJob | None = None
        self._takeovers_checked_at = -math.inf
        self._is_caught_up = False

    def not_ready_reason(self) -> str | None:
        """Return why the trainer is not ready, None if it is."""
        return None if self._is_caught_up else "the job commands are not read yet"

    def active_jobs(self) -> list[str]:
        """Return the id of the job that runs here, if there is one."""
        return [self._current.job_id] if self._current is not None else []

    # --- commands ---

    async def follow_commands(self, stop: asyncio.Event) -> None:
        """Apply `jobs.commands` until the stop, and claim a job whenever there is none."""
        await self._follow()
        while not stop.is_set():
            if self._current is None and (job := await self._next_job()) is not None:
                self._current = job
                self._apply(job)
                self._queue.put_nowait(job)
            self._is_caught_up = True
            await self._follow(block_s=self._timing.block_s)

    async def _follow(self, block_s: float = 0.0) -> None:
        """Apply all commands in the stream, after waiting up to `block_s` for the first."""
        entries = await self._read(block_s)
        while entries:
            for entry in entries:
                self._cursor = entry.id
                if (command := signed_command(entry, self._token)) is not None:
                    self._jobs.apply(entry.id, command)
                    if self._is_caught_up:  # not for commands from before the start
                        log.info("command_applied", action=command.action, job=command.job_id)
            if self._current is not None:
                self._apply(self._current)
            entries = await self._read(0.0)

    async def _read(self, block_s: float) -> list[Entry]:
        return await self._bus(lambda bus: bus.read({names.JOB_COMMANDS: self._cursor}, block_s=block_s))

    def _apply(self, job: ActiveJob) -> None:
        if self._jobs.is_cancelled(job.job_id):
            job.cancelled.set()
        if self._jobs.is_paused(job.job_id):
            job.unpaused.clear()
        else:
            job.unpaused.set()

    async def _next_job(self) -> ActiveJob | None:
        """Claim a job for this trainer, if there is one."""
        if (now := time.monotonic()) - self._takeovers_checked_at >= self._timing.takeover_check_s:
            self._takeovers_checked_at = now
            for entry, contested in await self._claims.takeover_candidates():
                if (job := await self._claim(entry, contested=contested)) is not None:
                    return job
        new = await self._claims.next_command()
        if new is None:
            return None
        await self._follow()  # it may be newer than the last command read, and a repetition of one in between
        return await self._claim(new, contested=False)

    async def _claim(self, entry: Entry, *, contested: bool) -> ActiveJob | None:
        """Return the job of a claimed command if this trainer is to run it."""
        job = await self._claims.job_of(entry)
        if job is None:
            return None
        held = await self._bus(lambda _: self._hold(job))
        # The trainer's own job starts at once: the lease of its earlier process expires while the model is loaded.
        if job.superseded.is_set() or (contested and not held):
            return None
        log.info("job_claimed", job=job.job_id)
        return job

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
            with structlog.contextvars.bound_contextvars(job=job.job_id):
                await self._finish(job, await self._run(job, stop))
            self._current = None

    async def _run(self, job: ActiveJob, stop: asyncio.Event) -> Ending | None:
        """Run a job and return how it ended, None if the stop came first.

        Raises:
            Retryable: Redis or the weight store was unavailable for too long; the job can continue in another process.
            Conflict: another process has committed weights, a trainer believed dead; the job can continue there.

        """
        self._waits.take_timed_out()  # before this job
        task = asyncio.create_task(self._train(job), name=f"job-{job.job_id}")
        try:
            await _first_of(stop.wait(), job.cancelled.wait(), job.superseded.wait(), task)
        finally:
            task.cancel()
        await asyncio.wait({task})
        await self._report_timeouts(job)
        if task.cancelled():
            return Ending("cancelled") if job.cancelled.is_set() else None
        error = task.exception()
        if error is not None and any(isinstance(leaf, Fenced) for leaf in leaves(error)):
            log.warning("job_superseded", job=job.job_id, reason=str(error))
            job.superseded.set()  # a write was fenced before the next renewal of the lease
        if job.superseded.is_set():
            return None
        return Ending("completed") if error is None else ending_with(error)

    async def _train(self, job: ActiveJob) -> None:
        spec = job_spec.parse_stored(json.loads(job.spec_json))
        await run_job(job, spec, self._host, self._build)

    async def _finish(self, job: ActiveJob, ending: Ending | None) -> None:
        if ending is not None and not job.lease.is_held:
            try:
                await job.wait_for_lease(self._waits, self._timing.lease_wait_limit_s)
            except WaitTimedOut as error:
                log.warning("job_superseded", job=job.job_id, reason=str(error))
                job.superseded.set()
            except Fenced:
                pass  # `superseded` is set, which is checked next
        job.is_finished = True
        if job.superseded.is_set():
            return
        ops: list[Op] = []
        if job.lease.is_held:
            ops += job.lease.release_ops(forget_epoch=ending is not None)
        if ending is not None:
            log.info("job_ended", state=ending.state, error=ending.error)
            report = JobReport(
                job_id=job.job_id, state=ending.state, step=job.step, error=ending.error, trainer=self._name
            )
            done = Ack(names.JOB_COMMANDS, names.TRAINER_GROUP, (job.command,))
            owned = HashDelete(names.JOB_TRAINERS, (job.job_id,))
            ops += [Append(names.JOB_REPORTS, report), done, owned]
        try:
            await self._bus(lambda bus: bus.transact(ops, job.lease.fence))
        except Fenced as error:
            # Another trainer took over; or the transaction succeeded, and only its reply was lost.
            log.warning("job_superseded", job=job.job_id, reason=str(error))

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

    async def _hold(self, job: ActiveJob) -> bool:
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

        async def is_pending() -> bool:
            pending = await self._claims.is_pending(job.command)
            if not pending:
                job.superseded.set()  # the previous holder has ended the job in the meantime
            return pending

        if not job.lease.is_held and not await job.lease.acquire(value, confirm=is_pending):
            return False
        try:
            await job.lease.renew(value, [HashSet(names.JOB_TRAINERS, {job.job_id: self._name})])
        except Fenced as error:
            log.warning("job_superseded", job=job.job_id, reason=str(error))
            job.superseded.set()
            return False
        job.owns_lease.set()
        return True

    async def _report_timeouts(self, job: ActiveJob) -> None:
        """Emit an event for each wait that has reached its limit."""
        streams = JobStreams(self._bus, job.job_id)
        for wait in self._waits.take_timed_out():
            await streams.emit_event(
                "wait_limit_exceeded", subject=wait.subject, because=wait.because, limit_s=wait.limit_s
            )


async def _first_of(*awaitables: Awaitable[object]) -> None:
    """Wait for the first to end; leave given tasks running, and cancel the other awaitables."""
    tasks = [asyncio.ensure_future(awaitable) for awaitable in awaitables]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task, awaitable in zip(tasks, awaitables, strict=True):
            if task is not awaitable:
                task.cancel()
