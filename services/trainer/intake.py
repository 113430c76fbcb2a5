"""One step's groups, from asking for them until they are scored. A step may be asked for before it is trained."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter
from statistics import fmean

from services.trainer.conversations import Conversations
from services.trainer.device import DeviceThread
from services.trainer.domain.collector import DroppedGroup, Outcome, StepCollector
from services.trainer.domain.metrics import ScoredGroup, StepTally
from services.trainer.domain.plan import PlannedGroup, plan_step
from services.trainer.domain.schedule import learning_rate
from services.trainer.domain.shaping import penalties
from services.trainer.link import JobLink
from services.trainer.ports import Prompt, Workshop
from services.trainer.recorded_curriculum import KeptCurriculum
from services.trainer.recorded_resampling import KeptResampling, StepReplacements
from services.trainer.scoring import question, summaries, with_environment
from shared import names
from shared.bus import Append
from shared.errors import Fatal, Timeout
from shared.ids import SampleId
from shared.jobspec import GeneratingJob
from shared.messages import GroupRequested, Sampling
from shared.waiting import Waits

_GROUPS_AT_ONCE = 64
"""Prompts may be long: Redis gets them in portions, and the fleet begins while environments begin the others."""


@dataclass(frozen=True, slots=True)
class JobContext:
    """What every step of a job works with."""

    id: str
    no: int
    spec: GeneratingJob
    workshop: Workshop
    link: JobLink
    device: DeviceThread
    waits: Waits
    limit_s: float
    """How long a step may wait for its device."""
    scoring: asyncio.TaskGroup
    """Owns what scores: groups of a later step are scored while an earlier one trains."""
    curriculum: KeptCurriculum | None = None
    """Says which prompts a step has; None: their turn does."""
    resampling: KeptResampling | None = None
    """Which groups were replaced by those of other prompts; None where none may be."""


class StepIntake:
    """The groups of one step."""

    def __init__(self, job: JobContext, step: int, *, seen_before: bool) -> None:
        """Plan step `step`.

        Args:
            job: the step's job.
            step: its number; the one after the last training step only evaluates.
            seen_before: it was trained and its samples were shown to people, before this trainer was started.

        """
        data, spec = job.workshop.data, job.spec
        self._job = job
        self.step = step
        self._seen_before = seen_before
        chosen = job.curriculum.plan(step) if job.curriculum is not None and step < spec.steps else None
        rows = None if chosen is None else chosen.rows
        planned = plan_step(spec, job.no, step, len(data.train), len(data.evaluation), rows)
        first = [group.row for group in planned if not group.is_eval]
        self.n_train = self.n_first_awaited = len(first)
        """How many training groups there are, one a place; and how many of the first ones have not come yet."""
        self._replacements = job.resampling.of_step(step, first) if job.resampling is not None and first else None
        planned += [] if self._replacements is None else self._replacements.recorded()
        self._planned = {group.id: group for group in planned}
        self._not_begun = planned
        self._unasked: list[GroupRequested] = []
        """Of groups that have begun."""
        sizes = {group.id: group.n for group in planned}
        self._talks = Conversations(job, step, planned) if spec.environment is not None else None
        self.collector = (
            StepCollector(job.no, step, sizes, spec.elastic.max_staleness)
            if self._talks is None
            else self._talks.collector
        )
        rate = learning_rate(spec.optimizer, step, spec.steps)
        self.tally = StepTally(step=step, learning_rate=rate, machine=job.workshop.machine)
        if spec.eval is not None:
            self.tally.pass_reward = spec.eval.pass_reward
        if chosen is not None:
            self.tally.measured |= chosen.metrics()
        if self._replacements is not None:
            self.tally.resampled = self._replacements.n_replaced
        self._came: asyncio.Queue[tuple[PlannedGroup, asyncio.Task[ScoredGroup | None]]] = asyncio.Queue()
        """Training groups, in the order in which they came; None for one that was dropped."""
        self.n_undecided = 0
        """How many groups came that may still be replaced."""
        self._decided = asyncio.Event()
        self.evaluated: list[asyncio.Task[ScoredGroup | None]] = []

    async def request(self, *, evaluation: bool) -> None:
        """Ask for the groups that were not asked for yet; for evaluation groups, of this step's weights, only if told.

        Asking again, as a killed trainer's successor does, is harmless: the manager knows each group by its id.

        Raises:
            Fatal: not one conversation of the step can begin, or their environments took too long.

        """
        if self._not_begun and self._job.curriculum is not None and self.n_train:
            await self._job.curriculum.keep(self.step)
        # Evaluation groups begin with the others: a killed predecessor may have asked for them, and what came for them
        # lies in the log.
        while self._not_begun:
            some, self._not_begun = self._not_begun[:_GROUPS_AT_ONCE], self._not_begun[_GROUPS_AT_ONCE:]
            self._unasked += await self._begin(some)
            await self._ask(evaluation=evaluation)
        if self._talks is not None:
            self._talks.check_begun()
        await self._ask(evaluation=evaluation)

    async def _begin(self, groups: Sequence[PlannedGroup]) -> list[GroupRequested]:
        """Return the requests of groups; with an environment, of those whose conversations can begin."""
        spec, workshop = self._job.spec, self._job.workshop
        sampling = Sampling(
            temperature=spec.sampling.temperature,
            top_p=spec.sampling.top_p,
            max_tokens=spec.sampling.max_tokens,
            stop_token_ids=workshop.data.stop_token_ids,
        )
        if self._talks is None:
            prompts = {group.id: self._prompt(group).tokens for group in groups}
        else:
            prompts = await self._talks.open(groups)
        requests = [
            GroupRequested(
                job_id=self._job.id,
                group=group.id,
                n=group.n,
                prompt=prompts[group.id],
                sampling=sampling,
                version=self.step,
                seed=group.seed,
                max_staleness=0 if group.is_eval else spec.elastic.max_staleness,
            )
            for group in groups
            if group.id in prompts
        ]
        if self._talks is not None:
            self._talks.begun(requests)
        return requests

    async def _ask(self, *, evaluation: bool) -> None:
        later = [] if evaluation else [request for request in self._unasked if self._planned[request.group].is_eval]
        asked = [request for request in self._unasked if evaluation or not self._planned[request.group].is_eval]
        stream = names.rollouts_requested(self._job.id)
        for start in range(0, len(asked), _GROUPS_AT_ONCE):
            some = asked[start : start + _GROUPS_AT_ONCE]
            await self._job.link.bus.transact([Append(stream, request) for request in some])
        self._unasked = later

    def answer(self) -> None:
        """Have the turns of conversations answered that came, once nothing more is at hand that may answer them."""
        if self._talks is not None:
            self._talks.answer()

    def take(self, outcome: Outcome) -> None:
        """Begin to score a group that came whole, or to drop one that did not."""
        planned = self._planned[outcome.group]
        if self._talks is not None and isinstance(outcome, DroppedGroup):
            self._talks.forget(outcome.group)
        name = f"score-{SampleId.unpack(outcome.group)}"
        if planned.is_eval:
            self.evaluated.append(self._job.scoring.create_task(self._score(outcome, planned), name=name))
            return
        self.n_first_awaited -= SampleId.unpack(planned.id).group < self.n_train
        if self._replacements is None:
            scoring = self._score(outcome, planned)
        else:
            self.n_undecided += 1
            scoring = self._score_and_replace(self._replacements, outcome, planned)
        self._came.put_nowait((planned, self._job.scoring.create_task(scoring, name=name)))

    async def next_group(self) -> ScoredGroup | None:
        """Return the next training group that stays in its place, None for one that was dropped."""
        while True:
            planned, scoring = await self._came.get()
            if (group := await scoring) is not None:
                self.tally.scored.append(group)
                spec = self._job.spec
                self.tally.penalties += penalties(group, spec.algorithm, spec.sampling.max_tokens)
            if self._replacements is None or not self._replacements.is_replaced(planned):
                return group
            self.tally.left_out["equal_rewards"] += group is not None

    async def decided(self) -> None:
        """Return once each group that came stays in its place, or is replaced by one that has not come.

        Raises:
            Fatal: their scoring takes too long.

        """
        reward = self._job.spec.reward
        # Each has a limit of its own; beside them the processes may be busy with groups of the steps after.
        limit_s = self._job.limit_s + (reward.timeout_s if reward is not None else 0.0) * self.n_undecided
        because = f"{self.n_undecided} groups of step {self.step} may have to be replaced by others"
        try:
            async with self._job.waits.on("the rewards", because=because, limit_s=limit_s):
                while self.n_undecided and self.collector.complete:
                    self._decided.clear()
                    await self._decided.wait()
        except Timeout as error:
            raise Fatal(f"{error}: make the reward function faster, or raise reward.workers") from error

    async def keep_scores(self) -> None:
        """Let the curriculum know how the step's groups were scored."""
        if self._job.curriculum is not None and self.n_train:
            groups = sorted(((group.samples[0].sample, group) for group in self.tally.scored), key=itemgetter(0))
            means = [(self._planned[name].row, fmean(group.rewards)) for name, group in groups]
            await self._job.curriculum.score(self.step, means)

    def prompt_of(self, group: ScoredGroup) -> bytes:
        """Return the prompt's token ids, an int32 column."""
        return self._begins(self._planned[group.samples[0].sample])

    async def _score_and_replace(
        self, replacements: StepReplacements, outcome: Outcome, planned: PlannedGroup
    ) -> ScoredGroup | None:
        """Score a training group and, where it teaches nothing, ask for one of another prompt in its place."""
        try:
            group = await self._score(outcome, planned)
            # One that was dropped has shown a fault, and not what its prompt is worth: the next may well share it.
            # Of a step that was trained before, nobody serves the version any more: what was recorded is all it has.
            if group is None or self._seen_before:
                return group
            if (replacement := await replacements.replace(planned, group)) is not None:
                await self._ask_beside(replacement)
            self.tally.resampled = replacements.n_replaced
            return group
        finally:
            self.n_undecided -= 1
            self._decided.set()

    async def _ask_beside(self, group: PlannedGroup) -> None:
        """Ask for one more group, while the others come."""
        self._planned[group.id] = group
        if self._talks is None:
            self.collector.add(group.id, group.n)
        else:
            self._talks.add(group)
        self._decided.set()
        requests = await self._begin([group])
        stream = names.rollouts_requested(self._job.id)
        await self._job.link.bus.transact([Append(stream, request) for request in requests])

    async def _score(self, outcome: Outcome, planned: PlannedGroup) -> ScoredGroup | None:
        if isinstance(outcome, DroppedGroup):
            await self._drop(outcome.group, outcome.reason, outcome.detail)
            return None
        prompt = self._prompt(planned)
        data = self._job.workshop.data
        scores = await self._job.workshop.rewards.score(question(outcome, prompt, data))
        scores = with_environment(scores, outcome, named=self._job.spec.reward is not None)
        if not self._seen_before:
            await self._job.link.show(summaries(outcome, self._begins(planned), scores, data))
        if scores.rewards is None:
            await self._drop(outcome.group, scores.reason, scores.detail)
            return None
        return ScoredGroup(outcome.samples, scores.rewards, scores.parts, outcome.talks)

    async def _drop(self, group: int, reason: str, detail: str) -> None:
        self.tally.dropped[reason] += 1
        self.tally.first_detail = self.tally.first_detail or detail
        await self._job.link.tell("group_dropped", group=str(SampleId.unpack(group)), reason=reason, detail=detail)

    def _begins(self, group: PlannedGroup) -> bytes:
        return self._prompt(group).tokens if self._talks is None else self._talks.prompt_of(group.id)

    def _prompt(self, group: PlannedGroup) -> Prompt:
        data = self._job.workshop.data
        return (data.evaluation if group.is_eval else data.train)[group.row]
