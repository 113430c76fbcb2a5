"""Which groups of a job were replaced by another prompt's, in Redis before these are asked for.

A group is replaced for the rewards that it got, and a reward function may say something else the next time. So a
successor goes by what is recorded before it goes by rewards: what was asked for once stays part of its step.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from functools import partial

from services.trainer.domain.metrics import ScoredGroup
from services.trainer.domain.plan import PlannedGroup, training_group
from services.trainer.domain.resampling import Replacements, teaches
from services.trainer.domain.shaping import shaped
from services.trainer.link import PatientBus
from services.trainer.recorded_curriculum import KeptCurriculum
from shared import names
from shared.bus import Fence, HashDelete, HashSet
from shared.ids import SampleId
from shared.jobspec import JobSpec, RlJob


class KeptResampling:
    """The record of one job."""

    def __init__(
        self,
        bus: PatientBus,
        job_id: str,
        job_no: int,
        spec: RlJob,
        n_rows: int,
        *,
        curriculum: KeptCurriculum | None = None,
        records: Mapping[str, str] | None = None,
        fence: Fence | None = None,
    ) -> None:
        """Go on where `records` end; `load` makes it.

        Args:
            bus: the broker.
            job_id: the job.
            job_no: its number.
            spec: what it is.
            n_rows: number of training prompts.
            curriculum: says which of these are skipped.
            records: packed id of a group that was replaced -> the row of its replacement's prompt.
            fence: the job's lease's; nothing is recorded any more once it falls.

        """
        self._bus = bus
        self._key = names.job_resampled(job_id)
        self._fence = fence
        self.job_no = job_no
        self.spec = spec
        self.n_rows = n_rows
        self.curriculum = curriculum
        self.rows = {int(group): int(row) for group, row in (records or {}).items()}
        """Group that was replaced -> row of its replacement's prompt."""

    @classmethod
    async def load(
        cls,
        bus: PatientBus,
        job_id: str,
        job_no: int,
        spec: JobSpec,
        n_rows: int,
        curriculum: KeptCurriculum | None,
        fence: Fence | None,
    ) -> KeptResampling | None:
        """Return a job's record as far as it was written, None where no group is ever replaced."""
        if not isinstance(spec, RlJob) or not spec.algorithm.resample:
            return None
        records = await bus(lambda raw: raw.hash_all(names.job_resampled(job_id)))
        return cls(bus, job_id, job_no, spec, n_rows, curriculum=curriculum, records=records, fence=fence)

    def of_step(self, step: int, first: Sequence[int]) -> StepReplacements:
        """Return what is replaced in a step that begins with the prompts `first`."""
        return StepReplacements(self, step, first)

    async def keep(self, group: int, row: int) -> None:
        """Record that `group` is replaced by one of the prompt `row`.

        Raises:
            Fenced: another trainer has taken the job over, and what it recorded stays.

        """
        await self._bus(lambda bus: bus.transact([HashSet(self._key, {str(group): str(row)})], self._fence))
        self.rows[group] = row

    async def forget(self, before: int) -> None:
        """Forget steps that will never be trained again: those before step `before`.

        Raises:
            Fenced: another trainer has taken the job over.

        """
        over = [group for group in self.rows if SampleId.unpack(group).step < before]
        if over:
            ops = [HashDelete(self._key, tuple(map(str, over)))]
            await self._bus(lambda bus: bus.transact(ops, self._fence))
            for group in over:
                del self.rows[group]


class StepReplacements:
    """The groups of one step that were replaced, and what replaces them."""

    def __init__(self, kept: KeptResampling, step: int, first: Sequence[int]) -> None:
        """Begin with the prompts `first`, and go on with what is recorded."""
        self._kept = kept
        self._step = step
        self._rule = Replacements.of(kept.spec, step, kept.n_rows)
        self._first = first
        self._spare: list[int] = []
        """Found when it is needed first: of much data that takes long, and most steps of most jobs need none."""
        self._finding = asyncio.Lock()
        self._replaced = {group: row for group, row in kept.rows.items() if SampleId.unpack(group).step == step}

    @property
    def n_replaced(self) -> int:
        """Return how many groups were replaced."""
        return len(self._replaced)

    def is_replaced(self, group: PlannedGroup) -> bool:
        """Tell whether another group replaces this one, and so it is not trained on."""
        return group.id in self._replaced

    def recorded(self) -> list[PlannedGroup]:
        """Return the replacements that are recorded, in the order of the groups that they replace."""
        return [self._replacement(group, row) for group, row in sorted(self._replaced.items())]

    async def replace(self, group: PlannedGroup, scored: ScoredGroup) -> PlannedGroup | None:
        """Return the group that is to be asked for in place of one that was scored, None where it stays.

        It is recorded by then: what is recorded and not asked for, a successor asks for; the other way round samples
        would come to it that it does not expect.

        Raises:
            Fatal, Fenced: see `KeptCurriculum.find`, `KeptResampling.keep`.

        """
        spec, curriculum = self._kept.spec, self._kept.curriculum
        if self.is_replaced(group) or teaches(shaped(scored, spec.algorithm, spec.sampling.max_tokens)):
            return None
        number = self._rule.number_after(SampleId.unpack(group.id).group)
        if number is None:
            return None
        async with self._finding:
            if not self._spare:
                find = partial(self._rule.spare, self._first)
                self._spare = find() if curriculum is None else await curriculum.find(self._step, find)
        row = self._rule.row(number, self._spare)
        await self._kept.keep(group.id, row)
        self._replaced[group.id] = row
        return self._replacement(group.id, row)

    def _replacement(self, group: int, row: int) -> PlannedGroup:
        number = self._rule.number_after(SampleId.unpack(group).group)
        assert number is not None, "it was recorded under another algorithm.resample"
        return training_group(self._kept.spec, self._kept.job_no, self._step, number, row)
