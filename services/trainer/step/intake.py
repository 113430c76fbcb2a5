"""From a step's plan to its scored groups: plans and requests groups, collects, replaces and scores them.

`Intake` has all requested steps: the one being trained and up to `elastic.max_staleness` steps after it, which are
generated at the same time. `StepIntake` has the groups of one of them.

*Read* (`Intake`). Consumes: `rollouts.finished`, in its one order for all steps. Produces: the outcomes of groups,
complete or dropped, passed to the `StepIntake` of their step. Waits for: the next entry, which the rollout manager, or
an environment's answer, appends. Ends when: the job does. Entries of a step that is not requested yet stay in the
stream, so memory is bounded.

*Request* (`StepIntake.request`). Consumes: planned groups. Produces: one `GroupRequested` per group in the job's
`rollouts.requested`. Waits for: `StepTurns.start`, which with an environment waits for its `reset`. Ends when: all
groups are requested. Repeating a request, as the successor of a killed trainer does, is harmless: the manager knows
each group by its id.

*Score* (`StepIntake.take`). Consumes: the outcome of a group. Produces: a `ScoredGroup`, in order of completion
(`next_group`); samples in the job's `samples` stream; a `group_dropped` event for a group without a score; the request
of a replacement group. Waits for: `RewardFunction.score`, which returns within `reward.timeout_s` of when a reward
process takes the group. Ends when: the group has its score, or was dropped.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from operator import attrgetter
from statistics import fmean
from typing import Any

import structlog

from rlboost.services.trainer.domain.advantages import length_penalties
from rlboost.services.trainer.domain.conversations import Row
from rlboost.services.trainer.domain.groups import DroppedGroup, GroupOutcome, OpenSteps, ScoredGroup, StepCollector
from rlboost.services.trainer.domain.metrics import RolloutTally
from rlboost.services.trainer.domain.plan import PlannedGroup, plan_step, turn_ids
from rlboost.services.trainer.domain.sessions import SessionCollector
from rlboost.services.trainer.job.job import Job
from rlboost.services.trainer.ports.storage import TrainState
from rlboost.services.trainer.step.durable import DurableCurriculum, DurableResampling, StepReplacements
from rlboost.services.trainer.step.judging import MAX_JUDGING_S, OtherModels
from rlboost.services.trainer.step.sessions import OtherPolicy, StepSessions
from rlboost.services.trainer.step.texts import add_conversation_rewards, reward_batch, sample_summaries
from rlboost.services.trainer.step.turns import StepTurns
from rlboost.shared.errors import Fatal, Unprocessable, WaitTimedOut
from rlboost.shared.ids import SampleId, group_of
from rlboost.shared.messages import GroupRequested
from rlboost.shared.progress import CountProgress
from rlboost.shared.streams import names
from rlboost.shared.streams.bus import Append, Bus, Entry, ReadSize

log = structlog.get_logger(__name__)

# --- The groups of one step -------------------------------------------------------------------------------------------


_GROUPS_PER_TRANSACTION = 64
"""Bounds the size of a transaction with long prompts, and lets workers start while other environments are reset."""


class StepIntake:
    """The groups of one step, from the request to the score. A step may be requested before it is trained."""

    def __init__(self, all_steps: Intake, step: int, *, was_trained: bool) -> None:
        """Plan step `step`.

        Args:
            all_steps: the intake of the job.
            step: number of the step; the step after the last training step only evaluates.
            was_trained: an earlier trainer process trained it and published its samples for people.

        """
        job, curriculum, resampling = all_steps.job, all_steps.curriculum, all_steps.resampling
        data, spec = job.resources.data, job.generating_spec
        self._job = job
        self.step = step
        self._was_trained = was_trained
        self._curriculum = curriculum
        self._scoring = all_steps.scoring
        selection = curriculum.plan(step) if curriculum is not None and step < spec.steps else None
        rows = None if selection is None else selection.rows
        planned = plan_step(spec, job.no, step, len(data.train), data.n_evaluation, rows)
        initial = [group.row for group in planned if not group.is_eval]
        self.n_train = self.n_initial_pending = len(initial)
        """Number of training groups of the step, and of those initially requested that are not complete."""
        self._replacements = StepReplacements(resampling, step, initial) if resampling and initial else None
        planned += [] if self._replacements is None else self._replacements.recorded()
        self._planned = {group.id: group for group in planned}
        self._unstarted = planned
        self._unsent: list[GroupRequested] = []
        """The requests of started groups."""
        sizes, ids = {group.id: group.n for group in planned}, turn_ids(spec, data.n_evaluation)
        answered = None if spec.conversation is None else ids
        least = None if spec.conversation is None else spec.conversation.least(spec.algorithm.group_size)
        self.groups: StepCollector
        self.turns: StepTurns | StepSessions
        if spec.agent is None:
            self.groups = StepCollector(job.no, step, sizes, spec.elastic.max_staleness, answered, least)
            self.turns = StepTurns(job, step, self._planned, self.groups, ids, all_steps.scoring)
        else:
            self.groups = SessionCollector(job.no, step, sizes, spec.elastic.max_staleness, answered, least)
            self.turns = StepSessions(
                job, step, self._planned, self.groups, ids, all_steps.scoring, all_steps.other_policies
            )
        self._tally = RolloutTally()
        if selection is not None:
            self._tally.measured |= selection.metrics()
        self._tally.resampled = self._replacements.n_replaced if self._replacements is not None else None
        self._training: asyncio.Queue[tuple[PlannedGroup, asyncio.Task[ScoredGroup | None]]] = asyncio.Queue()
        """Training groups and their scoring, in order of completion; the task returns None for a dropped group."""
        self._early: dict[int, tuple[PlannedGroup, asyncio.Task[ScoredGroup | None]]] = {}
        """With `trainer.deterministic`: those that are complete before their turn, by their number in the step."""
        self._turn = 0
        """Number of the group whose turn it is."""
        self.n_undecided = 0
        """Number of complete groups that may still be replaced."""
        self._decided = asyncio.Event()
        """Set whenever a group was decided."""
        self._evaluation: list[asyncio.Task[ScoredGroup | None]] = []
        """The scoring of evaluation groups."""
        self._judges, self._teacher = all_steps.judges, all_steps.teacher
        self.judging: set[asyncio.Task[ScoredGroup | None]] = set()
        """The scoring that runs, if other models take part, whose requests reserved workers may have to generate."""

    @property
    def _asks_models(self) -> bool:
        return self._judges is not None or self._teacher is not None

    # --- request ---

    async def request(self, *, evaluation: bool) -> None:
        """Request the groups that are not requested yet; evaluation groups, which need this step's weights, on demand.

        Raises:
            Fatal: no conversation of the step can start, or the environments took too long.

        """
        if self._unstarted and self._curriculum is not None and self.n_train:
            await self._curriculum.persist(self.step)
        # Evaluation groups start with the others: a predecessor that was killed may have requested them, and their
        # samples are in the log then.
        self.turns.evaluates = self.turns.evaluates or evaluation
        while self._unstarted:
            some, self._unstarted = self._unstarted[:_GROUPS_PER_TRANSACTION], self._unstarted[_GROUPS_PER_TRANSACTION:]
            self._unsent += await self.turns.start(some)
            await self._send_unsent(evaluation=evaluation)
        self.turns.check_started()
        await self._send_unsent(evaluation=evaluation)

    async def _send_unsent(self, *, evaluation: bool) -> None:
        due = [request for request in self._unsent if evaluation or not self._planned[request.group].is_eval]
        for start in range(0, len(due), _GROUPS_PER_TRANSACTION):
            await self._send(due[start : start + _GROUPS_PER_TRANSACTION])
        self._unsent = [request for request in self._unsent if self._planned[request.group].is_eval and not evaluation]

    async def _send(self, requests: Sequence[GroupRequested]) -> None:
        stream = names.rollouts_requested(self._job.id)
        if (images := self._job.resources.images) is not None:
            await images.upload(self.step, (image for request in requests for image in request.sampling.images))
        await self._job.bus.transact([Append(stream, request) for request in requests])

    # --- score and replace ---

    def ask_teacher(self) -> None:
        """Have the samples of training groups that are new scored by a teacher that workers serve."""
        arrived = self.groups.take_arrived()  # without a teacher too, so that no dropped sample is held
        if self._teacher is None:
            return
        for sample, conversation in arrived:
            planned = self._planned[group_of(sample.sample)]
            prompt = self.turns.prompt_of(planned.id)
            whole = Row(prompt, sample.tokens, b"", sample.logprobs)
            if not planned.is_eval:
                rows = [whole] if conversation is None else conversation.rows(prompt)
                self._teacher.ask(self.step, planned, sample, rows, self._scoring)

    def take(self, outcome: GroupOutcome) -> None:
        """Start a task that scores a complete group, or reports a dropped one."""
        planned = self._planned[outcome.group]
        self.turns.release(outcome.group)
        if self._teacher is not None and isinstance(outcome, DroppedGroup):
            self._teacher.release(outcome.group)
        name = f"score-{outcome.group}"
        if planned.is_eval:
            self._evaluation.append(self._task(self._score(outcome, planned), name))
            return
        self.n_initial_pending -= planned.number < self.n_train
        if self._replacements is None:
            scoring = self._score(outcome, planned)
        else:
            self.n_undecided += 1
            scoring = self._score_or_replace(self._replacements, outcome, planned)
        self._training.put_nowait((planned, self._task(scoring, name)))

    def _task(self, scoring: Coroutine[Any, Any, ScoredGroup | None], name: str) -> asyncio.Task[ScoredGroup | None]:
        task = self._scoring.create_task(scoring, name=name)
        if self._asks_models:
            self.judging.add(task)
            task.add_done_callback(self.judging.discard)
        return task

    async def _score(self, outcome: GroupOutcome, planned: PlannedGroup) -> ScoredGroup | None:
        """Return a group with its rewards, None for one that was dropped or could not be scored."""
        if isinstance(outcome, DroppedGroup):
            await self.turns.report_dropped(outcome.group)  # here, as the step does not end before it is done
            await self._drop(outcome.group, outcome.reason, outcome.detail)
            return None
        job, spec, data, began = self._job, self._job.generating_spec, self._job.resources.data, time.monotonic()
        start = self.turns.prompt_of(planned.id)
        batch = reward_batch(outcome, job.prompt(planned), data)
        if self._judges is not None:
            batch = replace(batch, verdicts=await self._judges.verdicts(self.step, planned, batch))
        scores = await job.resources.rewards.score(batch)
        giver = "environment" if spec.agent is None else "agent"
        scores = add_conversation_rewards(scores, outcome, name=giver if spec.reward is not None else "")
        took_s = time.monotonic() - began
        if not self._was_trained:
            shown = outcome, start, scores, data, self.turns.tools.get(planned.id, ()), batch.verdicts
            # What a model writes may take long to read: the loop renews the trainer's lease meanwhile.
            summaries = await asyncio.to_thread(sample_summaries, *shown)
            held_out = {"set": planned.held_out.name} if planned.held_out is not None and planned.held_out.name else {}
            await job.publish_samples([summary | held_out for summary in summaries])
        taught: Mapping[tuple[bytes, bytes], bytes] = {}
        if self._teacher is not None and not planned.is_eval:
            taught, problem = await self._teacher.columns(outcome)
            if problem:
                scores = replace(scores, rewards=None, reason="teacher", detail=problem)
        if scores.rewards is None:
            await self._drop(outcome.group, scores.reason, scores.detail)
            return None
        if not planned.is_eval:
            self._tally.scoring_s.append(took_s)
        return ScoredGroup(
            outcome.group,
            outcome.samples,
            scores.rewards,
            scores.parts,
            outcome.conversations,
            start,
            length_penalties(outcome.completions, spec.algorithm, spec.sampling.max_tokens),
            planned.row,
            planned.held_out,
            [image.digest for image in job.prompt(planned).images],
            scores.costs or ((0.0,) * len(scores.rewards) if spec.algorithm.cost_coef else ()),
            spec.algorithm.cost_coef,
            taught,
        )

    async def _drop(self, group: int, reason: str, detail: str) -> None:
        self._tally.dropped[reason] += 1
        self._tally.first_detail = self._tally.first_detail or detail
        name = str(SampleId.unpack(group))
        # The traceback once for each step: the stream of events is bounded in entries, not in bytes.
        shown = detail if self._tally.dropped[reason] == 1 else "\n".join(detail.splitlines()[:2])
        await self._job.emit_event("group_dropped", group=name, reason=reason, detail=shown)
        await self._job.warn(self._job.faults.on_group_dropped(self.step, reason, detail))

    async def _score_or_replace(
        self, replacements: StepReplacements, outcome: GroupOutcome, planned: PlannedGroup
    ) -> ScoredGroup | None:
        """Score a training group; if all its rewards are equal, request a group of another prompt in its place."""
        try:
            scored = await self._score(outcome, planned)
            # A dropped group is not replaced: it shows a fault, not the value of its prompt, and the next group may
            # have the same fault. A step that was trained before has no workers with its version any more: it has only
            # the recorded replacements.
            if scored is None or self._was_trained:
                return scored
            replacement = await replacements.replace(planned, scored)
            if replacement is not None:
                self._planned[replacement.id] = replacement
                self.groups.add(replacement.id, replacement.n)
                self._decided.set()
                await self._send(await self.turns.start([replacement]))
            self._tally.resampled = replacements.n_replaced
            return scored
        finally:
            self.n_undecided -= 1
            self._decided.set()

    # --- deliver ---

    async def next_group(self) -> ScoredGroup | None:
        """Return the next training group that is not replaced, None for a dropped one."""
        while True:
            planned, scoring = await self._next_training()
            if (group := await self._scored(scoring)) is not None:
                self._tally.scored.append(group)
                self._tally.penalties += group.penalties
            if self._replacements is None or not self._replacements.is_replaced(planned):
                self._turn = planned.number % self.n_train + 1
                return group
            self._turn = planned.number + self.n_train  # the number of its replacement
            self._tally.replaced["equal_rewards"] += group is not None

    async def _next_training(self) -> tuple[PlannedGroup, asyncio.Task[ScoredGroup | None]]:
        """Return the next group in order of completion or, with `trainer.deterministic`, in that of the plan."""
        while not self._job.spec.trainer.deterministic or self._turn not in self._early:
            planned, scoring = await self._training.get()
            if not self._job.spec.trainer.deterministic:
                return planned, scoring
            self._early[planned.number] = planned, scoring
        return self._early.pop(self._turn)

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
        self._tally.lost, self._tally.n_begun_again = self.groups.lost, self.groups.n_begun_again
        return self._tally

    async def _evaluated(self) -> list[ScoredGroup]:
        tasks, progress = self._evaluation, CountProgress("groups")

        def scored() -> str:
            progress.update(sum(task.done() for task in tasks), len(tasks))
            return progress.text()

        if any(not task.done() for task in tasks):
            async with self._reward_wait(f"the evaluation after step {self.step} is scored", len(tasks), scored):
                await asyncio.wait(tasks)
        # Sums of rewards must not depend on which group was complete first.
        return sorted([group for task in tasks if (group := await task) is not None], key=attrgetter("group"))

    @asynccontextmanager
    async def _reward_wait(self, because: str, n_groups: int, progress: Callable[[], str] = str) -> AsyncIterator[None]:
        """Wait for rewards of groups; raises `Fatal` at the limit."""
        reward = self._job.spec.reward
        # Each call has its own limit; in addition, the processes may be busy with groups of later steps.
        limit_s = self._job.limit_s + (reward.timeout_s if reward is not None else 0.0) * n_groups
        if self._asks_models:  # which have a limit of their own, between two answers
            limit_s = MAX_JUDGING_S
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
        if self._curriculum is not None and self.n_train:
            groups = sorted(self._tally.scored, key=attrgetter("group"))
            means = [(self._planned[group.group].row, fmean(group.rewards)) for group in groups]
            await self._curriculum.record_scores(self.step, means)


# --- All requested steps ----------------------------------------------------------------------------------------------


_MAX_ENTRIES = 512
_BLOCK_S = 1.0


class FinishedLog:
    """Reads `rollouts.finished` of one job, entry by entry, from the trainer's own position."""

    def __init__(self, job: Job, cursor: str) -> None:
        """Start after `cursor`."""
        self.cursor = cursor
        """Position of the last entry that was taken."""
        self._job = job
        self._ahead: deque[Entry] = deque()
        self._size = ReadSize(_MAX_ENTRIES)

    @property
    def all_taken(self) -> bool:
        """Return True if all entries read so far were taken; the stream may have more."""
        return not self._ahead

    async def wait(self, what: str, because: str, progress: Callable[[], str]) -> None:
        """Wait for `what` until there is a next entry; the arguments are those of `Waits.on`.

        Raises:
            WaitTimedOut: none came within the limit.

        """
        if not self._ahead:
            waits, limit_s = self._job.waits, self._job.limit_s
            async with waits.on(what, because=because, limit_s=limit_s, progress=progress, kind="samples"):
                await self.peek()

    async def is_read(self) -> bool:
        """Return True if there is no entry that was not taken, for now."""
        stream = names.rollouts_finished(self._job.id)
        return not self._ahead and not await self._job.bus.retry(lambda bus: bus.read({stream: self.cursor}, count=1))

    async def peek(self) -> Entry:
        """Return the next entry without taking it; wait for it without a limit."""
        while not self._ahead:
            self._ahead.extend(await self._job.bus.retry(self._read))
        return self._ahead[0]

    def take(self) -> Entry:
        """Take the next entry, which `wait` or `peek` has found."""
        entry = self._ahead.popleft()
        self.cursor = entry.id
        return entry

    async def _read(self, bus: Bus) -> list[Entry]:
        stream = names.rollouts_finished(self._job.id)
        entries = await bus.read({stream: self.cursor}, count=self._size.count, block_s=_BLOCK_S)
        self._size.update(entries)
        return entries


class Intake:
    """All requested steps of a job."""

    def __init__(
        self,
        job: Job,
        state: TrainState,
        scoring: asyncio.TaskGroup,
        curriculum: DurableCurriculum | None,
        resampling: DurableResampling | None,
        models: OtherModels | None = None,
        other_policies: Sequence[OtherPolicy] = (),
    ) -> None:
        """Request no step yet.

        Args:
            job: the job.
            state: its position: what to read, and up to where an earlier process has counted late samples.
            scoring: owns the scoring tasks: groups of a later step are scored while an earlier step trains.
            curriculum: chooses the prompts of each step; None: the epoch order does.
            resampling: records which groups were replaced by groups of other prompts; None if none can be.
            models: ask judges and teacher; None if there is none.
            other_policies: those that learn with this one, and the job whose agent calls it.

        """
        self.job = job
        self.other_policies = other_policies
        self._questions = None if models is None else models.questions
        self.judges = None if models is None else models.judges
        self.teacher = None if models is None else models.teacher
        self.scoring = scoring
        self.curriculum = curriculum
        self.resampling = resampling
        self._finished = FinishedLog(job, state.finished_cursor)
        self._open = OpenSteps(state.read_cursor)
        self._intakes: dict[int, StepIntake] = {}

    async def enter(self, step: int, head: int) -> StepIntake:
        """Start step `step` and return its intake, which has the groups that were completed ahead.

        Args:
            step: the one to train, or to evaluate.
            head: the newest committed version; samples of steps before it were published before.

        Raises:
            Fatal: a curriculum cannot choose its prompts.

        """
        spec, curriculum = self.job.generating_spec, self.curriculum
        for number in range(step, max(step, min(step + spec.elastic.max_staleness, spec.steps - 1)) + 1):
            if number not in self._intakes:
                if curriculum is not None and number < spec.steps:
                    await curriculum.prepare(number)
                intake = self._intakes[number] = StepIntake(self, number, was_trained=number < head)
                self._open.open(number, intake.groups)
        self._open.enter(step)
        self._intakes = {number: intake for number, intake in self._intakes.items() if number >= step}
        return self._intakes[step]

    async def request(self) -> None:
        """Request all groups of the step being trained, and the training groups of the steps after it."""
        first = min(self._intakes)
        for number, intake in sorted(self._intakes.items()):
            await intake.request(evaluation=number == first)
        await self._answer_turns()

    @property
    def cursors(self) -> tuple[str, str]:
        """Positions before the first entry that an open step needs, and of the last entry that was read."""
        return self._open.needed_from(self._finished.cursor), self._finished.cursor

    async def read(self, what: str, because: str, progress: Callable[[], str]) -> None:
        """Read the next entry, of any step, waiting for `what`; the arguments are those of `Waits.on`.

        Raises:
            Fatal: no entry came within the limit, or the stream is inconsistent.

        """
        await self._answer_turns()  # `read_ahead` may have been cancelled before it did

        def shown() -> str:
            awaited = self._intakes[min(self._intakes)].turns.awaited
            late = f"job {awaited} has not come to this step" if awaited else ""
            return "; ".join(filter(None, (progress(), late)))

        try:
            await self._finished.wait(what, because, shown)
        except WaitTimedOut as error:
            if self.other_policies and not self.job.unpaused.is_set():
                return  # the others are paused with it, perhaps before this step
            agent = self.job.generating_spec.agent
            hosts = f", and a host of agents runs: 'rlboost agents {self.job.id}'" if agent and agent.remote else ""
            advice = f"check that a worker is ready to generate: 'rlboost worker list'{hosts}"
            for other in self.other_policies:
                advice += f"; and that a trainer runs job {other.job_id}: 'rlboost status {other.job_id}'"
            raise Fatal(f"{error}: {advice}") from error
        self._take()
        await self._answer_turns()

    async def read_ahead(self) -> None:
        """Read entries of later steps until one belongs to a step that is not requested. Cancel it at any time.

        Raises:
            Fatal: the stream is inconsistent.

        """
        if len(self._intakes) > 1:
            while self._open.holds((await self._finished.peek()).message):
                self._take()
                await self._answer_turns()

    async def read_next(self) -> None:
        """Read the next entry of a requested step, waiting without a limit. Cancel it at any time.

        Raises:
            Fatal: the stream is inconsistent.

        """
        if not self._open.holds((await self._finished.peek()).message):
            await asyncio.Event().wait()  # its step is requested later
        self._take()
        await self._answer_turns()

    def _take(self) -> None:
        if self._questions is not None:
            self._questions.on_progress()
        before, entry = self._finished.cursor, self._finished.take()
        try:
            decided = self._open.apply(before, entry)
        except Unprocessable as error:
            log.warning("finished_entry_skipped", stream=entry.stream, entry=entry.id, reason=str(error))
            decided = None
        for intake in self._intakes.values():
            intake.ask_teacher()
        if decided is not None:
            step, outcome = decided
            self._intakes[step].take(outcome)

    async def _answer_turns(self) -> None:
        """Answer turns, or begin sessions, once all entries at hand, which may contain answers and ends, were read."""
        if not self._finished.all_taken:
            return
        # An agent acts on more than its own conversation: one that has ended must not run again.
        if self.job.generating_spec.agent is not None and not await self._finished.is_read():
            return
        for intake in self._intakes.values():
            intake.turns.answer_turns()
