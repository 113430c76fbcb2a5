"""One training step: take scored groups as they come, train as soon as the device is ours.

Two tasks. *Collect* consumes `rollouts.finished`, waits for the next entry, or where groups may be replaced by others
for the scores that decide it, and ends when every group of the step is there and the seeding is over; from then on it
only keeps what comes for later steps. *Train* consumes scored groups in the order in which they came, produces
optimizer steps, waits for the device and the next group, and ends with the last one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol, TypeVar

from services.trainer.device import DeviceTurn
from services.trainer.domain import sums
from services.trainer.domain.batching import Accumulate, OptimizerStep, UpdatePlanner
from services.trainer.domain.metrics import Durations, StepTally
from services.trainer.intake import JobContext, StepIntake
from services.trainer.ports import NotFinite, Row
from services.trainer.rows import RowMaker
from shared.errors import Fatal

T = TypeVar("T")


class Source(Protocol):
    """Where a step's groups come from; what comes for a later step on the way is kept for it."""

    async def read(self, what: str, because: str) -> None:
        """Take the next entry, waiting for `what`.

        Raises:
            Fatal: none came for too long, or the stream broke a promise.

        """

    async def read_on(self) -> None:
        """Take what comes for later steps, for as long as it may be kept. Cancelled when nobody waits for it."""


class StepRun:
    """One step, from its first sample to its last optimizer step."""

    def __init__(self, job: JobContext, intake: StepIntake, source: Source) -> None:
        """Begin the step of `intake`, which `source` fills."""
        self._job = job
        self._step = intake.step
        self._intake = intake
        self._source = source
        self._tally = intake.tally
        self._turn = DeviceTurn(job.device, job.waits, intake.step, job.limit_s, job.workshop.engine.rest)
        self._idle_before_s: float | None = None
        """How long the device waited until all that the step began with was there."""
        self._moved = False
        """Whether the weights are others than those that the step began with."""
        self._rows = RowMaker(job, intake, self._turn)
        self._update: list[Row] = []
        """What was accumulated since the last optimizer step."""

    async def run(self) -> StepTally:
        """Collect and train; return what happened.

        Raises:
            Fatal: no sample came for too long, the stream broke a promise, not one group could be scored, or a loss was
                not finite.
            ExceptionGroup: one or more of the errors above, from the step's tasks.

        """
        async with asyncio.TaskGroup() as tasks:
            training = tasks.create_task(self._train(), name=f"train-{self._step}")
            await self._collect()
            reading_on = tasks.create_task(self._source.read_on(), name=f"read-on-{self._step}")
            await training
            reading_on.cancel()
        self._tally.evaluated = [group for task in self._intake.evaluated if (group := await task) is not None]
        self._tally.duplicates = self._intake.collector.duplicates
        self._tally.durations = self._durations()
        needed = self._tally.evaluated if self._job.spec.kind == "eval" else self._tally.scored
        if not needed and (self._intake.n_train or self._job.spec.kind == "eval"):
            raise Fatal(
                f"not one group of step {self._step} could be scored ({dict(self._tally.dropped)}; the first: "
                f"{self._tally.first_detail or 'nothing more is known'}): mend {self._suspect()}"
            )
        return self._tally

    def _suspect(self) -> str:
        if set(self._tally.dropped) == {"stale"}:
            return "what serves old weights, or raise elastic.max_staleness"
        if (environment := self._job.spec.environment) and any("environment" in why for why in self._tally.dropped):
            return f"environment.function {environment.function}"
        return "reward.function " + ", ".join(part.source for part in self._job.spec.reward_parts)

    # --- collect ---

    async def _collect(self) -> None:
        collector = self._intake.collector
        while True:
            self._turn.give(ours=collector.device_is_ours)
            if self._idle_before_s is None and not self._intake.n_first_awaited:
                self._idle_before_s = self._turn.idle_s
            if not collector.complete or (self._intake.n_train and not collector.device_is_ours):
                there = f"{collector.n_arrived} of {collector.n_samples} samples are there"
                await self._source.read(f"samples of step {self._step}", there)
            elif self._intake.n_undecided:
                await self._decided()
            else:
                return

    async def _decided(self) -> None:
        """Return once no group may be replaced any more, or one is; keep what comes for later steps."""
        async with asyncio.TaskGroup() as tasks:
            reading_on = tasks.create_task(self._source.read_on(), name=f"read-on-{self._step}")
            await self._intake.decided()
            reading_on.cancel()

    # --- train ---

    async def _train(self) -> None:
        n_groups, spec = self._intake.n_train, self._job.spec
        planner: UpdatePlanner[Row] = UpdatePlanner(
            n_groups, spec.algorithm.updates_per_step, spec.trainer.micro_batch_tokens
        )
        whole = None
        if self._rows.needs_the_step:
            whole = await self._rows.make([await self._intake.next_group() for _ in range(n_groups)])
        for number in range(n_groups):
            rows = whole[number] if whole is not None else (await self._rows.make([await self._intake.next_group()]))[0]
            for work in planner.add(rows):
                await self._do(work)
        self._turn.end()

    async def _do(self, work: Accumulate[Row] | OptimizerStep) -> None:
        engine, loss = self._job.workshop.engine, self._job.workshop.loss
        if isinstance(work, OptimizerStep):
            norm = await self._finite(lambda: engine.step(self._tally.learning_rate), self._update)
            self._moved = self._moved or bool(self._update)
            self._update = []
            if norm:
                self._tally.grad_norms.append(norm)
            return
        for batch in await self._rows.weigh(work.batches):
            # One at a time: the turn may end between two.
            numbers = await self._finite(partial(engine.accumulate, [batch], loss), batch)
            self._update += batch
            if self._moved and not all(row.proximal for row in batch):
                del numbers[sums.MISMATCH]  # it compared with weights that the step did not begin with
            else:
                numbers["mismatch_tokens"] = numbers["tokens"]
            numbers["all_tokens"] = sum(row.n_tokens for row in batch)
            sums.add(self._tally.loss_sums, numbers)

    async def _finite(self, call: Callable[[], T], rows: Sequence[Row]) -> T:
        """Run a call on the device; should its loss or gradients not be finite, put aside what they came from."""
        try:
            return await self._turn.run(call)
        except NotFinite as error:
            folder, name = self._job.workshop.folder, f"not-finite-step-{self._step}.jsonl"
            kept = await self._job.device(lambda: folder.keep_batch(name, rows))
            raise Fatal(
                f"step {self._step}: {error}; version {self._step} stays the newest, and the {len(rows)} samples that "
                f"it came from are in {kept}: look for bad data there, or lower optimizer.lr"
            ) from error

    def _durations(self) -> Durations:
        wait_s = max(0.0, self._turn.held_s - self._turn.busy_s)
        before_s = wait_s if not self._tally.resampled or self._idle_before_s is None else self._idle_before_s
        return Durations(
            seeding_s=self._turn.waited_s or 0.0,
            wait_s=wait_s,
            resample_s=max(0.0, wait_s - before_s),
            train_s=self._turn.busy_s,
        )
