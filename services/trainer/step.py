"""One training step: ask for groups, score them as they come, train as soon as the device is ours.

Two tasks. *Collect* consumes `rollouts.finished`, produces whole groups whose scoring begins at once, waits for the
next entry, and ends when every group is there and the seeding is over. *Train* consumes scored groups in the order in
which they came, produces optimizer steps, waits for the device and the next group, and ends with the last one.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from functools import partial

from services.trainer.device import DeviceThread, DeviceTurn
from services.trainer.domain.advantages import advantages
from services.trainer.domain.batching import Accumulate, OptimizerStep, UpdatePlanner
from services.trainer.domain.collector import DroppedGroup, StepCollector, WholeGroup
from services.trainer.domain.metrics import Durations, ScoredGroup, StepTally
from services.trainer.domain.plan import PlannedGroup, plan_step
from services.trainer.domain.schedule import learning_rate
from services.trainer.link import FinishedLog, JobLink
from services.trainer.ports import Prompt, Row, Workshop
from services.trainer.scoring import question, summaries
from shared import names
from shared.bus import Append, Entry
from shared.errors import Fatal, Timeout
from shared.ids import SampleId
from shared.jobspec import JobSpec
from shared.messages import GroupRequested, Sampling
from shared.waiting import Waits

_REQUESTS_AT_ONCE = 64
"""Prompts may be long: Redis gets them in portions."""


@dataclass(frozen=True, slots=True)
class JobContext:
    """What every step of a job works with."""

    id: str
    no: int
    spec: JobSpec
    workshop: Workshop
    link: JobLink
    log: FinishedLog
    device: DeviceThread
    waits: Waits
    limit_s: float
    """How long a step may wait for its device."""


class StepRun:
    """One step, from its requests to its last optimizer step."""

    def __init__(self, job: JobContext, step: int, *, seen_before: bool) -> None:
        """Plan step `step`.

        Args:
            job: the step's job.
            step: its number; the one after the last training step only evaluates.
            seen_before: its samples were shown to people already, before this trainer was started.

        """
        data = job.workshop.data
        self._job = job
        self._step = step
        self._seen_before = seen_before
        self._planned = {
            group.id: group for group in plan_step(job.spec, job.no, step, len(data.train), len(data.evaluation))
        }
        self._n_train = sum(not group.is_eval for group in self._planned.values())
        self._collector = StepCollector(job.no, step, {group.id: group.n for group in self._planned.values()})
        self._tally = StepTally(learning_rate=learning_rate(job.spec.optimizer, step, job.spec.steps))
        self._came: asyncio.Queue[asyncio.Task[ScoredGroup | None]] = asyncio.Queue()
        """Training groups, in the order in which they came."""
        self._evaluated: list[asyncio.Task[ScoredGroup | None]] = []
        self._turn = DeviceTurn(job.device, job.waits, step, job.limit_s)

    async def request(self) -> None:
        """Ask for the step's groups. Asking again is harmless: the manager knows each group by its id."""
        spec, workshop = self._job.spec, self._job.workshop
        sampling = Sampling(
            temperature=spec.sampling.temperature,
            top_p=spec.sampling.top_p,
            max_tokens=spec.sampling.max_tokens,
            stop_token_ids=workshop.data.stop_token_ids,
        )
        requests = [
            GroupRequested(
                job_id=self._job.id,
                group=group.id,
                n=group.n,
                prompt=self._prompt(group).tokens,
                sampling=sampling,
                version=self._step,
                seed=group.seed,
            )
            for group in self._planned.values()
        ]
        stream = names.rollouts_requested(self._job.id)
        for start in range(0, len(requests), _REQUESTS_AT_ONCE):
            some = requests[start : start + _REQUESTS_AT_ONCE]
            await self._job.link.bus.transact([Append(stream, request) for request in some])

    async def run(self) -> StepTally:
        """Collect, score and train; return what happened.

        Raises:
            Fatal: no sample came for too long, the stream broke a promise, or not one group could be scored.
            ExceptionGroup: one or more of the errors above, from the step's tasks.

        """
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._collect(tasks), name=f"collect-{self._step}")
            tasks.create_task(self._train(), name=f"train-{self._step}")
        self._tally.evaluated = [group for task in self._evaluated if (group := task.result()) is not None]
        self._tally.duplicates = self._collector.duplicates
        self._tally.durations = self._durations()
        if self._n_train and not self._tally.scored:
            raise Fatal(
                f"not one group of step {self._step} could be scored ({dict(self._tally.dropped)}): see the job's "
                f"events for the reasons, and mend reward.function {self._job.spec.reward.function}"
            )
        return self._tally

    # --- collect ---

    async def _collect(self, tasks: asyncio.TaskGroup) -> None:
        collector = self._collector
        while not collector.complete or (self._n_train and not collector.device_is_ours):
            outcome = collector.fold((await self._next()).message)
            self._turn.give(ours=collector.device_is_ours)
            if outcome is not None:
                planned = self._planned[outcome.group]
                task = tasks.create_task(self._score(outcome, planned), name=f"score-{SampleId.unpack(outcome.group)}")
                if planned.is_eval:
                    self._evaluated.append(task)
                else:
                    self._came.put_nowait(task)

    async def _next(self) -> Entry:
        collector = self._collector
        there = f"{collector.n_arrived} of {collector.n_samples} samples are there"
        try:
            return await self._job.log.next(f"samples of step {self._step}", there)
        except Timeout as error:
            raise Fatal(f"{error}: is a worker there that can generate? Ask with 'rlboost worker list'") from error

    async def _score(self, outcome: WholeGroup | DroppedGroup, planned: PlannedGroup) -> ScoredGroup | None:
        if isinstance(outcome, DroppedGroup):
            await self._drop(outcome.group, "generation", outcome.reason)
            return None
        prompt = self._prompt(planned)
        data = self._job.workshop.data
        scores = await self._job.workshop.rewards.score(question(outcome, prompt, data))
        if not self._seen_before:
            await self._job.link.show(summaries(outcome, prompt, scores, data))
        if scores.rewards is None:
            await self._drop(outcome.group, scores.reason, scores.detail)
            return None
        return ScoredGroup(outcome.samples, scores.rewards)

    async def _drop(self, group: int, reason: str, detail: str) -> None:
        self._tally.dropped[reason] += 1
        await self._job.link.tell("group_dropped", group=str(SampleId.unpack(group)), reason=reason, detail=detail)

    # --- train ---

    async def _train(self) -> None:
        spec = self._job.spec
        planner: UpdatePlanner[Row] = UpdatePlanner(
            self._n_train, spec.algorithm.updates_per_step, spec.trainer.micro_batch_tokens
        )
        for _ in range(self._n_train):
            group = await (await self._came.get())
            if group is not None:
                self._tally.scored.append(group)
            for work in planner.add(self._rows(group) if group is not None else []):
                await self._do(work)
        self._turn.give(ours=False)

    def _rows(self, group: ScoredGroup) -> list[Row]:
        values = advantages(group.rewards)
        if values is None:
            return []
        prompt = self._prompt(self._planned[group.samples[0].sample]).tokens
        return [
            Row(prompt, sample.tokens, sample.logprobs, advantage)
            for sample, advantage in zip(group.samples, values, strict=True)
            if sample.tokens
        ]

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

    def _prompt(self, group: PlannedGroup) -> Prompt:
        data = self._job.workshop.data
        return (data.evaluation if group.is_eval else data.train)[group.row]

    def _durations(self) -> Durations:
        return Durations(
            seeding_s=self._turn.waited_s or 0.0,
            wait_s=max(0.0, self._turn.held_s - self._turn.busy_s),
            train_s=self._turn.busy_s,
        )
