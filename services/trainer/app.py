"""The trainer's loops.

*Commands* consumes `jobs.commands`, produces the queue of jobs and their pauses and cancellations, waits for the next
command, ends at the stop. A command stays pending until its job has ended: what a killed trainer knew of a job, its
successor is told again.
*Jobs* consumes the queue, runs one job at a time, produces its last report together with the acknowledgement of its
commands, ends at the stop: a job under way is left pending then.
*Lease* renews the lease of the job under way each second, with what the job does and waits for, and ends at the stop.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable
from typing import NamedTuple

import structlog

from services.trainer.device import DeviceThread
from services.trainer.job import LEASE_TTL_S, Handle, JobRun
from services.trainer.link import PatientBus
from services.trainer.ports import WorkshopFactory
from shared import jobspec, names
from shared.bus import Ack, Append, Bus, Delete, Entry
from shared.errors import BusUnavailable, Retryable, RLBoostError
from shared.ids import new_token
from shared.lifecycle import until_stop
from shared.messages import JobCommand, JobReport, JobState
from shared.waiting import Waits

log = structlog.get_logger(__name__)

LEASE_EVERY_S = 1.0
_BLOCK_S = 0.2
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
        self._jobs: dict[str, Handle] = {}
        self._queue: asyncio.Queue[Handle] = asyncio.Queue()
        self._current: Handle | None = None
        self._claimed = False

    def missing(self) -> str | None:
        """Return what the trainer lacks to do its work, None when it is ready."""
        return None if self._claimed else "the jobs that were under way have not been asked for yet"

    # --- commands ---

    async def commands(self, stop: asyncio.Event) -> None:
        """Follow `jobs.commands` until the stop."""
        stream, group = names.JOB_COMMANDS, names.TRAINER_GROUP
        claimed = await self._bus(
            lambda bus: bus.claim(stream, group, self._incarnation, min_idle_s=0, count=_CLAIMED_AT_ONCE)
        )
        for entry, _ in claimed:
            await self._take(entry)
        self._claimed = True
        while not stop.is_set():
            for entry in await self._bus(lambda bus: bus.consume(stream, group, self._incarnation, block_s=_BLOCK_S)):
                await self._take(entry)

    async def _take(self, entry: Entry) -> None:
        command = entry.message
        if not isinstance(command, JobCommand):
            reason = f"a {command.tag} does not belong in this stream"
            await self._bus(lambda bus: bus.bury(entry.stream, names.TRAINER_GROUP, entry, reason))
            return
        handle = self._jobs.get(command.job_id)
        log.info("command", action=command.action, job=command.job_id, known=handle is not None)
        match command.action, handle:
            case "create", None:
                handle = Handle(command.job_id, command.job_no, command.spec_json, commands=[entry.id])
                handle.unpaused.set()
                self._jobs[command.job_id] = handle
                self._queue.put_nowait(handle)
            case "pause", Handle():
                handle.pauses.append(entry.id)
                handle.unpaused.clear()
            case "resume", Handle():
                await self._ack([*handle.pauses, entry.id])
                handle.pauses.clear()
                handle.unpaused.set()
            case "cancel", Handle():
                handle.commands.append(entry.id)
                handle.cancelled.set()
            case _:
                # A job that has ended, or a command that was sent twice.
                await self._ack([entry.id])

    async def _ack(self, ids: list[str]) -> None:
        await self._bus.transact([Ack(names.JOB_COMMANDS, names.TRAINER_GROUP, tuple(ids))])

    # --- jobs ---

    async def jobs(self, stop: asyncio.Event) -> None:
        """Run jobs until the stop."""
        while not stop.is_set():
            coming = asyncio.create_task(self._queue.get(), name="next-job")
            await _first_of(stop.wait(), coming)
            if not coming.done():
                coming.cancel()
                return
            handle = self._current = coming.result()
            with structlog.contextvars.bound_contextvars(job=handle.job_id):
                await self._finish(handle, await self._run(handle, stop))
            self._current = None

    async def _run(self, handle: Handle, stop: asyncio.Event) -> Ending | None:
        """Run a job and say how it ended, None when the stop came first.

        Raises:
            Retryable: Redis or the weight store was away for too long; the job can go on in another process.

        """
        job = asyncio.create_task(self._train(handle), name=f"job-{handle.job_id}")
        try:
            await _first_of(stop.wait(), handle.cancelled.wait(), job)
        finally:
            job.cancel()
        await asyncio.wait({job})
        if job.cancelled():
            return Ending("cancelled") if handle.cancelled.is_set() else None
        error = job.exception()
        return Ending("completed") if error is None else _ending_with(error)

    async def _train(self, handle: Handle) -> None:
        spec = jobspec.parse(json.loads(handle.spec_json))
        run = JobRun(handle, spec, self._bus, self._device, self._waits, self._samples_limit_s, self._name)
        await run.run(self._build)

    async def _finish(self, handle: Handle, ending: Ending | None) -> None:
        if handle.owns_lease.is_set():
            lease = names.trainer_lease(handle.job_id)
            await self._bus.transact([Delete(lease)])
        if ending is None:
            return
        log.info("job_ended", state=ending.state, error=ending.error)
        report = JobReport(
            job_id=handle.job_id, state=ending.state, step=handle.step, error=ending.error, trainer=self._name
        )
        done = Ack(names.JOB_COMMANDS, names.TRAINER_GROUP, (*handle.commands, *handle.pauses))
        await self._bus.transact([Append(names.JOB_REPORTS, report), done])
        del self._jobs[handle.job_id]

    # --- lease ---

    async def lease(self, stop: asyncio.Event) -> None:
        """Show what the job under way does, until the stop."""
        while not stop.is_set():
            if (handle := self._current) is not None:
                try:
                    await self._renew(handle)
                except BusUnavailable as error:
                    # It runs out, which is the truth: nobody can tell that the trainer is alive.
                    log.warning("lease_not_renewed", error=str(error))
            await until_stop(stop, LEASE_EVERY_S)

    async def _renew(self, handle: Handle) -> None:
        lease = names.trainer_lease(handle.job_id)
        [held] = await self._bus.raw.holders([lease])
        if held is not None and json.loads(held)["trainer"] != self._incarnation:
            handle.owns_lease.clear()
            return
        waiting = self._waits.current()
        body = {
            "trainer": self._incarnation,
            "phase": handle.phase,
            "step": handle.step,
            "waiting": waiting[0].public() if waiting else None,
        }
        await self._bus.raw.renew(lease, json.dumps(body), LEASE_TTL_S)
        handle.owns_lease.set()


class Ending(NamedTuple):
    """How a job ended."""

    state: JobState
    error: str = ""


def _ending_with(error: BaseException) -> Ending:
    """Return the failure that an error is for the job, unless it is none of the job's."""
    leaves = _leaves(error)
    for leaf in leaves:
        if isinstance(leaf, RLBoostError) and not isinstance(leaf, Retryable):
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
