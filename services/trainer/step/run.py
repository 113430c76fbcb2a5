"""One training step: trains on scored groups as they are completed, as soon as the trainer has the device.

*Collect*. Consumes: `rollouts.finished`, through `RequestedSteps`. Produces: scoring tasks (`GroupIntake.take`).
Waits for: the next entry (`EntrySource.read`); if groups may be replaced, the scores that decide it
(`GroupIntake.wait_until_decided`), while it reads entries of later steps. Ends when: every group of the step is
complete or dropped, and seeding is over; then `EntrySource.read_ahead` reads entries of later steps until training
ends.

*Train*. Consumes: scored groups in order of completion (`GroupIntake.next_group`). Produces: optimizer steps.
Waits for: the next group, until its scoring task ends; the device (`DeviceTurn.run`), until *collect* reads
`SeedingEnded` and calls `DeviceTurn.set_owned`. Ends when: the last group of the step is trained.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol, TypeVar

from rlboost.services.trainer.domain.batches.batching import Accumulate, OptimizerStep, UpdatePlanner
from rlboost.services.trainer.domain.batches.training_row import TrainingRow
from rlboost.services.trainer.domain.loss import sums
from rlboost.services.trainer.domain.metrics import Durations, RolloutTally, StepTally
from rlboost.services.trainer.domain.schedule import learning_rate
from rlboost.services.trainer.ports.engine import NotFinite
from rlboost.services.trainer.runtime.device import DeviceTurn
from rlboost.services.trainer.step.context import JobContext
from rlboost.services.trainer.step.group_intake import GroupIntake
from rlboost.services.trainer.step.training_rows import TrainingRowBuilder
from rlboost.shared.errors import Fatal
from rlboost.shared.progress import CountProgress

T = TypeVar("T")


class EntrySource(Protocol):
    """Reads entries for a step and the steps after it, and passes each decided group to `GroupIntake.take`."""

    async def read(self, what: str, because: str, progress: Callable[[], str]) -> None:
        """Read the next entry, of any step, waiting for `what`; the arguments are those of `Waits.on`.

        Raises:
            Fatal: no entry came within the limit, or the stream is inconsistent.

        """

    async def read_ahead(self) -> None:
        """Read entries of later steps, as far as these are requested. The caller cancels it."""


class StepRun:
    """One step, from its first sample to its last optimizer step."""

    def __init__(self, job: JobContext, intake: GroupIntake, source: EntrySource) -> None:
        """Bind to one step; `run` runs it. `source` reads the entries of the step of `intake`."""
        self._job = job
        self._step = intake.step
        self._intake = intake
        self._source = source
        rate = learning_rate(job.spec.optimizer, intake.step, job.spec.steps)
        self._tally = StepTally(step=intake.step, learning_rate=rate, hardware=job.resources.hardware)
        self._turn = DeviceTurn(job.device, job.waits, intake.step, job.limit_s, job.resources.engine.offload)
        self._idle_before_s: float | None = None
        """Idle time of the device until all initial groups were complete."""
        self._weights_changed = False
        """True once the weights differ from those at the start of the step."""
        self._rows = TrainingRowBuilder(job, self._tally, self._turn)
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
            reading_ahead = tasks.create_task(self._source.read_ahead(), name=f"read-ahead-{self._step}")
            await training
            reading_ahead.cancel()
        rollouts = self._tally.rollouts = await self._intake.finish()
        self._tally.durations = self._durations()
        needed = rollouts.evaluated if self._job.spec.kind == "eval" else rollouts.scored
        if not needed and (self._intake.n_train or self._job.spec.kind == "eval"):
            raise Fatal(
                f"no group of step {self._step + 1} could be scored ({dict(rollouts.dropped)}): "
                f"check {self._suspect(rollouts)}; the first: {rollouts.first_detail or 'no detail'}"
            )
        return self._tally

    def _suspect(self, rollouts: RolloutTally) -> str:
        if set(rollouts.dropped) == {"stale"}:
            return "for workers with old weights, or raise elastic.max_staleness"
        if (environment := self._job.spec.environment) and any("environment" in why for why in rollouts.dropped):
            return f"environment.function {environment.function}"
        return "reward.function " + ", ".join(part.source for part in self._job.spec.reward_parts)

    # --- collect ---

    async def _collect(self) -> None:
        groups, progress = self._intake.groups, CountProgress("samples")
        subject = f"samples of step {self._step + 1}" if self._intake.n_train else "samples of the evaluation"
        while True:
            self._turn.set_owned(owned=groups.trainer_has_device)
            if self._idle_before_s is None and not self._intake.n_initial_pending:
                self._idle_before_s = self._turn.idle_s
            if not groups.complete or (self._intake.n_train and not groups.trainer_has_device):
                progress.update(groups.n_arrived, groups.n_samples)
                await self._source.read(subject, groups.arrived_text(), progress.rate_text)
            elif self._intake.n_undecided:
                await self._read_until_decided()
            else:
                return

    async def _read_until_decided(self) -> None:
        """Read entries of later steps until no group can be replaced any more, or a replacement is pending."""
        async with asyncio.TaskGroup() as tasks:
            reading_ahead = tasks.create_task(self._source.read_ahead(), name=f"read-ahead-{self._step}")
            await self._intake.wait_until_decided()
            reading_ahead.cancel()

    # --- train ---

    async def _train(self) -> None:
        n_groups, spec = self._intake.n_train, self._job.spec
        planner: UpdatePlanner[TrainingRow] = UpdatePlanner(
            n_groups, spec.algorithm.updates_per_step, spec.trainer.micro_batch_tokens
        )
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
        for batch in await self._rows.with_pair_weights(work):
            # One call per micro-batch: the turn may end between two.
            numbers = await self._finite(partial(engine.accumulate, [batch], loss), batch)
            self._rows_since_update += batch
            if self._weights_changed and not all(row.proximal for row in batch):
                del numbers[sums.MISMATCH]  # the row was scored by weights that this step has updated
            else:
                numbers["mismatch_tokens"] = numbers["tokens"]
            if self._job.resources.replayed is not None:
                numbers["replayed_tokens"] = sum(row.n_loss_tokens for row in batch if row.routed_experts)
            numbers["all_tokens"] = sum(row.n_tokens for row in batch)
            sums.add(self._tally.loss_sums, numbers)

    async def _finite(self, call: Callable[[], T], rows: Sequence[TrainingRow]) -> T:
        """Run a call on the device; if its loss or gradients are not finite, dump the rows for debugging."""
        try:
            return await self._turn.run(call)
        except NotFinite as error:
            folder, name = self._job.resources.folder, f"not-finite-step-{self._step}.jsonl"
            path = await self._job.device(lambda: folder.dump_batch(name, rows))
            raise Fatal(
                f"step {self._step + 1}: {error}; version {self._step} stays the newest. Look for bad data among the "
                f"{len(rows)} samples in {path}, or lower optimizer.lr"
            ) from error

    def _durations(self) -> Durations:
        wait_s = max(0.0, self._turn.held_s - self._turn.busy_s)
        before_s = wait_s if not self._tally.rollouts.resampled or self._idle_before_s is None else self._idle_before_s
        return Durations(
            seeding_s=self._turn.waited_s or 0.0,
            wait_s=wait_s,
            resample_s=max(0.0, wait_s - before_s),
            train_s=self._turn.busy_s,
        )
