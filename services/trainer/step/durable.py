"""Records in Redis what cannot be repeated, before it is used: the curriculum, replaced groups, and paid calls."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TypeVar

from rlboost.services.trainer.domain.curriculum import Curriculum, Means, PromptSelection
from rlboost.services.trainer.domain.groups import ScoredGroup
from rlboost.services.trainer.domain.plan import PlannedGroup, Replacements, has_signal, training_group
from rlboost.services.trainer.job.job import Job
from rlboost.shared.errors import Fatal, WaitTimedOut
from rlboost.shared.ids import SampleId
from rlboost.shared.job.priced_model import Ledger, Paid, PaidCall
from rlboost.shared.process.system import run_in_thread
from rlboost.shared.streams import names
from rlboost.shared.streams.bus import HashDelete, HashSet, Op

# --- Records a job's curriculum in Redis, before the groups that follow from it are requested -------------------------
# A group's id contains its step and its number in the step, but not its prompt. So the prompts of a requested step must
# never change: they are recorded before the requests, and a restarted trainer reads the record.


PLAN_LIMIT_S = 300.0
T = TypeVar("T")


class DurableCurriculum:
    """The curriculum of one job."""

    def __init__(self, job: Job, curriculum: Curriculum) -> None:
        """Record the decisions of `curriculum`, as long as the job's present lease holds; create it with `load`."""
        self._job = job
        self._fence = job.lease.fence
        self._curriculum = curriculum
        self._lock = asyncio.Lock()
        """Planning a step changes `curriculum`, while groups of other steps are scored concurrently."""

    @classmethod
    async def load(cls, job: Job) -> DurableCurriculum | None:
        """Return a job's curriculum from its records, None if it has none."""
        spec, resources = job.generating_spec, job.resources
        if spec.data.curriculum is None:
            return None
        records = await job.bus.retry(lambda bus: bus.hash_all(names.job_curriculum(job.id)))
        return cls(job, Curriculum(spec, len(resources.data.train), resources.skip_function, records))

    async def prepare(self, step: int) -> None:
        """Choose the prompts of a step in a thread: this may call the user's function for every prompt.

        Raises:
            Fatal: see `Curriculum.plan`; or the user's function took too long.

        """
        await self._ask(lambda: self._curriculum.plan(step), f"it chooses the prompts of step {step + 1}")

    async def find(self, step: int, find: Callable[[Callable[[int], bool]], T]) -> T:
        """Return the result of `find`, called in a thread with `Curriculum.skips` of a planned step; see `prepare`."""
        because = f"it chooses replacement prompts of step {step + 1}"
        return await self._ask(lambda: find(partial(self._curriculum.skips, step)), because)

    async def _ask(self, call: Callable[[], T], because: str) -> T:
        try:
            async with self._job.waits.on("the curriculum", because=because, limit_s=PLAN_LIMIT_S), self._lock:
                return await run_in_thread("curriculum", call)
        except WaitTimedOut as error:
            raise Fatal(f"{error}: make data.curriculum.function faster, it is called for each prompt") from error

    def plan(self, step: int) -> PromptSelection:
        """Return the prompts of a prepared step."""
        return self._curriculum.plan(step)

    async def persist(self, step: int) -> None:
        """Record the prompts and scores of a planned step.

        Raises:
            Fenced: another trainer has taken over the job; its records stay.

        """
        ops = [HashSet(names.job_curriculum(self._job.id), {str(step): self._curriculum.record(step)})]
        await self._job.bus.retry(lambda bus: bus.transact(ops, self._fence))

    async def record_scores(self, step: int, means: Means) -> None:
        """Add and record the mean rewards of a step's groups; see `Curriculum.score`."""
        self._curriculum.score(step, means)
        await self.persist(step)


# --- Records in Redis which groups of a job are replaced by groups of other prompts, before these are requested -------
# A group is replaced because of its rewards, and a reward function may return others the next time. So a restarted
# trainer follows the records first: a group that was requested once stays part of its step.


class DurableResampling:
    """The record of one job."""

    def __init__(
        self, job: Job, curriculum: DurableCurriculum | None = None, records: Mapping[str, str] | None = None
    ) -> None:
        """Continue from `records`, as long as the job's present lease holds; create it with `load`.

        Args:
            job: the job.
            curriculum: which training prompts are skipped.
            records: packed id of a replaced group -> row of its replacement's prompt.

        """
        self.job = job
        self.curriculum = curriculum
        self.rows = {int(group): int(row) for group, row in (records or {}).items()}
        """Replaced group -> row of its replacement's prompt."""
        self._key = names.job_resampled(job.id)
        self._fence = job.lease.fence

    @classmethod
    async def load(cls, job: Job, curriculum: DurableCurriculum | None) -> DurableResampling | None:
        """Return a job's records, None if the job replaces no group."""
        if job.spec.kind != "rl" or not job.spec.algorithm.resample:
            return None
        return cls(job, curriculum, await job.bus.retry(lambda bus: bus.hash_all(names.job_resampled(job.id))))

    async def record(self, group: int, row: int) -> None:
        """Record that `group` is replaced by a group of the prompt `row`.

        Raises:
            Fenced: another trainer has taken over the job; its records stay.

        """
        await self.job.bus.retry(lambda bus: bus.transact([HashSet(self._key, {str(group): str(row)})], self._fence))
        self.rows[group] = row

    async def trim(self, before: int) -> None:
        """Delete the records of steps before `before`, which are never trained again.

        Raises:
            Fenced: another trainer has taken over the job.

        """
        expired = [group for group in self.rows if SampleId.unpack(group).step < before]
        if expired:
            ops = [HashDelete(self._key, tuple(map(str, expired)))]
            await self.job.bus.retry(lambda bus: bus.transact(ops, self._fence))
            for group in expired:
                del self.rows[group]


class StepReplacements:
    """The replaced groups of one step, and their replacements."""

    def __init__(self, resampling: DurableResampling, step: int, initial: Sequence[int]) -> None:
        """Start from the prompts `initial` and the records of `resampling`."""
        self._resampling = resampling
        self._step = step
        self._job = resampling.job
        self._rule = Replacements.of(self._job.generating_spec, step, len(self._job.resources.data.train))
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
        curriculum = self._resampling.curriculum
        if self.is_replaced(group) or has_signal(scored.compared_rewards):
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
        return training_group(self._job.generating_spec, self._job.no, self._step, number, row)

    def _replacement(self, group: int, row: int) -> PlannedGroup:
        number = self._rule.replacement_number(SampleId.unpack(group).group)
        assert number is not None, "recorded with another algorithm.resample"
        return training_group(self._job.generating_spec, self._job.no, self._step, number, row)


# --- Records in Redis the calls of priced models, before they are sent and before their answers are used --------------
# An environment is created again and its turns are replayed after its process or the trainer has died, and an agent
# starts again. So a call has a name that follows from its conversation, its request and how often it was made before. A
# call without an answer was perhaps paid: it counts as the most that it may cost, and is sent again if its code runs
# again.


class DurablePaidCalls:
    """`CallRecord` of one job."""

    def __init__(self, job: Job, records: Mapping[str, str]) -> None:
        """Continue from `records`, as long as the job's present lease holds; create it with `load`."""
        self._job = job
        self._key = names.job_paid_calls(job.id)
        self._fence = job.lease.fence
        self._ledger = Ledger()
        self._closed: dict[str, tuple[str, float]] = {}
        """Field of an answered call -> its budget and cost."""
        self._totals: dict[str, float] = {}
        """Budget -> cost of the calls whose records are trimmed."""
        self._changed = asyncio.Event()
        """Set whenever a call has ended."""
        for field, text in records.items():
            record = json.loads(text)
            if field.startswith(_TOTAL):
                self._totals[record["name"]] = record["cost"]
                self._ledger.close(field, record["name"], record["cost"])
            elif record["answer"] is None:
                self._ledger.open[field] = record["name"], record["cost"]  # lost, unless its code runs again
            else:
                self._close(field, record["name"], record["cost"])

    @classmethod
    async def load(cls, job: Job) -> DurablePaidCalls:
        """Return a job's records."""
        return cls(job, await job.bus.retry(lambda bus: bus.hash_all(names.job_paid_calls(job.id))))

    async def open(self, conversation: int, call: PaidCall) -> Paid | None:
        """See `PaidCalls.open`.

        Raises:
            Fenced: another trainer has taken over the job.
            WaitTimedOut: the calls in flight, which may spend the rest of the budget, do not end.

        """
        field = f"{conversation}:{call.key}"

        def is_due() -> bool:
            return field in self._closed or self._ledger.has_room(field, call)

        if not is_due():
            because = "calls in flight may spend the rest"
            async with self._job.waits.on(f"the budget of {call.name}", because=because, limit_s=self._job.limit_s):
                while not is_due():
                    self._changed.clear()
                    await self._changed.wait()
        if field in self._closed:
            found = await self._job.bus.retry(lambda bus: bus.hash_get(self._key, field))
            record = json.loads(found or "null")
            return Paid(record["answer"], record["cost"])
        self._ledger.begin(field, call)
        try:
            await self._write(HashSet(self._key, {field: _record(call.name, call.most, None)}))
        except BaseException:
            self.lose(conversation, call)
            raise
        return None

    def lose(self, conversation: int, call: PaidCall) -> None:
        """See `PaidCalls.lose`; what is recorded stays, for code that runs again."""
        self._ledger.lose(f"{conversation}:{call.key}")
        self._changed.set()

    async def close(self, conversation: int, call: PaidCall, paid: Paid | None) -> None:
        """See `PaidCalls.close`.

        Raises:
            Fenced: another trainer has taken over the job.

        """
        field = f"{conversation}:{call.key}"
        if field not in self._ledger.open:  # trimmed, or closed before its code ran again
            return
        if paid is None:
            await self._write(HashDelete(self._key, (field,)))
            self._ledger.cancel(field)
        else:
            await self._write(HashSet(self._key, {field: _record(call.name, paid.cost, paid.answer)}))
            self._close(field, call.name, paid.cost)
        self._changed.set()

    async def trim(self, before: int) -> None:
        """Replace the records of steps before `before`, which are never trained again, by their sum.

        Raises:
            Fenced: another trainer has taken over the job.

        """
        expired = {
            field: record
            for field, record in (self._closed | self._ledger.open).items()
            if SampleId.unpack(int(field.partition(":")[0])).step < before
        }
        if not expired:
            return
        totals = dict(self._totals)
        for name, cost in expired.values():
            totals[name] = totals.get(name, 0.0) + cost
        sums = {_TOTAL + name: _record(name, cost, "") for name, cost in totals.items()}
        await self._write(HashSet(self._key, sums), HashDelete(self._key, tuple(expired)))
        self._totals = totals
        for field in expired:
            if (lost := self._ledger.open.pop(field, None)) is not None:
                self._ledger.close(field, *lost)
            self._closed.pop(field, None)
        self._changed.set()

    def _close(self, field: str, name: str, cost: float) -> None:
        self._closed[field] = name, cost
        self._ledger.close(field, name, cost)

    async def _write(self, *ops: Op) -> None:
        await self._job.bus.retry(lambda bus: bus.transact(ops, self._fence))


_TOTAL = "total:"


def _record(name: str, cost: float, answer: str | None) -> str:
    return json.dumps({"name": name, "cost": cost, "answer": answer})
