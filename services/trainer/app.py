"""The trainer's loops.

*Commands* consumes `jobs.commands`, produces the next job, and pauses and cancellations of the one under way, waits for
the next command, ends at the stop. All trainers read all commands; a job is taken from the consumer group that they
share, by one that has none. Its command stays pending until the job has ended, so that a successor finds it.
*Jobs* runs the job that was taken, produces its last report together with the acknowledgement of its command, ends at
the stop: a job under way is left pending then.
*Lease* renews the lease of the job under way each second, with what the job does and waits for, and ends at the stop.

Two trainers never have one job. Its lease is taken only where nobody holds it, and in the same step of Redis an epoch
is raised; each renewal, and the last report, takes place only while that epoch stands. A trainer that was paused for
longer than its lease finds at its next renewal that it was succeeded, and drops the job without a word.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Awaitable
from typing import NamedTuple

import structlog

from services.trainer.device import DeviceThread
from services.trainer.domain.board import Board
from services.trainer.job import LEASE_LIMIT_S, LEASE_TTL_S, Handle, JobRun
from services.trainer.link import JobLink, PatientBus
from services.trainer.ports import WorkshopFactory
from shared import jobspec, names
from shared.bus import START, Ack, Append, Bus, Delete, Entry, Fence, HashDelete, HashSet, Op, Renew
from shared.errors import BusUnavailable, ConfigError, Conflict, Fenced, Retryable, RLBoostError, Timeout
from shared.ids import new_token
from shared.lifecycle import until_stop
from shared.messages import JobCommand, JobReport, JobState
from shared.waiting import Waits

log = structlog.get_logger(__name__)

LEASE_EVERY_S = 1.0
_BLOCK_S = 0.2
_LOOK_EVERY_S = 1.0
"""How often a trainer without a job looks for one whose trainer is gone."""
_CLAIMED_AT_ONCE = 10_000


class Trainer:
    """Runs jobs, one at a time."""

    def __init__(
        self,
        bus: Bus,
        build: WorkshopFactory,
        device: DeviceThread,
        waits: Waits,
        *,
        name: str,
        outage_limit_s: float,
        samples_limit_s: float,
    ) -> None:
        """Prepare; the loops do the work.

        Args:
            bus: the broker.
            build: makes what a job works with; called on `device`.
            device: where everything that computes runs.
            waits: where waits are listed.
            name: what reserved workers call the trainer whose device they share.
            outage_limit_s: how long the broker may be away.
            samples_limit_s: how long a job waits for a sample.

        """
        self._name = name
        self._incarnation = f"{name}-{new_token()}"
        """Another one after each start, so that a successor is told from a predecessor that may still live."""
        self._bus = PatientBus(bus, waits, outage_limit_s)
        self._build = build
        self._waits = waits
        self._samples_limit_s = samples_limit_s
        self._device = device
        self._board = Board(name)
        self._cursor = START
        self._queue: asyncio.Queue[Handle] = asyncio.Queue()
        self._current: Handle | None = None
        self._aside: set[str] = set()
        """Commands whose job this trainer cannot read, for another to take."""
        self._looked_at = -math.inf
        self._looked = False

    def missing(self) -> str | None:
        """Return what the trainer lacks to do its work, None when it is ready."""
        return None if self._looked else "the jobs that were under way have not been asked for yet"

    # --- commands ---

    async def commands(self, stop: asyncio.Event) -> None:
        """Follow `jobs.commands` until the stop, and take a job whenever there is none."""
        await self._follow()
        while not stop.is_set():
            if self._current is None and (handle := await self._next_job()) is not None:
                self._current = handle
                self._apply(handle)
                self._queue.put_nowait(handle)
            self._looked = True
            await self._follow(block_s=_BLOCK_S)

    async def _follow(self, block_s: float = 0.0) -> None:
        """Take in all commands that are there, having waited for the first."""
        entries = await self._read(block_s)
        while entries:
            for entry in entries:
                self._cursor = entry.id
                if isinstance(command := entry.message, JobCommand):
                    self._board.note(entry.id, command)
                    if self._looked:  # not the history
                        log.info("command", action=command.action, job=command.job_id)
            if self._current is not None:
                self._apply(self._current)
            entries = await self._read(0.0)

    async def _read(self, block_s: float) -> list[Entry]:
        return await self._bus(lambda bus: bus.read({names.JOB_COMMANDS: self._cursor}, block_s=block_s))

    def _apply(self, handle: Handle) -> None:
        if self._board.cancelled(handle.job_id):
            handle.cancelled.set()
        if self._board.paused(handle.job_id):
            handle.unpaused.clear()
        else:
            handle.unpaused.set()

    async def _next_job(self) -> Handle | None:
        """Return a job that is this trainer's from now on, if there is one for it."""
        if (now := time.monotonic()) - self._looked_at >= _LOOK_EVERY_S:
            self._looked_at = now
            for entry, orphaned in await self._begun():
                if (handle := await self._take(entry, orphaned=orphaned)) is not None:
                    return handle
        stream = names.JOB_COMMANDS
        new = await self._bus(lambda bus: bus.consume(stream, names.TRAINER_GROUP, self._incarnation, count=1))
        if not new:
            return None
        await self._follow()  # it may be younger than what was read, and repeat something between
        return await self._take(new[0], orphaned=False)

    async def _begun(self) -> list[tuple[Entry, bool]]:
        """Return the commands of jobs that were begun and have not ended, if they may be taken over.

        With each: whether it was another trainer's, so that others may be taking it at this moment.
        """
        claimed = await self._pending()
        jobs = {e.id: e.message.job_id for e, _ in claimed if isinstance(e.message, JobCommand)}
        jobs = {entry: job for entry, job in jobs.items() if entry not in self._aside or self._board.cancelled(job)}
        if not jobs:
            return []
        owners = await self._bus(lambda bus: bus.hash_all(names.JOB_TRAINERS))
        held = await self._bus(lambda bus: bus.holders([names.trainer_lease(job) for job in jobs.values()]))
        free = {
            entry_id
            for (entry_id, job), holder in zip(jobs.items(), held, strict=True)
            if self._board.may_take_over(job, owners.get(job), held=holder is not None)
        }
        return [(entry, owners.get(jobs[entry.id]) != self._name) for entry, _ in claimed if entry.id in free]

    async def _take(self, entry: Entry, *, orphaned: bool) -> Handle | None:
        command = entry.message
        if not isinstance(command, JobCommand):
            reason = f"a {command.tag} does not belong in this stream"
            await self._bus(lambda bus: bus.bury(entry.stream, names.TRAINER_GROUP, entry, reason))
            return None
        if not self._board.creates(entry.id, command):
            # What users want of a job, each trainer reads for itself.
            await self._bus.transact([Ack(entry.stream, names.TRAINER_GROUP, (entry.id,))])
            return None
        if not self._board.cancelled(command.job_id) and (why := _unreadable(command.spec_json)):
            await self._set_aside(entry.id, command.job_id, why)
            return None
        handle = Handle(command.job_id, command.job_no, command.spec_json, entry.id)
        held = await self._bus(lambda _: self._hold(handle))
        # A job of one's own is begun at once: a predecessor's lease runs out while the model is loaded.
        if handle.superseded.is_set() or (orphaned and not held):
            return None
        log.info("job_taken", job=command.job_id)
        return handle

    async def _set_aside(self, command: str, job_id: str, why: str) -> None:
        """Leave a job as it is, its command pending, for a trainer that can read it."""
        self._aside.add(command)
        reason = (
            f"set aside: the trainer cannot read its job file ({why}). Nothing of the job is changed: start the "
            "version of rlboost that wrote it; a manager that can read it can cancel it, too"
        )
        await JobLink(self._bus, job_id).tell("job_set_aside", trainer=self._name, reason=reason)

    # --- jobs ---

    async def jobs(self, stop: asyncio.Event) -> None:
        """Run jobs until the stop."""
        while not stop.is_set():
            coming = asyncio.create_task(self._queue.get(), name="next-job")
            await _first_of(stop.wait(), coming)
            if not coming.done():
                coming.cancel()
                return
            handle = coming.result()
            with structlog.contextvars.bound_contextvars(job=handle.job_id):
                await self._finish(handle, await self._run(handle, stop))
            self._current = None

    async def _run(self, handle: Handle, stop: asyncio.Event) -> Ending | None:
        """Run a job and say how it ended, None when the stop came first.

        Raises:
            Retryable: Redis or the weight store was away for too long; the job can go on in another process.
            Conflict: somebody else has committed weights, a trainer that was thought dead: so, too, in another process.

        """
        job = asyncio.create_task(self._train(handle), name=f"job-{handle.job_id}")
        try:
            await _first_of(stop.wait(), handle.cancelled.wait(), handle.superseded.wait(), job)
        finally:
            job.cancel()
        await asyncio.wait({job})
        if job.cancelled():
            return Ending("cancelled") if handle.cancelled.is_set() else None
        error = job.exception()
        if handle.superseded.is_set():
            return None
        return Ending("completed") if error is None else _ending_with(error)

    async def _train(self, handle: Handle) -> None:
        spec = jobspec.recalled(json.loads(handle.spec_json))
        run = JobRun(handle, spec, self._bus, self._device, self._waits, self._samples_limit_s, self._name)
        await run.run(self._build)

    async def _finish(self, handle: Handle, ending: Ending | None) -> None:
        if ending is not None and handle.fence is None:
            await self._wait_for_lease(handle)
        handle.left = True
        if handle.superseded.is_set():
            return
        ops: list[Op] = []
        if handle.fence is not None:
            ops.append(Delete(names.trainer_lease(handle.job_id)))
        if ending is not None:
            log.info("job_ended", state=ending.state, error=ending.error)
            report = JobReport(
                job_id=handle.job_id, state=ending.state, step=handle.step, error=ending.error, trainer=self._name
            )
            done = Ack(names.JOB_COMMANDS, names.TRAINER_GROUP, (handle.command,))
            owned = HashDelete(names.JOB_TRAINERS, (handle.job_id,))
            ops += [Append(names.JOB_REPORTS, report), done, owned, Delete(names.trainer_epoch(handle.job_id))]
        try:
            await self._bus(lambda bus: bus.transact(ops, handle.fence))
        except Fenced as error:
            # Or it has taken place, and the answer was lost.
            log.warning("job_left_to_another", job=handle.job_id, reason=str(error))

    async def _wait_for_lease(self, handle: Handle) -> None:
        """Return once the job is this trainer's; one that another trainer still has is that one's to end."""
        because = "another trainer held it last, and may still"
        try:
            async with self._waits.on("the lease of the job", because=because, limit_s=LEASE_LIMIT_S):
                await _first_of(handle.owns_lease.wait(), handle.superseded.wait())
        except Timeout as error:
            log.warning("job_left_to_another", job=handle.job_id, reason=str(error))
            handle.superseded.set()

    # --- lease ---

    async def lease(self, stop: asyncio.Event) -> None:
        """Show what the job under way does, until the stop."""
        while not stop.is_set():
            if (handle := self._current) is not None and not handle.left:
                try:
                    await self._hold(handle)
                except BusUnavailable as error:
                    # It runs out, which is the truth: nobody can tell that the trainer is alive.
                    log.warning("lease_not_renewed", error=str(error))
            await until_stop(stop, LEASE_EVERY_S)

    async def _hold(self, handle: Handle) -> bool:
        """Take the lease of a job, or renew it, and say what the job does; tell whether it is this trainer's."""
        waiting = self._waits.current()
        body = {
            "trainer": self._incarnation,
            "phase": handle.phase,
            "step": handle.step,
            "waiting": waiting[0].public() if waiting else None,
        }
        lease, epoch, value = names.trainer_lease(handle.job_id), names.trainer_epoch(handle.job_id), json.dumps(body)
        if handle.fence is None:
            instead_of, handle.tried = handle.tried, value
            taken = await self._bus.raw.take(lease, value, LEASE_TTL_S, epoch=epoch, instead_of=instead_of)
            if taken is None:
                return False
            fence = Fence(epoch, taken)
            if not await self._is_to_be_done(handle):
                # Whoever had the lease has ended the job meanwhile.
                handle.superseded.set()
                await self._bus.raw.transact([Delete(lease), Delete(epoch)], fence)
                return False
            handle.fence = fence
        mine = HashSet(names.JOB_TRAINERS, {handle.job_id: self._name})
        try:
            await self._bus.raw.transact([Renew(lease, value, LEASE_TTL_S), mine], handle.fence)
        except Fenced as error:
            log.warning("superseded", job=handle.job_id, reason=str(error))
            handle.superseded.set()
            return False
        handle.owns_lease.set()
        return True

    async def _is_to_be_done(self, handle: Handle) -> bool:
        """Tell whether the job's command is pending still, whichever trainer it was given to."""
        pending = await self._pending()
        return any(entry.id == handle.command for entry, _ in pending)

    async def _pending(self) -> list[tuple[Entry, int]]:
        stream, group = names.JOB_COMMANDS, names.TRAINER_GROUP
        return await self._bus(
            lambda bus: bus.claim(stream, group, self._incarnation, min_idle_s=0, count=_CLAIMED_AT_ONCE)
        )


class Ending(NamedTuple):
    """How a job ended."""

    state: JobState
    error: str = ""


def _unreadable(spec_json: str) -> str:
    """Say why a stored job is not one for this version, nothing if it is."""
    try:
        jobspec.recalled(json.loads(spec_json))
    except (ValueError, ConfigError) as error:
        return str(error)
    return ""


def _ending_with(error: BaseException) -> Ending:
    """Return the failure that an error is for the job, unless it is none of the job's."""
    leaves = _leaves(error)
    for leaf in leaves:
        if isinstance(leaf, RLBoostError) and not isinstance(leaf, Retryable | Conflict):
            return Ending("failed", str(leaf))
    for leaf in leaves:
        if not isinstance(leaf, RLBoostError):
            log.error("job_broke", exc_info=leaf)
            return Ending("failed", f"unexpected {type(leaf).__name__}: {leaf}; the trainer's log has the traceback")
    raise leaves[0]


def _leaves(error: BaseException) -> list[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        return [leaf for inner in error.exceptions for leaf in _leaves(inner)]
    return [error]


async def _first_of(*awaitables: Awaitable[object]) -> None:
    """Wait for the first; tasks are left running, the rest is cancelled."""
    tasks = [asyncio.ensure_future(awaitable) for awaitable in awaitables]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task, awaitable in zip(tasks, awaitables, strict=True):
            if task is not awaitable:
                task.cancel()
