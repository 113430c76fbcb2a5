"""The objects that one job's run is made of."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from dataclasses import dataclass

from rlboost.services.trainer.job.active import ActiveJob, JobHost, JobStateReporter
from rlboost.services.trainer.job.checkpoints import Checkpoints
from rlboost.services.trainer.job.publishing import VersionPublisher
from rlboost.services.trainer.job.step_log import StepLog
from rlboost.services.trainer.ports.resources import JobResources
from rlboost.services.trainer.runtime.disk_waits import DiskWaits, FolderWrites
from rlboost.services.trainer.runtime.job_streams import JobStreams
from rlboost.services.trainer.step.learning_watch import LearningWatch
from rlboost.shared.job.spec import JobSpec
from rlboost.shared.streams import names


@dataclass(frozen=True, slots=True)
class JobParts:
    """What a job's prologue, steps and epilogue share."""

    active: ActiveJob
    host: JobHost
    resources: JobResources
    reporter: JobStateReporter
    streams: JobStreams
    write: FolderWrites
    checkpoints: Checkpoints
    learning: LearningWatch
    versions: VersionPublisher
    log: StepLog

    @classmethod
    def of(cls, active: ActiveJob, spec: JobSpec, host: JobHost, resources: JobResources) -> JobParts:
        """Return the parts of a job whose resources are built. Nothing is read or written yet."""
        streams, device, waits = JobStreams(host.bus, active.job_id), host.device, host.waits
        disk = DiskWaits(waits, streams)
        write = FolderWrites(disk, device)
        finished = names.rollouts_finished(active.job_id)
        checkpoints = Checkpoints(spec, resources, device, waits, streams, disk, finished)
        learning = LearningWatch(active.job_id, spec, streams, resources.data)
        return cls(
            active=active,
            host=host,
            resources=resources,
            reporter=JobStateReporter(active, host),
            streams=streams,
            write=write,
            checkpoints=checkpoints,
            learning=learning,
            versions=VersionPublisher(resources.engine, resources.weights, device, streams, resources.canary_prompts),
            log=StepLog(active.job_id, spec.steps, streams, resources.folder, write, checkpoints, learning),
        )

    async def close(self) -> None:
        """Stop what the job has started. An error in one part is raised once the others are closed too."""
        resources = self.resources
        async with AsyncExitStack() as closing:  # the last one first
            closing.push_async_callback(self._close_folder)
            # Not awaited: a cancelled job has ended, even if its last micro-batch is still being computed.
            closing.callback(self.host.device.post, resources.engine.close)
            closing.push_async_callback(resources.weights.close)
            if resources.environments is not None:
                closing.push_async_callback(resources.environments.close)
            closing.push_async_callback(resources.rewards.close)
            self.checkpoints.cancel()

    async def _close_folder(self) -> None:
        await self.streams.emit_warnings(await asyncio.to_thread(self.resources.folder.close))
