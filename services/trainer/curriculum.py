"""A job's curriculum, with its decisions in Redis before anything is asked for by them.

A group's id says its step and its number in the step, not its prompt. So a step's prompts must never be others than
those that were asked for once: they are recorded first, beside the requests, and a successor reads the record.
"""

from __future__ import annotations

from services.trainer.domain.curriculum import Chosen, Curriculum, Means
from services.trainer.link import PatientBus
from services.trainer.ports import Workshop
from shared import names
from shared.bus import HashSet
from shared.jobspec import JobSpec


class KeptCurriculum:
    """The curriculum of one job."""

    def __init__(self, bus: PatientBus, job_id: str, curriculum: Curriculum) -> None:
        """Keep what `curriculum` decides; `load` makes it."""
        self._bus = bus
        self._key = names.job_curriculum(job_id)
        self._curriculum = curriculum

    @classmethod
    async def load(cls, bus: PatientBus, job_id: str, spec: JobSpec, workshop: Workshop) -> KeptCurriculum | None:
        """Return a job's curriculum as far as it was recorded, None where it has none."""
        if spec.data.curriculum is None:
            return None
        records = await bus(lambda raw: raw.hash_all(names.job_curriculum(job_id)))
        return cls(bus, job_id, Curriculum(spec, len(workshop.data.train), workshop.judge, records))

    def plan(self, step: int) -> Chosen:
        """See `Curriculum.plan`."""
        return self._curriculum.plan(step)

    async def keep(self, step: int) -> None:
        """Record what is known of a planned step."""
        await self._bus.transact([HashSet(self._key, {str(step): self._curriculum.record(step)})])

    async def score(self, step: int, means: Means) -> None:
        """Take in how a step's groups were scored, and record it; see `Curriculum.score`."""
        self._curriculum.score(step, means)
        await self.keep(step)
