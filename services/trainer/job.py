"""One job, from wherever it stands to its end.

Consumes: a job file, the newest checkpoint, and the finished samples behind it.
Produces: weight versions, step reports, checkpoints, one of them at the end, the final model.
Waits for: the lease of the job, a resume where it is paused, and what each step waits for.
Ends when: the last step is done, or with the error that makes going on senseless.

A trainer that was killed takes the same steps again from the newest checkpoint. Their samples are in the stream, so
nothing is generated twice, and what is committed already is not published twice: see `publishing`. Samples that came
ahead of their step lie behind the position that a checkpoint holds, as long as a step needs them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from services.trainer.checkpoints import Checkpoints
from services.trainer.device import DeviceThread
from services.trainer.domain import plan
from services.trainer.intake import JobContext
from services.trainer.link import FinishedLog, JobLink, PatientBus
from services.trainer.ports import TrainState, Workshop, WorkshopFactory
from services.trainer.publishing import Publishing
from services.trainer.recorded_curriculum import KeptCurriculum
from services.trainer.recorded_resampling import KeptResampling
from services.trainer.sft_step import sft_step
from services.trainer.step import StepRun
from services.trainer.steps import Steps
from shared import names
from shared.bus import Append, Fence
from shared.jobspec import GeneratingJob, JobSpec, SftJob, to_json
from shared.messages import JobReport, JobState, StepReport
from shared.waiting import Waits

LEASE_TTL_S = 5.0
LEASE_LIMIT_S = 4 * LEASE_TTL_S
"""How long a trainer waits for the lease of a job that another has held."""
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
    superseded: asyncio.Event = field(default_factory=asyncio.Event)
    """Another trainer has taken the job over: nothing more may be said of it."""
    fence: Fence | None = None
    """Stands while nobody else has taken the lease since this trainer did."""
    tried: str | None = None
    """What the lease was to say when it was last to be taken: it may, although no answer came."""
    left: bool = False
    """The trainer has ended its part of it: the lease is not renewed any more."""
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
        self._asked_until = -1
        """The last step that a predecessor may have asked for."""
        self._checkpoints: Checkpoints
        """There once the workshop is."""

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
        finished = names.rollouts_finished(self._handle.job_id)
        self._checkpoints = Checkpoints(self._spec, workshop, self._device, self._waits, self._link, finished)
        try:
            await self._train(workshop)
        finally:
            self._checkpoints.abandon()
            await workshop.rewards.close()
            if workshop.environments is not None:
                await workshop.environments.close()
            await workshop.weights.close()
            # Not waited for: a job that is cancelled has ended, although a last micro-batch may still compute.
            self._device.post(workshop.engine.close)
            await self._warn(await asyncio.to_thread(workshop.folder.close))

    async def _train(self, workshop: Workshop) -> None:
        if self._spec.kind != "sft":
            plan.check(self._spec, len(workshop.data.evaluation))
        await self._device(lambda: workshop.engine.load_hf(workshop.model))
        await workshop.rewards.start()
        if workshop.environments is not None:
            await workshop.environments.start()
        if self._spec.kind == "rl" and self._spec.sampling.top_p < 1:
            text = "sampling.top_p below 1: the ratio compares the cut distribution with the whole one and is biased"
            await self._link.tell("warning", text=text)
        if (data := workshop.data).n_too_long or data.n_too_long_eval:
            await self._link.tell(
                "prompts_left_out",
                because=f"they have {self._spec.data.limits}",
                train=data.n_too_long,
                train_left=len(data.train),
                evaluation=data.n_too_long_eval,
                evaluation_left=len(data.evaluation),
            )
        versions = Publishing(workshop.engine, workshop.weights, self._device, self._link, workshop.probe)
        await versions.look()
        state = await self._checkpoints.restore(versions.head)
        step = state.step
        await self._device(lambda: workshop.folder.begin(to_json(self._spec), step))
        await self._own_lease()
        await self._checkpoints.keep_beginning(state)
        if self._spec.kind == "sft":
            await self._imitate(self._spec, workshop, versions, step)
        else:
            await self._reinforce(self._spec, workshop, versions, state)
        await self._checkpoints.settle()
        if self._spec.kind == "eval":
            return
        self._enter("finishing", self._spec.steps)
        engine, folder = workshop.engine, workshop.folder
        model = await self._device(lambda: folder.export(engine.export_shards()))
        await self._link.tell("model_saved", path=str(model))
        if text := engine.adapter_json:
            adapter = await self._device(lambda: folder.export_adapter(engine.export_shards("adapter"), text))
            await self._link.tell("adapter_saved", path=str(adapter))

    async def _reinforce(
        self, spec: GeneratingJob, workshop: Workshop, versions: Publishing, state: TrainState
    ) -> None:
        step = state.step
        if versions.head >= 0:
            self._asked_until = versions.head + spec.elastic.max_staleness
        await versions.begin(step)
        async with asyncio.TaskGroup() as scoring:
            curriculum = await KeptCurriculum.load(
                self._bus, self._waits, self._handle.job_id, spec, workshop, self._handle.fence
            )
            n_rows, fence = len(workshop.data.train), self._handle.fence
            resampling = await KeptResampling.load(
                self._bus, self._handle.job_id, self._handle.job_no, spec, n_rows, curriculum, fence
            )
            job = self._context(spec, workshop, scoring, curriculum, resampling)
            log = FinishedLog(self._bus, self._waits, job.id, state.finished_cursor, self._limit_s)
            steps = Steps(job, log, state.read_cursor)
            for number in range(step, plan.last_step(spec) + 1):
                await self._pause_point(number)
                await self._step(job, steps, versions, number, save=self._due(step, number))
            if spec.eval is None and self._due(step, end := spec.steps):
                # Where there is an evaluation at the end, it was made before that.
                await self._checkpoints.begin(self._checkpoints.state(end, steps.needed_from, steps.read_until))

    async def _imitate(self, spec: SftJob, workshop: Workshop, versions: Publishing, first: int) -> None:
        """Train on what the data has. Nobody generates for it, so only the last version is published."""
        for step in range(first, spec.steps):
            await self._pause_point(step)
            self._enter("training", step)
            if self._due(first, step):
                await self._checkpoints.begin(self._checkpoints.state(step))
            done = await sft_step(spec, workshop, self._device, step)
            await self._log_step(workshop, step, done.metrics(), wait_s=0.0, train_s=done.train_s)
        if self._due(first, spec.steps):
            await self._checkpoints.begin(self._checkpoints.state(spec.steps))
        self._enter("publishing", spec.steps)
        was_there = versions.head >= spec.steps
        await versions.begin(spec.steps)
        if was_there:
            await versions.publish(spec.steps)  # it may have been trained elsewhere, to other bits

    def _due(self, first: int, step: int) -> bool:
        """Tell whether a checkpoint is due before this step, or after the last one, for a job that goes on from it."""
        every, end = self._spec.trainer.checkpoint_every, self._spec.steps
        return step > first and (step % every == 0 or step == end)

    async def _step(self, job: JobContext, steps: Steps, versions: Publishing, step: int, *, save: bool) -> None:
        began = time.monotonic()
        self._enter("training" if step < self._spec.steps else "evaluating", step)
        intake = await steps.enter(step, versions.head)
        run = StepRun(job, intake, steps)
        await steps.request()
        if save:
            # The fleet generates meanwhile.
            await self._checkpoints.begin(self._checkpoints.state(step, steps.needed_from, steps.read_until))
        tally = await run.run()
        tally.asked_before = step <= self._asked_until
        await intake.keep_scores()
        if step < self._spec.steps:
            self._enter("publishing", step)
            published = time.monotonic()
            await versions.publish(step + 1)
            tally.durations.publish_s = time.monotonic() - published
        times = tally.durations
        times.step_s = time.monotonic() - began
        # Workers that generate more or earlier shorten no wait for prompts that are known only once others are scored.
        wait_s = times.wait_s - times.resample_s
        await self._log_step(job.workshop, step, tally.metrics(), wait_s=wait_s, train_s=times.train_s)
        if job.resampling is not None:
            await job.resampling.forget(self._checkpoints.covered_step)

    async def _log_step(
        self, workshop: Workshop, step: int, metrics: dict[str, float], *, wait_s: float, train_s: float
    ) -> None:
        await self._warn(await self._device(lambda: workshop.folder.log_step(step, metrics)))
        report = StepReport(
            job_id=self._handle.job_id,
            step=step,
            metrics=metrics,
            checkpointed_step=self._checkpoints.covered_step,
            wait_s=wait_s,
            train_s=train_s,
        )
        await self._bus.transact([Append(names.JOB_REPORTS, report)])

    # --- what others see and want ---

    def _context(
        self,
        spec: GeneratingJob,
        workshop: Workshop,
        scoring: asyncio.TaskGroup,
        curriculum: KeptCurriculum | None,
        resampling: KeptResampling | None,
    ) -> JobContext:
        return JobContext(
            id=self._handle.job_id,
            no=self._handle.job_no,
            spec=spec,
            workshop=workshop,
            link=self._link,
            device=self._device,
            waits=self._waits,
            limit_s=self._limit_s,
            scoring=scoring,
            curriculum=curriculum,
            resampling=resampling,
        )

    async def _warn(self, texts: Sequence[str]) -> None:
        for text in texts:
            await self._link.tell("warning", text=text)

    def _enter(self, phase: str, step: int) -> None:
        self._handle.phase, self._handle.step = phase, step

    async def _own_lease(self) -> None:
        # A killed predecessor's lease runs out by itself; a living one must not be joined.
        because = "another trainer held it last"
        async with self._waits.on("the lease of the job", because=because, limit_s=LEASE_LIMIT_S):
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
