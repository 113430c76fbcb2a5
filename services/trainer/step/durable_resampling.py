"""Records in Redis which groups of a job are replaced by groups of other prompts, before these are requested.

A group is replaced because of its rewards, and a reward function may return others the next time. So a restarted
trainer follows the records first: a group that was requested once stays part of its step.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from functools import partial

from rlboost.services.trainer.domain.groups.scored_group import ScoredGroup
from rlboost.services.trainer.domain.plan import PlannedGroup, training_group
from rlboost.services.trainer.domain.resampling import Replacements, has_signal
from rlboost.services.trainer.runtime.job_streams import RetryingBus
from rlboost.services.trainer.step.durable_curriculum import DurableCurriculum
from rlboost.shared.ids import SampleId
from rlboost.shared.job.spec import JobSpec, RlJob
from rlboost.shared.streams import names
from rlboost.shared.streams.bus import Fence, HashDelete, HashSet


class DurableResampling:
    """The record of one job."""

    def __init__(
        self,
        bus: RetryingBus,
        job_id: str,
        job_no: int,
        spec: RlJob,
        n_rows: int,
        *,
        curriculum: DurableCurriculum | None = None,
        records: Mapping[str, str] | None = None,
        fence: Fence | None = None,
    ) -> None:
        """Continue from `records`; create it with `load`.

        Args:
            bus: the broker.
            job_id: the job.
            job_no: the job's number.
            spec: the job file.
            n_rows: number of training prompts.
            curriculum: which of these are skipped.
            records: packed id of a replaced group -> row of its replacement's prompt.
            fence: of the job's lease: once another trainer has acquired it, nothing is recorded. None: not fenced.

        """
        self._bus = bus
        self._key = names.job_resampled(job_id)
        self._fence = fence
        self.job_no = job_no
        self.spec = spec
        self.n_rows = n_rows
        self.curriculum = curriculum
        self.rows = {int(group): int(row) for group, row in (records or {}).items()}
        """Replaced group -> row of its replacement's prompt."""

    @classmethod
    async def load(
        cls,
        bus: RetryingBus,
        job_id: str,
        job_no: int,
        spec: JobSpec,
        n_rows: int,
        curriculum: DurableCurriculum | None,
        fence: Fence | None,
    ) -> DurableResampling | None:
        """Return a job's records, None if the job replaces no group."""
        if not isinstance(spec, RlJob) or not spec.algorithm.resample:
            return None
        records = await bus(lambda raw: raw.hash_all(names.job_resampled(job_id)))
        return cls(bus, job_id, job_no, spec, n_rows, curriculum=curriculum, records=records, fence=fence)

    def of_step(self, step: int, initial: Sequence[int]) -> StepReplacements:
        """Return the replacements of a step whose initial prompts are `initial`."""
        return StepReplacements(self, step, initial)

    async def record(self, group: int, row: int) -> None:
        """Record that `group` is replaced by a group of the prompt `row`.

        Raises:
            Fenced: another trainer has taken over the job; its records stay.

        """
        await self._bus(lambda bus: bus.transact([HashSet(self._key, {str(group): str(row)})], self._fence))
        self.rows[group] = row

    async def trim(self, before: int) -> None:
        """Delete the records of steps before `before`, which are never trained again.

        Raises:
            Fenced: another trainer has taken over the job.

        """
        expired = [group for group in self.rows if SampleId.unpack(group).step < before]
        if expired:
            ops = [HashDelete(self._key, tuple(map(str, expired)))]
            await self._bus(lambda bus: bus.transact(ops, self._fence))
            for group in expired:
                del self.rows[group]


class StepReplacements:
    """The replaced groups of one step, and their replacements."""

    def __init__(self, resampling: DurableResampling, step: int, initial: Sequence[int]) -> None:
        """Start from the prompts `initial` and the records of `resampling`."""
        self._resampling = resampling
        self._step = step
        self._rule = Replacements.of(resampling.spec, step, resampling.n_rows)
        self._initial = initial
        self._rows: list[int] = []
        """Replacement prompts; computed on first use, because that is slow with much data and rarely needed."""
        self._finding = asyncio.Lock()
        self._replaced = {group: row for group, row in resampling.rows.items() if SampleId.unpack(group).step == step}

    @property
    def n_replaced(self) -> int:
        """Return the number of replaced groups."""
        return len(self._replaced)

    def is_replaced(self, group: PlannedGroup) -> bool:
        """Return True if another group replaces this one, which is then not trained on."""
        return group.id in self._replaced

    def recorded(self) -> list[PlannedGroup]:
        """Return the recorded replacements, in the order of the groups that they replace."""
        return [self._replacement(group, row) for group, row in sorted(self._replaced.items())]

    async def replace(self, group: PlannedGroup, scored: ScoredGroup) -> PlannedGroup | None:
        """Return the group to request in place of a scored group, None if that group is not replaced.

        The replacement is recorded on return, before it is requested: a restarted trainer requests recorded groups, but
        would fail on samples of a group that it does not know.

        Raises:
            Fatal, Fenced: see `DurableCurriculum.find`, `DurableResampling.record`.

        """
        spec, curriculum = self._resampling.spec, self._resampling.curriculum
        if self.is_replaced(group) or has_signal(scored.shaped_rewards):
            return None
        number = self._rule.replacement_number(group.number)
        if number is None:
            return None
        async with self._finding:
            if not self._rows:
                find = partial(self._rule.replacement_rows, self._initial)
                self._rows = find() if curriculum is None else await curriculum.find(self._step, find)
        row = self._rule.row(number, self._rows)
        await self._resampling.record(group.id, row)
        self._replaced[group.id] = row
        return training_group(spec, self._resampling.job_no, self._step, number, row)

    def _replacement(self, group: int, row: int) -> PlannedGroup:
        number = self._rule.replacement_number(SampleId.unpack(group).group)
        assert number is not None, "recorded with another algorithm.resample"
        return training_group(self._resampling.spec, self._resampling.job_no, self._step, number, row)
