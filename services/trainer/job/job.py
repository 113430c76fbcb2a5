"""A claimed job: its identity, file, lease, resources, streams, waits and device, which all parts of its run share.

The trainer's loops create it, set its events and renew its lease. `run.run_job` builds its resources and runs it.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from typing import Any, Literal, TypeVar

import structlog

from rlboost.services.trainer.domain.job_states import Attempts
from rlboost.services.trainer.domain.plan import PlannedGroup
from rlboost.services.trainer.domain.warnings import FaultWarnings
from rlboost.services.trainer.ports.samples import Prompt
from rlboost.services.trainer.ports.storage import JobResources
from rlboost.shared.errors import BusUnavailable, ConfigError, DiskFull, Fatal, Fenced, WaitTimedOut
from rlboost.shared.job.base import UntrainedJob
from rlboost.shared.job.fleet import SamplingSpec
from rlboost.shared.job.offline import OfflineJob
from rlboost.shared.job.spec import GeneratingJob, JobSpec, parse_stored
from rlboost.shared.messages import Event, JobReport, JobState
from rlboost.shared.process.logs import IN_EVENTS
from rlboost.shared.process.waiting import Waits, retry_while
from rlboost.shared.streams import names
from rlboost.shared.streams.bus import Append, Bus, Op, position
from rlboost.shared.streams.fenced_lease import FencedLease

log = structlog.get_logger(__name__)

T = TypeVar("T")

# --- What the jobs of one trainer share: the thread of all computation, and the broker with retries -------------------


class DeviceThread:
    """One thread for all computation: the event loop stays free, and a cancelled job never waits for a kernel."""

    waited_s = 0.0
    """How long calls have waited for other trainers' jobs on the device."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="device")

    @property
    def is_shared(self) -> bool:
        """Return True if jobs of other trainers use the device in turns with this one's."""
        return False

    @asynccontextmanager
    async def turns(self, job: Job) -> AsyncIterator[None]:
        """Let a job compute until the body ends; on a shared device it takes turns."""
        del job
        yield

    async def compute(self, call: Callable[[], T]) -> T:
        """Run a call that uses the device, not only its thread."""
        return await self.run(call)

    async def run(self, call: Callable[[], T]) -> T:
        """Return the result of the call. Calls run one at a time, in the order in which they were made.

        If the caller is cancelled, a started call still runs to its end.
        """
        return await asyncio.get_running_loop().run_in_executor(self._executor, call)

    def post(self, call: Callable[[], object]) -> Future[object]:
        """Queue a call without waiting for it."""
        return self._executor.submit(call)

    def close(self) -> None:
        """Accept no more calls; drop calls that have not started."""
        self._executor.shutdown(wait=False, cancel_futures=True)


class RetryingBus:
    """`Bus` that retries calls while Redis is unavailable.

    Retrying is safe: every message of the trainer is idempotent on its own ids.
    """

    def __init__(self, bus: Bus, waits: Waits, limit_s: float) -> None:
        """Wrap a bus; retry for at most `limit_s` per outage."""
        self.raw = bus
        self._waits = waits
        self._limit_s = limit_s

    async def retry(self, call: Callable[[Bus], Awaitable[T]]) -> T:
        """Return the result of `call(bus)`, once the bus answers.

        Raises:
            BusUnavailable: it did not answer within the limit.

        """
        try:
            return await call(self.raw)
        except BusUnavailable as error:
            first = error
        try:
            async with self._waits.on("Redis", because=str(first), limit_s=self._limit_s):
                return await retry_while(
                    BusUnavailable, lambda: call(self.raw), first_s=0.05, longest_s=1.0, jitter_s=0.0
                )
        except WaitTimedOut as error:
            raise BusUnavailable(f"{first}; gave up after {self._limit_s:.0f} s: start Redis again") from error

    async def transact(self, ops: Sequence[Op]) -> None:
        await self.retry(lambda bus: bus.transact(ops))


async def job_record(bus: RetryingBus, job_id: str) -> dict[str, Any] | None:
    """Return the manager's record of a job; None if there is no such job."""
    text = await bus.retry(lambda raw: raw.hash_get(names.JOBS, job_id))
    record: dict[str, Any] | None = None if text is None else json.loads(text)
    return record


# --- The job ----------------------------------------------------------------------------------------------------------


LEASE_TTL_S = 5.0
LEASE_WAIT_LIMIT_S = 4 * LEASE_TTL_S
"""How long a trainer waits for the lease of a job that another trainer held."""
PAUSE_LIMIT_S = 30 * 24 * 3600.0
SPACE_LIMIT_S = 3600.0
"""How long a write waits for disk space. One that has started then may take as long again."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 10.0, 300.0
"""Pauses before attempts, which double: each attempt fills the disk for a moment, which other services may share."""
MAX_SAMPLES = 2_000
"""Entries of the job's samples stream."""


Phase = Literal["starting", "training", "evaluating", "publishing", "paused", "finishing"]
"""What a trainer does for a job."""


@dataclass(eq=False)
class Job:
    """A job that this trainer has claimed."""

    id: str
    no: int
    spec_json: str
    command: str
    """Id of the entry in `jobs.commands` that created it, which stays pending until the job has ended."""
    lease: FencedLease
    trainer: str
    """The trainer's name."""
    bus: RetryingBus
    device: DeviceThread
    waits: Waits
    limit_s: float
    """How long the job waits for a sample or its device."""
    resources: JobResources = field(init=False, repr=False)
    """Only during `run_job`, which builds them before any other part of the run."""
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)
    unpaused: asyncio.Event = field(default_factory=asyncio.Event)
    owns_lease: asyncio.Event = field(default_factory=asyncio.Event)
    superseded: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once another trainer has taken over the job: report nothing more."""
    attempts: Attempts | None = None
    """None until the job's start is counted."""
    is_finished: bool = False
    """True once the job has ended here: its lease is no longer renewed."""
    phase: Phase = "starting"
    step: int = 0
    phase_since: float = field(default_factory=time.time)
    """When the phase began (Unix seconds)."""
    faults: FaultWarnings = field(default_factory=FaultWarnings)

    @cached_property
    def spec(self) -> JobSpec:
        """The job file.

        Raises:
            ConfigError, ValueError: this version cannot parse it.

        """
        spec = parse_stored(json.loads(self.spec_json))
        if isinstance(spec, UntrainedJob):
            raise ConfigError(f"a job of kind {spec.kind} is not run by the trainer service")
        return spec

    @property
    def generating_spec(self) -> GeneratingJob:
        """Return the file of a job whose samples workers generate."""
        assert not isinstance(self.spec, OfflineJob)
        return self.spec

    @property
    def created(self) -> datetime:
        """Return when the job was created, by the clock of Redis."""
        return datetime.fromtimestamp(position(self.command)[0] / 1000, UTC)

    def sampling(self, group: PlannedGroup) -> SamplingSpec:
        """Return how the samples of a group are drawn."""
        return self.generating_spec.sampling if group.held_out is None else group.held_out.sampling

    def prompt(self, group: PlannedGroup) -> Prompt:
        """Return the prompt of a group."""
        data = self.resources.data
        return (data.evaluation if group.is_eval else data.train)[group.row]

    # --- state and lease ---

    def enter(self, phase: Phase, step: int) -> None:
        """Begin a phase."""
        self.phase, self.step, self.phase_since = phase, step, time.time()

    async def report(self, state: JobState, step: int) -> None:
        """Report to the manager that the job runs or is paused."""
        report = JobReport(job_id=self.id, state=state, step=step, trainer=self.trainer)
        await self.bus.transact([Append(names.JOB_REPORTS, report)])

    async def wait_while_paused(self, step: int) -> None:
        """Wait while the job is paused; call it before each step."""
        if self.unpaused.is_set():
            return
        self.enter("paused", step)
        await self.report("paused", step)
        async with self.waits.on("a resume", because="the job was paused", limit_s=PAUSE_LIMIT_S):
            await self.unpaused.wait()
        await self.report("running", step)

    async def wait_for_lease(self, limit_s: float) -> None:
        """Wait until this trainer holds the job's lease: that of a dead trainer expires, a live one keeps it.

        Raises:
            Fenced: another trainer took over the job in the meantime.
            WaitTimedOut: another trainer still holds the lease after `limit_s`.

        """
        waiters = [
            asyncio.create_task(self.owns_lease.wait(), name=f"owns-lease-{self.id}"),
            asyncio.create_task(self.superseded.wait(), name=f"superseded-{self.id}"),
        ]
        try:
            async with self.waits.on("the lease of the job", because="another trainer held it last", limit_s=limit_s):
                await asyncio.wait(waiters, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for waiter in waiters:
                waiter.cancel()
        if not self.owns_lease.is_set():
            raise Fenced(f"job {self.id}: another trainer took it over")

    # --- events and samples for people: lost while Redis is down, because no decision uses them ---

    async def emit_event(self, kind: str, **fields: Any) -> None:
        """Log an event and append it to the job's events."""
        log.info(kind, **{IN_EVENTS: True}, **fields)
        await self._append([Append(names.job_events(self.id), _event(kind, fields), names.MAX_EVENTS)])

    async def warn(self, *texts: str) -> None:
        """Emit a warning per text that is not empty."""
        for text in filter(None, texts):
            await self.emit_event("warning", text=text)

    async def publish_samples(self, samples: Sequence[dict[str, Any]]) -> None:
        """Append scored samples to the job's samples."""
        stream = names.job_samples(self.id)
        await self._append([Append(stream, _event("sample_scored", fields), MAX_SAMPLES) for fields in samples])

    async def _append(self, ops: Sequence[Op]) -> None:
        try:
            await self.bus.raw.transact(ops)
        except BusUnavailable as error:
            log.warning("events_dropped", error=str(error), events=len(ops))

    # --- writes that wait for a full disk, so that the job ends only if no space is freed ---

    async def write(self, write: Callable[[], T]) -> T:
        """Return the result of a write into the job's folder, in the device's thread; see `until_space`."""
        return await self.until_space("the job's folder", lambda: self.device.run(write))

    async def until_space(self, what: str, write: Callable[[], Awaitable[T]]) -> T:
        """Return the result of `write`, which is called again as long as it raises `DiskFull`.

        Raises:
            Fatal: the disk was full for longer than `SPACE_LIMIT_S`.

        """
        try:
            return await write()
        except DiskFull as error:
            reason = str(error)
        await self.emit_event("disk_full", what=what, reason=reason)
        pause_s, until = FIRST_PAUSE_S, time.monotonic() + SPACE_LIMIT_S
        async with self.waits.on(f"disk space for {what}", because=reason, limit_s=2 * SPACE_LIMIT_S):
            while time.monotonic() < until:
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
                try:
                    return await write()
                except DiskFull as error:
                    reason = str(error)
        raise Fatal(
            f"{reason}; the disk was still full after {SPACE_LIMIT_S:.0f} s: free space, then create the job again "
            "with trainer.resume"
        )


def _event(kind: str, fields: dict[str, Any]) -> Event:
    return Event(kind=kind, at=time.time(), source="trainer", fields=fields)
