"""The objects that all steps of one job share."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from rlboost.services.trainer.domain.plan import PlannedGroup
from rlboost.services.trainer.domain.warnings.faults import FaultWarnings
from rlboost.services.trainer.ports.data import Prompt
from rlboost.services.trainer.ports.resources import JobResources
from rlboost.services.trainer.runtime.device import DeviceThread
from rlboost.services.trainer.runtime.job_streams import JobStreams
from rlboost.services.trainer.step.durable_curriculum import DurableCurriculum
from rlboost.services.trainer.step.durable_resampling import DurableResampling
from rlboost.shared.job.spec import GeneratingJob
from rlboost.shared.process.waiting import Waits


@dataclass(frozen=True, slots=True)
class JobContext:
    """What every step of a job works with."""

    id: str
    no: int
    spec: GeneratingJob
    resources: JobResources
    streams: JobStreams
    device: DeviceThread
    waits: Waits
    limit_s: float
    """How long a step may wait for samples or for its device."""
    scoring: asyncio.TaskGroup
    """Owns the scoring tasks: groups of a later step are scored while an earlier step trains."""
    curriculum: DurableCurriculum | None = None
    """Chooses the prompts of each step; None: the epoch order does."""
    resampling: DurableResampling | None = None
    """Records which groups were replaced by groups of other prompts; None if the job replaces no group."""
    faults: FaultWarnings = field(default_factory=FaultWarnings)

    async def warn(self, text: str) -> None:
        """Emit a warning of the job, which people who follow it see; nothing if `text` is empty."""
        if text:
            await self.streams.emit_event("warning", text=text)

    def prompt(self, group: PlannedGroup) -> Prompt:
        """Return the prompt of a group."""
        data = self.resources.data
        return (data.evaluation if group.is_eval else data.train)[group.row]
