"""One job, from wherever it stands to its end.

Consumes: a job file, the newest checkpoint, and the finished samples behind it.
Produces: weight versions, step reports, checkpoints, the final model.
Waits for: the lease of the job, a resume where it is paused, and what each step waits for.
Ends when: the last step is done, or with the error that makes going on senseless.

A trainer that was killed takes the same steps again from the newest checkpoint. Their samples are in the stream, so
nothing is generated twice, and what is committed already is not published twice: see `publishing`. Samples that came
ahead of their step lie behind the position that a checkpoint holds, as long as a step needs them.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

from services.trainer.device import DeviceThread
from services.trainer.domain import plan
from services.trainer.intake import JobContext
from services.trainer.link import FinishedLog, JobLink, PatientBus
from services.trainer.ports import TrainState, Workshop, WorkshopFactory
from services.trainer.publishing import Publishing
from services.trainer.step import StepRun
from services.trainer.steps import Steps
from shared import names
from shared.bus import START, Append
from shared.errors import ConfigError
from shared.jobspec import JobSpec, to_json
from shared.messages import JobReport, JobState, StepReport
from shared.waiting import Waits

LEASE_TTL_S = 5.0
BUILD_LIMIT_S = 4 * 3600.0
PAUSE_LIMIT_S = 30 * 24 * 3600.0


@dataclass(slots=True)
class Handle:
    """A job as the trainer's loops see it."""

    job_id: str
    job_no: int
    spec_json: str
    command: str
    """The entry of `jobs.commands` that created it; it stays pending until the job has ended."""
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)
    unpaused: asyncio.Event = field(default_factory=asyncio.Event)
    owns_lease: asyncio.Event = field(default_factory=asyncio.Event)
    phase: str = "starting"
    step: int = 0


class JobRun:
    """Runs one job."""

    def __init__(
        self,
        handle: Handle,
        spec: JobSpec,
        bus: PatientBus,
        device: DeviceThread,
        waits: Waits,
        limit_s: float,
        trainer: str,
    ) -> None:
        """Prepare.

        Args:
            handle: shared with the trainer's loops.
            spec: the job.
            bus: the broker.
            device: where everything that computes runs.
            waits: where waits are listed.
            limit_s: how long the job waits for a sample or its device.
            trainer: the trainer's name.

        """
        self._handle = handle
        self._spec = spec
        self._bus = bus
        self._device = device
        self._waits = waits
        self._limit_s = limit_s
        self._trainer = trainer
        self._link = JobLink(bus, handle.job_id)
        self._checkpointed_step = 0

    async def run(self, build: WorkshopFactory) -> None:
        """Train to the end.

        Raises:
            RLBoostError: why the job failed; `Retryable`: nothing is wrong with the job, another process may go on.
            ExceptionGroup: of such errors.

        """
        await self._report("running", self._handle.step)
        because = "they are loaded, or downloaded where the model is an id"
        async with self._waits.on("the job's model and data", because=because, limit_s=BUILD_LIMIT_S):
            workshop = await self._device(lambda: build(self._spec, self._handle.job_id))
        try:
            await self._train(workshop)
        finally:
            await workshop.rewards.close()
            await workshop.weights.close()
            # Not waited for: a job that is cancelled has ended, although a last micro-batch may still compute.
            self._device.post(workshop.engine.close)

    async def _train(self, workshop: Workshop) -> None:
        plan.check(self._spec, len(workshop.data.evaluation))
        await self._device(lambda: workshop.engine.load_hf(workshop.model))
        await workshop.rewards.start()
        if self._spec.sampling.top_p < 1:
            text = "sampling.top_p below 1: the ratio compares the cut distribution with the whole one and is biased"
            await self._link.tell("warning", text=text)
        if (data := workshop.data).n_too_long or data.n_too_long_eval:
            await self._link.tell(
                "prompts_left_out",
                because=f"they have more than {self._spec.data.max_prompt_tokens} tokens (data.max_prompt_tokens)",
                train=data.n_too_long,
                train_left=len(data.train),
                evaluation=data.n_too_long_eval,
                evaluation_left=len(data.evaluation),
            )
        versions = Publishing(workshop.engine, workshop.weights, self._device, self._link)
        await versions.look()
        state = await self._restore(workshop, versions.head)
        step = state.step
        await self._device(lambda: workshop.folder.begin(to_json(self._spec), step))
        await self._own_lease()
        await versions.begin(step)
        async with asyncio.TaskGroup() as scoring:
            job = self._context(workshop, scoring)
            log = FinishedLog(self._bus, self._waits, job.id, state.finished_cursor, self._limit_s)
            steps = Steps(job, log, state.read_cursor)
            for number in range(step, plan.last_step(self._spec) + 1):
                await self._pause_point(number)
                due = number > step and number % self._spec.trainer.checkpoint_every == 0
                await self._step(job, steps, versions, number, save=due)
        self._enter("finishing", self._spec.steps)
        engine, folder = workshop.engine, workshop.folder
        model = await self._device(lambda: folder.export(engine.export_shards()))
        await self._link.tell("model_saved", path=str(model))
        if text := engine.adapter_json:
            adapter = await self._device(lambda: folder.export_adapter(engine.export_shards("adapter"), text))
            await self._link.tell("adapter_saved", path=str(adapter))

    async def _step(self, job: JobContext, steps: Steps, versions: Publishing, step: int, *, save: bool) -> None:
        began = time.monotonic()
        self._enter("training" if step < self._spec.steps else "evaluating", step)
        run = StepRun(job, steps.enter(step, versions.head), steps)
        await steps.request()
        if save:
            # The fleet generates meanwhile.
            n_rows = len(job.workshop.data.train)
            await self._checkpoint(job.workshop, TrainState(step, steps.needed_from, n_rows, steps.read_until))
        tally = await run.run()
        if step < self._spec.steps:
            self._enter("publishing", step)
            published = time.monotonic()
            await versions.publish(step + 1)
            tally.durations.publish_s = time.monotonic() - published
        tally.durations.step_s = time.monotonic() - began
        metrics = tally.metrics()
        await self._device(lambda: job.workshop.folder.log_step(step, metrics))
        report = StepReport(
            job_id=job.id,
            step=step,
            metrics=metrics,
            checkpointed_step=self._checkpointed_step,
            wait_s=tally.durations.wait_s,
            train_s=tally.durations.train_s,
        )
        await self._bus.transact([Append(names.JOB_REPORTS, report)])

    # --- where the job stands ---

    async def _restore(self, workshop: Workshop, head: int) -> TrainState:
        """Return the step to go on with and the position in the finished samples."""
        found = await self._device(workshop.checkpoints.newest)
        if self._spec.trainer.resume == "never" and (found is not None or head > 0):
            raise ConfigError("the trainer was restarted in the middle of this job, and trainer.resume is 'never'")
        if found is None:
            return TrainState(step=0, finished_cursor=START, train_rows=len(workshop.data.train))
        state, directory = found
        if state.train_rows != len(workshop.data.train):
            raise ConfigError(
                f"data.train has {len(workshop.data.train)} prompts, but had {state.train_rows} when the job was "
                "interrupted: restore the file"
            )
        await self._device(lambda: workshop.engine.load(directory))
        if (fallback := await self._device(workshop.checkpoints.fallback)) is not None:
            self._checkpointed_step = fallback.step
        await self._link.tell("resumed", step=state.step, head=head)
        return state

    async def _checkpoint(self, workshop: Workshop, state: TrainState) -> None:
        await self._device(lambda: workshop.checkpoints.save(state, workshop.engine.save))
        fallback = await self._device(workshop.checkpoints.fallback)
        if fallback is not None:
            # Should the newest checkpoint turn out broken, the samples behind the one before it are still there.
            self._checkpointed_step = fallback.step
            stream = names.rollouts_finished(self._handle.job_id)
            await self._bus(lambda bus: bus.trim(stream, fallback.finished_cursor))
        await self._link.tell("checkpoint_saved", step=state.step)

    # --- what others see and want ---

    def _context(self, workshop: Workshop, scoring: asyncio.TaskGroup) -> JobContext:
        return JobContext(
            id=self._handle.job_id,
            no=self._handle.job_no,
            spec=self._spec,
            workshop=workshop,
            link=self._link,
            device=self._device,
            waits=self._waits,
            limit_s=self._limit_s,
            scoring=scoring,
        )

    def _enter(self, phase: str, step: int) -> None:
        self._handle.phase, self._handle.step = phase, step

    async def _own_lease(self) -> None:
        # A killed predecessor's lease runs out by itself; a living one must not be joined.
        because = "another trainer held it last"
        async with self._waits.on("the lease of the job", because=because, limit_s=4 * LEASE_TTL_S):
            await self._handle.owns_lease.wait()

    async def _pause_point(self, step: int) -> None:
        if self._handle.unpaused.is_set():
            return
        self._enter("paused", step)
        await self._report("paused", step)
        async with self._waits.on("a resume", because="the job was paused", limit_s=PAUSE_LIMIT_S):
            await self._handle.unpaused.wait()
        await self._report("running", step)

    async def _report(self, state: JobState, step: int) -> None:
        report = JobReport(job_id=self._handle.job_id, state=state, step=step, trainer=self._trainer)
        await self._bus.transact([Append(names.JOB_REPORTS, report)])
