"""Traces of a job's steps, when a user asks for them while it runs.

Consumes: the hash that `POST /v1/jobs/{job_id}/profile` writes, before each step.
Produces: a Chrome trace of each rank in the job's folder `profile/`; a `profile_written` event, and warnings about what
could not be recorded, which ends no job.
Ends when: the job does; a profile of more steps than are left ends with the last one.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from rlboost.services.trainer.job.job import Job
from rlboost.shared.streams import names
from rlboost.shared.streams.bus import Delete


class Profiling:
    """The profiles of one job."""

    def __init__(self, job: Job) -> None:
        """Record nothing yet."""
        self._job = job
        self._n_left = 0
        """Steps that are still to be recorded."""
        self._folder = Path()

    @asynccontextmanager
    async def step(self, step: int) -> AsyncIterator[None]:
        """Record the step that the body trains, if it was asked for."""
        if not self._n_left:
            await self._start(step)
        yield
        if self._n_left:
            self._n_left -= 1
            if not self._n_left or step + 1 >= self._job.spec.steps:
                await self._stop(step)

    async def _start(self, step: int) -> None:
        job, key = self._job, names.job_profile(self._job.id)
        asked = await job.bus.retry(lambda bus: bus.hash_all(key))
        if not asked or step >= job.spec.steps:
            return
        await job.bus.transact([Delete(key)])
        self._n_left = int(asked["steps"])
        self._folder = job.resources.folder.path_of(f"profile/step-{step}")
        await job.warn(*await job.device.run(lambda: job.resources.engine.start_profile(self._folder)))

    async def _stop(self, step: int) -> None:
        job, self._n_left = self._job, 0
        await job.warn(*await job.device.run(job.resources.engine.stop_profile))
        await job.emit_event("profile_written", step=step, path=str(self._folder))
