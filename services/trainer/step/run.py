"""One training step: trains on scored groups as they are completed, as soon as the trainer has the device.

*Collect*. Consumes: `rollouts.finished`, through `Intake`. Produces: scoring tasks (`StepIntake.take`). Waits for: the
next entry (`Intake.read`); if groups may be replaced, the scores that decide it (`StepIntake.wait_until_decided`),
while it reads entries of later steps. Ends when: every group of the step is complete or dropped, and seeding is over;
then `Intake.read_ahead` reads entries of later steps until training ends.

*Train*. Consumes: scored groups in order of completion (`StepIntake.next_group`). Produces: optimizer steps.
Waits for: the next group, until its scoring task ends; the device (`DeviceTurn.run`), until *collect* reads
`SeedingEnded` and calls `DeviceTurn.set_owned`. Ends when: the last group of the step is trained.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import TypeVar

import numpy as np

from rlboost.services.trainer.domain import advantages
from rlboost.services.trainer.domain.advantages import NEED_THE_STEP, all_equal, group_advantages
from rlboost.services.trainer.domain.groups import ScoredGroup
from rlboost.services.trainer.domain.loss import preference
from rlboost.services.trainer.domain.loss.function import MISMATCH, add_sums
from rlboost.services.trainer.domain.metrics import Durations, StepTally
from rlboost.services.trainer.domain.plan import (
    Accumulate,
    OptimizerStep,
    SequenceRow,
    TrainingRow,
    UpdatePlanner,
    constant,
    learning_rate,
    pack,
    select,
)
from rlboost.services.trainer.job.job import Job
from rlboost.services.trainer.ports.engine import NotFinite
from rlboost.services.trainer.step.intake import Intake, StepIntake
from rlboost.shared.errors import Fatal, WaitTimedOut
from rlboost.shared.progress import CountProgress
from rlboost.shared.wire import F32, unpack

T = TypeVar("T")


# --- The trainer's turns on a device that it shares with reserved engines ---------------------------------------------


class DeviceTurn:
    """The trainer's turn on a device that it shares with the reserved engines, during one step."""

    def __init__(self, job: Job, step: int) -> None:
        """Start without the device. The engine is offloaded when a turn ends before the step does."""
        self._job = job
        self._step = step
        self._offloading: Future[object] | None = None
        self._owned = asyncio.Event()
        self._step_ended = False
        self._began = self._since = time.monotonic()
        self.waited_s: float | None = None
        """Time from the start of the step to the first turn; None before it."""
        self.held_s = 0.0
        """Total duration of the turns that have ended."""
        self.busy_s = 0.0
        """How long the device computed."""
        self._computes_since: float | None = None
        self.shared_wait_s = 0.0
        """How long calls waited while jobs of other trainers had the device."""

    @property
    def idle_s(self) -> float:
        """Return how long the trainer has had the device until now without computing."""
        now = time.monotonic()
        held_s = self.held_s + (now - self._since if self._owned.is_set() else 0.0)
        busy_s = self.busy_s + (0.0 if self._computes_since is None else now - self._computes_since)
        return max(0.0, held_s - busy_s - self.shared_wait_s)

    def set_owned(self, *, owned: bool) -> None:
        """Set whether the trainer has the device; without effect once the step's last turn has ended."""
        if self._step_ended:
            return
        now = time.monotonic()
        if owned and not self._owned.is_set():
            self._since = now
            if self.waited_s is None:
                self.waited_s = now - self._began
            self._owned.set()
        elif not owned and self._owned.is_set():
            self._end_turn()
            self._offloading = self._job.device.post(self._job.resources.engine.offload)

    def end_step(self) -> None:
        """End the step's last turn. Nothing is offloaded, because the weights are published from the device."""
        self._step_ended = True
        if self._owned.is_set():
            self._end_turn()

    def _end_turn(self) -> None:
        self.held_s += time.monotonic() - self._since
        self._owned.clear()

    async def run(self, call: Callable[[], T]) -> T:
        """Run a call on the device during a turn; the end of the turn does not interrupt a started call.

        Raises:
            Fatal: the reserved engines did not release the device within the limit.

        """
        # The turn may end again during either wait.
        while not self._owned.is_set() or self._offloading is not None:
            if self._offloading is not None:
                offloading, self._offloading = self._offloading, None
                await asyncio.wrap_future(offloading)
            else:
                await self._turn()
        device = self._job.device
        began, waited_s = time.monotonic(), device.waited_s
        self._computes_since = began
        try:
            return await device.compute(call)
        finally:
            self._computes_since = None
            waited_s = device.waited_s - waited_s
            self.shared_wait_s += waited_s
            self.busy_s += time.monotonic() - began - waited_s

    async def _turn(self) -> None:
        because = f"the reserved engines generate for step {self._step + 1} on it"
        try:
            async with self._job.waits.on("the device", because=because, limit_s=self._job.limit_s):
                await self._owned.wait()
        except WaitTimedOut as error:
            raise Fatal(f"{error}: check that the rollout manager runs, and that no worker hangs") from error


# --- The training rows of scored groups -------------------------------------------------------------------------------
# One of three estimators turns rewards into advantages: from rewards alone, with a critic, or for preference pairs.
# `domain` has the rules; this calls the engine for their inputs when the trainer has the device.


EngineCall = Callable[[Sequence[Sequence[SequenceRow]]], list[bytes]]
"""Returns a float32 column per row."""
Run = Callable[[Callable[[], list[bytes]]], Awaitable[list[bytes]]]
"""Runs a call on the device once the trainer has it: `DeviceTurn.run`."""


async def engine_columns(rows: Sequence[SequenceRow], call: EngineCall, max_tokens: int, run: Run) -> list[bytes]:
    """Return the engine's column of each row, computed in micro-batches of at most `max_tokens` tokens."""
    columns = [b""] * len(rows)
    for batch in pack(rows, max_tokens):
        # One call per micro-batch: the turn may end between two, and a cancelled job waits for one only.
        found = await run(partial(call, select(rows, [batch])))
        for index, column in zip(batch, found, strict=True):
            columns[index] = column
    return columns


class TrainingRows(ABC):
    """Builds the training rows of one step; a subclass turns the rewards of groups into the advantages of rows."""

    def __init__(self, job: Job, tally: StepTally, run: Run) -> None:
        """Count into `tally`; call the engine through `run`. Create it with `of`."""
        self._algorithm = job.generating_spec.algorithm
        self._engine = job.resources.engine
        self._critic = job.resources.critic
        self._tally = tally
        self._run = run
        self._micro_batch_tokens = job.spec.trainer.micro_batch_tokens
        # The weights at the start of the step are gone after its first update.
        decoupled = self._algorithm.is_decoupled(job.generating_spec.elastic.max_staleness)
        self._needs_proximal = decoupled and self._algorithm.updates_per_step * self._algorithm.epochs > 1
        self._is_served = bool(job.spec.served_teacher)
        self._keeps_reference = self._algorithm.needs_reference and self._algorithm.epochs > 1
        """True if each row gets its column of the reference once, for all epochs."""
        self.needs_all_groups = self._needs_proximal or self._algorithm.advantage in NEED_THE_STEP
        """True if rows can be built only from all groups of the step."""

    @staticmethod
    def of(job: Job, tally: StepTally, run: Run) -> TrainingRows:
        """Return the builder of a step of the job's algorithm."""
        algorithm = job.generating_spec.algorithm
        if algorithm.preference is not None:
            return _PreferencePairs(job, tally, run)
        return (_FromRewards if algorithm.critic is None else _WithCritic)(job, tally, run)

    async def build(self, groups: Sequence[ScoredGroup | None]) -> list[list[TrainingRow]]:
        """Return the rows of each group, an empty list for a group that was dropped or is excluded.

        Args:
            groups: some groups of the step; all of them if it `needs_all_groups`.

        """
        scored = [group for group in groups if group is not None]
        rows = await self._estimate(scored, [group.compared_rewards for group in scored])
        if self._needs_proximal:
            columns = iter(await self._columns(_flat(rows), self._engine.logprobs))
            rows = [[replace(row, proximal=next(columns)) for row in group] for group in rows]
        if self._keeps_reference and not all(row.reference for row in _flat(rows)):
            columns = iter(await self._columns(_flat(rows), self._engine.reference_logprobs))
            rows = [[replace(row, reference=next(columns)) for row in group] for group in rows]
        following = iter(rows)
        return [[] if group is None else next(following) for group in groups]

    async def micro_batches(self, work: Accumulate[TrainingRow]) -> list[list[TrainingRow]]:
        """Return micro-batches ready to accumulate: the weights of preference pairs depend on the current weights."""
        return select(await self._weigh(work.rows), work.indices)

    @abstractmethod
    async def _estimate(self, groups: Sequence[ScoredGroup], rewards: Sequence[list[float]]) -> list[list[TrainingRow]]:
        """Return the rows of each group, an empty list for a group that is excluded.

        Args:
            groups: some groups of the step, or all.
            rewards: the `compared_rewards` of each group.

        """

    async def _weigh(self, rows: Sequence[TrainingRow]) -> Sequence[TrainingRow]:
        """Return rows of whole groups with the advantages that depend on the current weights."""
        return rows

    async def _columns(self, rows: Sequence[SequenceRow], call: EngineCall) -> list[bytes]:
        return await engine_columns(rows, call, self._micro_batch_tokens, self._run)

    def _trainable(self, group: ScoredGroup, scalars: Sequence[float]) -> list[tuple[SequenceRow, float]]:
        """Return the rows of each sample that has a token and is not masked, with their scalars; none without scalars.

        The scalars are of samples, or of rows if the group `has_row_rewards`.
        """
        found: list[tuple[SequenceRow, float]] = []
        given = iter(scalars)
        for i, sample in enumerate(group.samples if scalars else ()):
            rows = group.conversations[i].rows(group.prompt) if group.conversations else []
            of_rows = [next(given) for _ in rows] if group.has_row_rewards else [next(given)] * max(1, len(rows))
            if not sample.tokens:
                continue
            if self._algorithm.mask_truncated:
                is_masked = sample.finish == "length"
                self._tally.masked[is_masked] += 1
                if is_masked:
                    continue
            experts = sample.routed_experts
            if not group.conversations:
                row = SequenceRow(
                    group.prompt, sample.tokens, sample.logprobs, routed_experts=experts, images=group.images
                )
                found.append((row, of_rows[0]))
                continue
            found += [
                (SequenceRow(row.prompt, row.completion, row.logprobs, row.loss_mask, experts), scalar)
                for row, scalar in zip(rows, of_rows, strict=True)
                if row.logprobs
            ]
        return found

    @property
    def _drops_equal_groups(self) -> bool:
        return self._algorithm.equal_groups == "drop"

    def _exclude(self, n_groups: int) -> None:
        if n_groups:
            self._tally.excluded["equal_rewards"] += n_groups


class _FromRewards(TrainingRows):
    """Compares rewards, which gives all tokens of a sample one advantage; a teacher scores each token."""

    async def _estimate(self, groups: Sequence[ScoredGroup], rewards: Sequence[list[float]]) -> list[list[TrainingRow]]:
        advantages = group_advantages(self._algorithm.advantage, rewards, drop_equal=self._drops_equal_groups)
        self._exclude(advantages.count(None))
        found = [
            [TrainingRow.of(row, constant(value, row)) for row, value in self._trainable(group, values or [])]
            for group, values in zip(groups, advantages, strict=True)
        ]
        if (teacher := self._algorithm.teacher) is None:
            return found
        if self._is_served:
            pairs = zip(found, groups, strict=True)
            columns = iter([_of_loss(row, group.taught) for rows, group in pairs for row in rows])
        else:
            columns = iter(await self._columns(_flat(found), self._engine.reference_logprobs))
        return [[_taught(row, next(columns), teacher.coef) for row in group] for group in found]


class _WithCritic(TrainingRows):
    """Compares rewards with a critic's values; each token has an advantage, and the critic a target there."""

    async def _estimate(self, groups: Sequence[ScoredGroup], rewards: Sequence[list[float]]) -> list[list[TrainingRow]]:
        excluded = [self._drops_equal_groups and all_equal(one) for one in rewards]
        self._exclude(sum(excluded))
        samples = [
            [] if is_excluded else self._trainable(group, one)
            for group, one, is_excluded in zip(groups, rewards, excluded, strict=True)
        ]
        rows = iter(await self._rows(_flat(samples)))
        return [[next(rows) for _ in group] for group in samples]

    async def _rows(self, samples: Sequence[tuple[SequenceRow, float]]) -> list[TrainingRow]:
        """Return the rows of samples with their rewards, and add the estimate's metrics to the tally."""
        if not samples:
            return []  # no rows, so no critic metrics
        critic, spec, kl_coef = self._critic, self._algorithm.critic, self._algorithm.kl_coef
        assert critic is not None, "the engine was built without the job's critic"
        assert spec is not None
        rows = [row for row, _ in samples]
        values = await self._columns(rows, critic.values)
        reference = await self._columns(rows, self._engine.reference_logprobs) if kl_coef else [b""] * len(rows)
        completions = [
            advantages.Experience(
                reward, _array(value), kl_coef * (_array(row.sampled) - _array(reference_column)) if kl_coef else None
            )
            for (row, reward), value, reference_column in zip(samples, values, reference, strict=True)
        ]
        estimate = advantages.gae_advantages(completions, spec.gamma, spec.gae_lambda)
        self._tally.measured |= advantages.metrics(estimate)
        columns = zip(rows, estimate.advantages, reference, values, estimate.returns, strict=True)
        return [
            TrainingRow.of(row, _column(advantages), reference=reference_column, values=value, returns=_column(returns))
            for row, advantages, reference_column, value, returns in columns
        ]


class _PreferencePairs(TrainingRows):
    """Prefers the best sample of a group to the worst; a pair's weight depends on the current weights."""

    async def _estimate(self, groups: Sequence[ScoredGroup], rewards: Sequence[list[float]]) -> list[list[TrainingRow]]:
        pairs = [self._pair(self._trainable(group, one)) for group, one in zip(groups, rewards, strict=True)]
        self._exclude(pairs.count([]))
        return pairs

    @staticmethod
    def _pair(samples: Sequence[tuple[SequenceRow, float]]) -> list[TrainingRow]:
        """Return the best and the worst row, without weights; an empty list if all rewards are equal."""
        places = preference.best_and_worst([reward for _, reward in samples]) if samples else None
        return [TrainingRow.of(samples[place][0], b"") for place in places or ()]

    async def _weigh(self, rows: Sequence[TrainingRow]) -> Sequence[TrainingRow]:
        """Return the rows of pairs with their weights, and add the pairs' losses to the tally.

        Args:
            rows: best and worst of a pair, then of the next.

        """
        spec = self._algorithm.preference
        assert spec is not None
        trained = await self._columns(rows, self._engine.logprobs)
        reference = [row.reference for row in rows]
        if not all(reference):
            reference = await self._columns(rows, self._engine.reference_logprobs)
        weighted, found = preference.weighted(rows, trained, reference, spec)
        add_sums(self._tally.loss_sums, found)
        return weighted


def _of_loss(row: SequenceRow, taught: Mapping[tuple[bytes, bytes], bytes]) -> bytes:
    """Return the teacher's log-probability of each loss token of a row, a float32 column."""
    column = taught[row.prompt, row.completion]
    return unpack(column, F32)[np.array(list(row.loss_mask), bool)].tobytes() if row.loss_mask else column


def _taught(row: TrainingRow, column: bytes, coef: float) -> TrainingRow:
    """Return a row whose tokens' advantages also grow by coef x (log p of the teacher - log p of the engine)."""
    scored = coef * (_array(column) - _array(row.sampled))
    return replace(row, advantages=_column(_array(row.advantages) + scored), reference=column)


def _flat(groups: Sequence[Sequence[T]]) -> list[T]:
    return [one for group in groups for one in group]


def _array(column: bytes) -> advantages.Array:
    return unpack(column, F32).astype(np.float64)


def _column(values: advantages.Array) -> bytes:
    return values.astype(F32).tobytes()


# --- The step ---------------------------------------------------------------------------------------------------------


class StepRun:
    """One step, from its first sample to its last optimizer step."""

    def __init__(self, all_steps: Intake, intake: StepIntake) -> None:
        """Bind to the step of `intake`; `run` runs it."""
        job = self._job = all_steps.job
        self._all_steps = all_steps
        self._intake = intake
        self._step = intake.step
        rate = learning_rate(job.generating_spec.optimizer, intake.step, job.spec.steps)
        self._tally = StepTally(step=intake.step, learning_rate=rate, hardware=job.resources.hardware)
        self._turn = DeviceTurn(job, intake.step)
        self._idle_before_s: float | None = None
        """Idle time of the device until all initial groups were complete."""
        self._weights_changed = False
        """True once the weights differ from those at the start of the step."""
        self._rows = TrainingRows.of(job, self._tally, self._turn.run)
        self._rows_since_update: list[TrainingRow] = []
        """Rows accumulated since the last optimizer step."""

    async def run(self) -> StepTally:
        """Collect and train; return the tally of the step.

        Raises:
            Fatal: no sample came within the limit, the stream is inconsistent, no group could be scored, or a loss is
                not finite.
            ExceptionGroup: one or more of the errors above, from the step's tasks.

        """
        async with asyncio.TaskGroup() as tasks:
            training = tasks.create_task(self._train(), name=f"train-{self._step}")
            await self._collect()
            reading_ahead = tasks.create_task(self._all_steps.read_ahead(), name=f"read-ahead-{self._step}")
            await training
            reading_ahead.cancel()
        rollouts = self._tally.rollouts = await self._intake.finish()
        self._tally.durations = self._durations()
        needed = rollouts.evaluated if self._job.spec.kind == "eval" else rollouts.scored
        if not needed and (self._intake.n_train or self._job.spec.kind == "eval"):
            raise self._nothing_scored(rollouts.dropped, rollouts.first_detail)
        return self._tally

    def _nothing_scored(self, reasons: Counter[str], detail: str) -> Fatal:
        return Fatal(
            f"no group of step {self._step + 1} could be scored ({dict(reasons)}): check {self._suspect(reasons)}; "
            f"the first: {detail or 'no detail'}"
        )

    def _suspect(self, reasons: Counter[str]) -> str:
        if set(reasons) == {"stale"}:
            return "for workers with old weights, or raise elastic.max_staleness"
        if set(reasons) == {"teacher"}:
            return f"the teacher, models.{self._job.spec.served_teacher}, and the workers that serve it"
        section = "environment" if self._job.spec.agent is None else "agent"
        if (conversation := self._job.spec.conversation) and any(section in why for why in reasons):
            return f"{section}.function {conversation.function}" if conversation.function else "the hosts of agents"
        parts = self._job.spec.reward_parts
        kinds = {kind for kind in ("function", "url", "model", "judge") for part in parts if getattr(part, kind)}
        field = kinds.pop() if len(kinds) == 1 else "functions"
        return f"reward.{field} {', '.join(part.source for part in parts)}"

    # --- collect ---

    async def _collect(self) -> None:
        groups, progress = self._intake.groups, CountProgress("samples")
        subject = f"samples of step {self._step + 1}" if self._intake.n_train else "samples of the evaluation"
        while True:
            self._turn.set_owned(owned=groups.trainer_has_device)
            if self._job.device.is_shared and any(engine.role == "reserved" for engine in groups.engines):
                raise Fatal(
                    "a reserved worker generates on the device that this trainer shares with other trainers "
                    "(RLBOOST_TRAINER_SHARED_DEVICE), which may be training: stop it, and use spot workers"
                )
            if self._idle_before_s is None and not self._intake.n_initial_pending:
                self._idle_before_s = self._turn.idle_s
            waits_for_device = self._intake.n_train and not groups.trainer_has_device and not self._intake.judging
            if not groups.complete or waits_for_device:
                progress.update(groups.n_arrived, groups.n_samples)
                if self._intake.n_train and groups.complete and not groups.n_whole and groups.drops:
                    raise self._nothing_scored(Counter(drop.reason for drop in groups.drops), groups.drops[0].detail)
                await self._all_steps.read(subject, groups.arrived_text(), progress.rate_text)
            elif self._intake.judging:
                await self._read_or_judge()
            elif self._intake.n_undecided:
                await self._read_until_decided()
            else:
                return

    async def _read_or_judge(self) -> None:
        """Read the next entry, or return once a group is judged: reserved workers may need the device for a judge."""
        reading = asyncio.create_task(self._all_steps.read_next(), name=f"read-while-judging-{self._step}")
        try:
            await asyncio.wait({reading, *self._intake.judging}, return_when=asyncio.FIRST_COMPLETED)
            if reading.done():
                await reading
        finally:
            reading.cancel()

    async def _read_until_decided(self) -> None:
        """Read entries of later steps until no group can be replaced any more, or a replacement is pending."""
        async with asyncio.TaskGroup() as tasks:
            reading_ahead = tasks.create_task(self._all_steps.read_ahead(), name=f"read-ahead-{self._step}")
            await self._intake.wait_until_decided()
            reading_ahead.cancel()

    # --- train ---

    async def _train(self) -> None:
        n_groups, spec = self._intake.n_train, self._job.generating_spec
        planner: UpdatePlanner[TrainingRow] = UpdatePlanner(
            n_groups, spec.algorithm.updates_per_step, spec.trainer.micro_batch_tokens
        )
        done: list[Accumulate[TrainingRow] | OptimizerStep] = []
        rows_by_group = None
        if self._rows.needs_all_groups:
            rows_by_group = await self._rows.build([await self._intake.next_group() for _ in range(n_groups)])
        for number in range(n_groups):
            if rows_by_group is not None:
                rows = rows_by_group[number]
            else:
                (rows,) = await self._rows.build([await self._intake.next_group()])
            for work in planner.add(rows):
                await self._run_work(work)
                if spec.algorithm.epochs > 1:
                    done.append(work)
        for work in done * (spec.algorithm.epochs - 1):
            await self._run_work(work)
        self._turn.end_step()

    async def _run_work(self, work: Accumulate[TrainingRow] | OptimizerStep) -> None:
        engine, loss = self._job.resources.engine, self._job.resources.loss
        if isinstance(work, OptimizerStep):
            norm = await self._finite(lambda: engine.step(self._tally.learning_rate), self._rows_since_update)
            self._weights_changed = self._weights_changed or bool(self._rows_since_update)
            self._rows_since_update = []
            if norm:
                self._tally.grad_norms.append(norm)
            return
        for batch in await self._rows.micro_batches(work):
            # One call per micro-batch: the turn may end between two.
            numbers = await self._finite(partial(engine.accumulate, [batch], loss), batch)
            self._rows_since_update += batch
            if self._weights_changed and not all(row.proximal for row in batch):
                del numbers[MISMATCH]  # the row was scored by weights that this step has updated
            else:
                numbers["mismatch_tokens"] = numbers["tokens"]
            if self._job.resources.replayed is not None:
                numbers["replayed_tokens"] = sum(row.n_loss_tokens for row in batch if row.routed_experts)
            numbers["all_tokens"] = sum(row.n_tokens for row in batch)
            add_sums(self._tally.loss_sums, numbers)

    async def _finite(self, call: Callable[[], T], rows: Sequence[TrainingRow]) -> T:
        """Run a call on the device; if its loss or gradients are not finite, dump the rows for debugging."""
        try:
            return await self._turn.run(call)
        except NotFinite as error:
            folder, name = self._job.resources.folder, f"not-finite-step-{self._step}.jsonl"
            path = await self._job.device.run(lambda: folder.dump_batch(name, rows))
            raise Fatal(
                f"step {self._step + 1}: {error}; version {self._step} stays the newest. Look for bad data among the "
                f"{len(rows)} samples in {path}, or lower optimizer.lr"
            ) from error

    def _durations(self) -> Durations:
        wait_s = max(0.0, self._turn.held_s - self._turn.busy_s - self._turn.shared_wait_s)
        before_s = wait_s if not self._tally.rollouts.resampled or self._idle_before_s is None else self._idle_before_s
        return Durations(
            seeding_s=self._turn.waited_s or 0.0,
            wait_s=wait_s,
            resample_s=max(0.0, wait_s - before_s),
            train_s=self._turn.busy_s,
            device_wait_s=self._turn.shared_wait_s if self._job.device.is_shared else None,
        )
