"""The groups of one step, from the request to the score. A step may be requested before it is trained.

Consumes: the outcomes of groups, complete or dropped, that `RequestedSteps` reads from `rollouts.finished` (`take`).
Produces: requests of groups (`GroupRequests`); a scoring task per outcome, owned by `JobContext.scoring`; scored
training groups in the order in which they were completed (`next_group`); requests of replacement groups.
Waits for: in `next_group`, the next outcome, which `take` puts into the queue, and then its score. In
`wait_until_decided`, the scores of groups that may be replaced: the end of each scoring task wakes it.
Ends when: `next_group` was called once per training group of the step; `finish` then returns what was counted.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from operator import attrgetter
from statistics import fmean

from rlboost.services.trainer.domain.groups.collector import DroppedGroup, GroupOutcome
from rlboost.services.trainer.domain.groups.scored_group import ScoredGroup
from rlboost.services.trainer.domain.metrics import RolloutTally
from rlboost.services.trainer.domain.plan import PlannedGroup, plan_step
from rlboost.services.trainer.step.context import JobContext
from rlboost.services.trainer.step.durable_resampling import StepReplacements
from rlboost.services.trainer.step.group_requests import GroupRequests
from rlboost.services.trainer.step.multi_turn import MultiTurn
from rlboost.services.trainer.step.rollouts import Rollouts, SingleTurn
from rlboost.services.trainer.step.scoring import GroupScorer
from rlboost.shared.errors import Fatal, WaitTimedOut
from rlboost.shared.progress import CountProgress


class GroupIntake:
    """The groups of one step."""

    def __init__(self, job: JobContext, step: int, *, was_trained: bool) -> None:
        """Plan step `step`.

        Args:
            job: the step's job.
            step: number of the step; the step after the last training step only evaluates.
            was_trained: an earlier trainer process trained it and published its samples for people.

        """
        data, spec = job.resources.data, job.spec
        self._job = job
        self.step = step
        self._was_trained = was_trained
        selection = job.curriculum.plan(step) if job.curriculum is not None and step < spec.steps else None
        rows = None if selection is None else selection.rows
        planned = plan_step(spec, job.no, step, len(data.train), len(data.evaluation), rows)
        initial = [group.row for group in planned if not group.is_eval]
        self.n_train = self.n_initial_pending = len(initial)
        """Number of training groups of the step, and of those initially requested that are not complete."""
        self._replacements = job.resampling.of_step(step, initial) if job.resampling is not None and initial else None
        planned += [] if self._replacements is None else self._replacements.recorded()
        self._planned = {group.id: group for group in planned}
        self.rollouts: Rollouts = (SingleTurn if spec.environment is None else MultiTurn)(job, step, planned)
        self.groups = self.rollouts.groups
        self._tally = RolloutTally()
        if spec.eval is not None:
            self._tally.pass_reward = spec.eval.pass_reward
        if selection is not None:
            self._tally.measured |= selection.metrics()
        if self._replacements is not None:
            self._tally.resampled = self._replacements.n_replaced
        self._requests = GroupRequests(job, self.rollouts, planned)
        self._scorer = GroupScorer(job, step, self.rollouts.prompts, self._tally, publish=not was_trained)
        self._training: asyncio.Queue[tuple[PlannedGroup, asyncio.Task[ScoredGroup | None]]] = asyncio.Queue()
        """Training groups and their scoring, in order of completion; the task returns None for a dropped group."""
        self.n_undecided = 0
        """Number of complete groups that may still be replaced."""
        self._decided = asyncio.Event()
        """Set whenever a group was decided."""
        self._evaluation: list[asyncio.Task[ScoredGroup | None]] = []
        """The scoring of evaluation groups."""

    # --- request ---

    async def request(self, *, evaluation: bool) -> None:
        """Request the groups that are not requested yet; evaluation groups, which need this step's weights, on demand.

        Repeating a request, as the successor of a killed trainer does, is harmless: the manager knows each group by its
        id.

        Raises:
            Fatal: no conversation of the step can start, or the environments took too long.

        """
        if not self._requests.all_started and self._job.curriculum is not None and self.n_train:
            await self._job.curriculum.persist(self.step)
        await self._requests.send(evaluation=evaluation)

    # --- score ---

    def take(self, outcome: GroupOutcome) -> None:
        """Start a task that scores a complete group, or reports a dropped one."""
        planned = self._planned[outcome.group]
        if isinstance(outcome, DroppedGroup):
            self.rollouts.release(outcome.group)
        name = f"score-{outcome.group}"
        if planned.is_eval:
            self._evaluation.append(self._job.scoring.create_task(self._scorer.score(outcome, planned), name=name))
            return
        self.n_initial_pending -= planned.number < self.n_train
        if self._replacements is None:
            scoring = self._scorer.score(outcome, planned)
        else:
            self.n_undecided += 1
            scoring = self._score_or_replace(self._replacements, outcome, planned)
        self._training.put_nowait((planned, self._job.scoring.create_task(scoring, name=name)))

    async def _score_or_replace(
        self, replacements: StepReplacements, outcome: GroupOutcome, planned: PlannedGroup
    ) -> ScoredGroup | None:
        """Score a training group; if all its rewards are equal, request a group of another prompt in its place."""
        try:
            scored = await self._scorer.score(outcome, planned)
            # A dropped group is not replaced: it shows a fault, not the value of its prompt, and the next group may
            # have the same fault. A step that was trained before has no workers with its version any more: it has only
            # the recorded replacements.
            if scored is None or self._was_trained:
                return scored
            replacement = await replacements.replace(planned, scored)
            if replacement is not None:
                self._expect(replacement)
                await self._requests.send_replacement(replacement)
            self._tally.resampled = replacements.n_replaced
            return scored
        finally:
            self.n_undecided -= 1
            self._decided.set()

    def _expect(self, replacement: PlannedGroup) -> None:
        self._planned[replacement.id] = replacement
        self.rollouts.add(replacement)
        self._decided.set()

    # --- deliver ---

    async def next_group(self) -> ScoredGroup | None:
        """Return the next training group that is not replaced, None for a dropped one."""
        while True:
            planned, scoring = await self._training.get()
            if (group := await self._scored(scoring)) is not None:
                self._tally.scored.append(group)
                self._tally.penalties += group.penalties
            if self._replacements is None or not self._replacements.is_replaced(planned):
                return group
            self._tally.replaced["equal_rewards"] += group is not None

    async def _scored(self, scoring: asyncio.Task[ScoredGroup | None]) -> ScoredGroup | None:
        because = f"a complete group of step {self.step + 1} has none yet"
        async with self._reward_wait(because, n_groups=len(self._planned)):
            await asyncio.wait({scoring})
        return await scoring

    async def finish(self) -> RolloutTally:
        """Return what was counted, once each group of the evaluation, too, is scored or dropped.

        Raises:
            Fatal: scoring takes too long.

        """
        self._tally.evaluated = await self._evaluated()
        self._tally.duplicates, self._tally.engines = self.groups.duplicates, self.groups.engines
        return self._tally

    async def _evaluated(self) -> list[ScoredGroup]:
        tasks, progress = self._evaluation, CountProgress("groups")

        def scored() -> str:
            progress.update(sum(task.done() for task in tasks), len(tasks))
            return progress.text()

        if any(not task.done() for task in tasks):
            async with self._reward_wait(f"the evaluation after step {self.step} is scored", len(tasks), scored):
                await asyncio.wait(tasks)
        return [group for task in tasks if (group := await task) is not None]

    @asynccontextmanager
    async def _reward_wait(self, because: str, n_groups: int, progress: Callable[[], str] = str) -> AsyncIterator[None]:
        """Wait for rewards of groups; raises `Fatal` at the limit."""
        reward = self._job.spec.reward
        # Each call has its own limit; in addition, the processes may be busy with groups of later steps.
        limit_s = self._job.limit_s + (reward.timeout_s if reward is not None else 0.0) * n_groups
        try:
            waits = self._job.waits
            async with waits.on("the rewards", because=because, limit_s=limit_s, progress=progress, kind="rewards"):
                yield
        except WaitTimedOut as error:
            raise Fatal(f"{error}: make the reward function faster, or raise reward.workers") from error

    async def wait_until_decided(self) -> None:
        """Return once no complete group can be replaced any more, or a requested replacement is not complete.

        Raises:
            Fatal: scoring takes too long.

        """
        because = f"{self.n_undecided} groups of step {self.step + 1} may have to be replaced"
        async with self._reward_wait(because, n_groups=self.n_undecided):
            while self.n_undecided and self.groups.complete:
                self._decided.clear()
                await self._decided.wait()

    async def record_scores(self) -> None:
        """Pass the mean rewards of the step's groups to the curriculum."""
        if self._job.curriculum is not None and self.n_train:
            groups = sorted(self._tally.scored, key=attrgetter("group"))
            means = [(self._planned[group.group].row, fmean(group.rewards)) for group in groups]
            await self._job.curriculum.record_scores(self.step, means)
