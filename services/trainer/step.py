"""One training step: take scored groups as they come, train as soon as the device is ours.

Two tasks. *Collect* consumes `rollouts.finished`, waits for the next entry, and ends when every group of the step is
there and the seeding is over; from then on it only keeps what comes for later steps. *Train* consumes scored groups in
the order in which they came, produces optimizer steps, waits for the device and the next group, and ends with the last
one.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial
from typing import Protocol

from services.trainer.device import DeviceTurn
from services.trainer.domain.advantages import advantages
from services.trainer.domain.batching import Accumulate, OptimizerStep, UpdatePlanner, pack
from services.trainer.domain.metrics import Durations, ScoredGroup, StepTally
from services.trainer.intake import JobContext, StepIntake
from services.trainer.ports import Row
from shared.errors import Fatal


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
        self._turn = DeviceTurn(job.device, job.waits, intake.step, job.limit_s)

    async def run(self) -> StepTally:
        """Collect and train; return what happened.

        Raises:
            Fatal: no sample came for too long, the stream broke a promise, or not one group could be scored.
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
        if self._intake.n_train and not self._tally.scored:
            raise Fatal(
                f"not one group of step {self._step} could be scored ({dict(self._tally.dropped)}): see the job's "
                f"events for the reasons, and mend {self._suspect()}"
            )
        return self._tally

    def _suspect(self) -> str:
        if set(self._tally.dropped) == {"stale"}:
            return "what serves old weights, or raise elastic.max_staleness"
        return f"reward.function {self._job.spec.reward.function}"

    # --- collect ---

    async def _collect(self) -> None:
        collector = self._intake.collector
        self._turn.give(ours=collector.device_is_ours)
        while not collector.complete or (self._intake.n_train and not collector.device_is_ours):
            there = f"{collector.n_arrived} of {collector.n_samples} samples are there"
            await self._source.read(f"samples of step {self._step}", there)
            self._turn.give(ours=collector.device_is_ours)

    # --- train ---

    async def _train(self) -> None:
        spec = self._job.spec
        n_groups, n_updates = self._intake.n_train, spec.algorithm.updates_per_step
        planner: UpdatePlanner[Row] = UpdatePlanner(n_groups, n_updates, spec.trainer.micro_batch_tokens)
        whole: list[list[Row]] | None = None
        if spec.elastic.max_staleness and n_updates > 1:
            # The weights that the step begins with are gone after its first update: what they say is asked before.
            whole = await self._with_proximal([await self._next_rows() for _ in range(n_groups)])
        for number in range(n_groups):
            for work in planner.add(await self._next_rows() if whole is None else whole[number]):
                await self._do(work)
        self._turn.give(ours=False)

    async def _next_rows(self) -> list[Row]:
        group = await (await self._intake.came.get())
        if group is None:
            return []
        self._tally.scored.append(group)
        return self._rows(group)

    def _rows(self, group: ScoredGroup) -> list[Row]:
        values = advantages(group.rewards)
        if values is None:
            return []
        prompt = self._intake.prompt_of(group)
        return [
            Row(prompt, sample.tokens, sample.logprobs, advantage)
            for sample, advantage in zip(group.samples, values, strict=True)
            if sample.tokens
        ]

    async def _with_proximal(self, groups: list[list[Row]]) -> list[list[Row]]:
        """Return the groups' rows with their log-probabilities under the weights of now."""
        engine = self._job.workshop.engine
        columns: dict[int, bytes] = {}
        for batch in pack([row for rows in groups for row in rows], self._job.spec.trainer.micro_batch_tokens):
            values = await self._turn.run(partial(engine.logprobs, [batch]))
            columns |= {id(row): column for row, column in zip(batch, values, strict=True)}
        return [[replace(row, proximal=columns[id(row)]) for row in rows] for rows in groups]

    async def _do(self, work: Accumulate[Row] | OptimizerStep) -> None:
        engine, loss = self._job.workshop.engine, self._job.workshop.loss
        if isinstance(work, OptimizerStep):
            norm = await self._turn.run(lambda: engine.step(self._tally.learning_rate))
            if norm:
                self._tally.grad_norms.append(norm)
            return
        for batch in work.batches:
            # One at a time: the turn may end between two.
            sums = await self._turn.run(partial(engine.accumulate, [batch], loss))
            for name, value in sums.items():
                self._tally.loss_sums[name] = self._tally.loss_sums.get(name, 0.0) + value

    def _durations(self) -> Durations:
        return Durations(
            seeding_s=self._turn.waited_s or 0.0,
            wait_s=max(0.0, self._turn.held_s - self._turn.busy_s),
            train_s=self._turn.busy_s,
        )
