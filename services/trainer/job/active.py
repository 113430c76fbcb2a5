"""The state of a claimed job, and what its trainer reports of it."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import Literal

from rlboost.services.trainer.runtime.device import DeviceThread
from rlboost.services.trainer.runtime.job_streams import RetryingBus
from rlboost.shared.errors import Fenced
from rlboost.shared.messages import JobReport, JobState
from rlboost.shared.process.waiting import Waits
from rlboost.shared.streams import names
from rlboost.shared.streams.bus import Append
from rlboost.shared.streams.fenced_lease import FencedLease

LEASE_TTL_S = 5.0
LEASE_WAIT_LIMIT_S = 4 * LEASE_TTL_S
"""How long a trainer waits for the lease of a job that another trainer held."""
PAUSE_LIMIT_S = 30 * 24 * 3600.0


Phase = Literal["starting", "training", "evaluating", "publishing", "paused", "finishing"]
"""What a trainer does for a job."""


@dataclass(slots=True)
class ActiveJob:
    """The state of a claimed job that the trainer's loops share."""

    job_id: str
    job_no: int
    spec_json: str
    command: str
    """Id of the entry in `jobs.commands` that created it, which stays pending until the job has ended."""
    lease: FencedLease
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)
    unpaused: asyncio.Event = field(default_factory=asyncio.Event)
    owns_lease: asyncio.Event = field(default_factory=asyncio.Event)
    superseded: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once another trainer has taken over the job: report nothing more."""
    is_finished: bool = False
    """True once the job has ended here: its lease is no longer renewed."""
    phase: Phase = "starting"
    step: int = 0
    phase_since: float = field(default_factory=time.time)
    """When the phase began (Unix seconds)."""

    def enter(self, phase: Phase, step: int) -> None:
        """Begin a phase."""
        self.phase, self.step, self.phase_since = phase, step, time.time()

    async def wait_for_lease(self, waits: Waits, limit_s: float) -> None:
        """Wait until this trainer holds the job's lease: that of a dead trainer expires, a live one keeps it.

        Raises:
            Fenced: another trainer took over the job in the meantime.
            WaitTimedOut: another trainer still holds the lease after `limit_s`.

        """
        waiters = [
            asyncio.create_task(self.owns_lease.wait(), name=f"owns-lease-{self.job_id}"),
            asyncio.create_task(self.superseded.wait(), name=f"superseded-{self.job_id}"),
        ]
        try:
            async with waits.on("the lease of the job", because="another trainer held it last", limit_s=limit_s):
                await asyncio.wait(waiters, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for waiter in waiters:
                waiter.cancel()
        if not self.owns_lease.is_set():
            raise Fenced(f"job {self.job_id}: another trainer took it over")


@dataclass(frozen=True, slots=True)
class JobHost:
    """The trainer that a job runs on: what every job of it uses."""

    name: str
    """The trainer's name."""
    bus: RetryingBus
    device: DeviceThread
    """The thread of all computation."""
    waits: Waits
    limit_s: float
    """How long a job waits for a sample or its device."""


class JobStateReporter:
    """Reports to the manager that a job runs or is paused, and waits while it is paused."""

    def __init__(self, active: ActiveJob, host: JobHost) -> None:
        """Bind to the job."""
        self._active = active
        self._host = host

    async def report(self, state: JobState, step: int) -> None:
        """Report the state of the job."""
        report = JobReport(job_id=self._active.job_id, state=state, step=step, trainer=self._host.name)
        await self._host.bus.transact([Append(names.JOB_REPORTS, report)])

    async def wait_while_paused(self, step: int) -> None:
        """Wait while the job is paused; call it before each step."""
        if self._active.unpaused.is_set():
            return
        self._active.enter("paused", step)
        await self.report("paused", step)
        async with self._host.waits.on("a resume", because="the job was paused", limit_s=PAUSE_LIMIT_S):
            await self._active.unpaused.wait()
        await self.report("running", step)
