"""Runs one job, from its newest checkpoint to its end.

Consumes: the job file, the newest checkpoint, and the entries of `rollouts.finished` after its position.
Produces: weight versions, step reports, checkpoints (one at the end), and the final model.
Waits for: the job's lease, which `Trainer.lease` acquires; while the job is paused, the resume command, which
`Trainer.commands` applies; disk space; and what each step waits for (see `step.run`).
Ends when: the last step is done, or an error ends the job.

After a kill, a trainer repeats the steps since the newest checkpoint. Their samples are in the stream, so none is
generated twice, and committed versions are not published twice: see `publishing`. Entries that a later step needs stay
after the position of the checkpoint.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeVar

from rlboost.services.trainer.checkpoints import Checkpoints
from rlboost.services.trainer.device import DeviceThread
from rlboost.services.trainer.disk_waits import DiskWaits
from rlboost.services.trainer.domain import plan
from rlboost.services.trainer.domain.metrics import StepTally
from rlboost.services.trainer.domain.profile_recorder import ProfileRecorder
from rlboost.services.trainer.job_streams import FinishedLog, JobStreams, RetryingBus
from rlboost.services.trainer.metrics import observe_step
from rlboost.services.trainer.ports.resources import JobResources, JobResourcesFactory
from rlboost.services.trainer.ports.storage import TrainState
from rlboost.services.trainer.publishing import VersionPublisher
from rlboost.services.trainer.step.context import JobContext
from rlboost.services.trainer.step.durable_curriculum import DurableCurriculum
from rlboost.services.trainer.step.durable_resampling import DurableResampling
from rlboost.services.trainer.step.learning_watch import LearningWatch
from rlboost.services.trainer.step.requested_steps import RequestedSteps
from rlboost.services.trainer.step.run import StepRun
from rlboost.services.trainer.step.sft import sft_step
from rlboost.shared.errors import Fenced
from rlboost.shared.job.spec import GeneratingJob, JobSpec, SftJob, to_json
from rlboost.shared.messages import JobReport, JobState, StepReport
from rlboost.shared.streams import names
from rlboost.shared.streams.bus import Append
from rlboost.shared.streams.fenced_lease import FencedLease
from rlboost.shared.waiting import Waits

T = TypeVar("T")

LEASE_TTL_S = 5.0
LEASE_WAIT_LIMIT_S = 4 * LEASE_TTL_S
"""How long a trainer waits for the lease of a job that another trainer held."""
BUILD_LIMIT_S = 4 * 3600.0
PAUSE_LIMIT_S = 30 * 24 * 3600.0


Phase = Literal["starting", "training", "evaluating", "publishing", "paused", "finishing"]
"""What a trainer does for a job."""


@dataclass(slots=True)
class ActiveJob:
    """The state of a claimed job that the trainer's loops share."""

    job_id: str
    job_no: int
    spec_json: str
    command: str
    """Id of the entry in `jobs.commands` that created it, which stays pending until the job has ended."""
    lease: FencedLease
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)
    unpaused: asyncio.Event = field(default_factory=asyncio.Event)
    owns_lease: asyncio.Event = field(default_factory=asyncio.Event)
    superseded: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once another trainer has taken over the job: report nothing more."""
    is_finished: bool = False
    """True once the job has ended here: its lease is no longer renewed."""
    phase: Phase = "starting"
    step: int = 0

    async def wait_for_lease(self, waits: Waits, limit_s: float) -> None:
        """Wait until this trainer holds the job's lease: that of a dead trainer expires, a live one keeps it.

        Raises:
            Fenced: another trainer took over the job in the meantime.
            WaitTimedOut: another trainer still holds the lease after `limit_s`.

        """
        events = [asyncio.create_task(event.wait()) for event in (self.owns_lease, self.superseded)]
        try:
            async with waits.on("the lease of the job", because="another trainer held it last", limit_s=limit_s):
                await asyncio.wait(events, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for event in events:
                event.cancel()
        if not self.owns_lease.is_set():
            raise Fenced(f"job {self.job_id}: another trainer took it over")


class JobRun:
    """Runs one job."""

    def __init__(
        self,
        active: ActiveJob,
        spec: JobSpec,
        bus: RetryingBus,
        device: DeviceThread,
        waits: Waits,
        limit_s: float,
        trainer: str,
    ) -> None:
        """Bind the job to its adapters; `run` runs it.

        Args:
            active: state shared with the trainer's loops.
            spec: of the job.
            bus: the broker.
            device: the thread of all computation.
            waits: registry of waits.
            limit_s: how long the job waits for a sample or its device.
            trainer: the trainer's name.

        """
        self._active = active
        self._spec = spec
        self._bus = bus
        self._device = device
        self._waits = waits
        self._limit_s = limit_s
        self._trainer = trainer
        self._streams = JobStreams(bus, active.job_id)
        self._disk = DiskWaits(waits, self._streams)
        self._profile = ProfileRecorder()
        self._requested_until = -1
        """The last step that an earlier trainer process may have requested."""
        self._checkpoints: Checkpoints
        """Set once the job's resources are built."""
        self._learning: LearningWatch
        """Set once the job's resources are built."""

    async def run(self, build: JobResourcesFactory) -> None:
        """Train to the end.

        Raises:
            RLBoostError: why the job failed; `Retryable`: another process can continue the job.
            ExceptionGroup: of such errors.

        """
        await self._report("running", self._active.step)
        because = "they are being loaded, or downloaded if the model is an id"
        async with self._waits.on("the job's model and data", because=because, limit_s=BUILD_LIMIT_S):
            resources = await self._device(lambda: build(self._spec, self._active.job_id))
        finished = names.rollouts_finished(self._active.job_id)
        self._checkpoints = Checkpoints(
            self._spec, resources, self._device, self._waits, self._streams, self._disk, finished
        )
        self._learning = LearningWatch(self._active.job_id, self._spec, self._streams, resources.data)
        try:
            await self._train(resources)
        finally:
            self._checkpoints.cancel()
            await resources.rewards.close()
            if resources.environments is not None:
                await resources.environments.close()
            await resources.weights.close()
            # Not awaited: a cancelled job has ended, even if its last micro-batch is still being computed.
            self._device.post(resources.engine.close)
            await self._warn(await asyncio.to_thread(resources.folder.close))

    async def _train(self, resources: JobResources) -> None:
        if self._spec.kind != "sft":
            plan.check(self._spec, len(resources.data.evaluation))
        if resources.machines is not None:
            await resources.machines.gather()
        await self._device(lambda: resources.engine.load_hf(resources.model))
        await resources.rewards.start()
        if resources.environments is not None:
            await resources.environments.start()
        if self._spec.kind == "rl" and self._spec.sampling.top_p < 1:
            text = "sampling.top_p below 1 biases the ratio: it compares the truncated distribution with the whole one"
            await self._streams.emit_event("warning", text=text)
        if (data := resources.data).n_too_long or data.n_too_long_eval:
            await self._streams.emit_event(
                "prompts_filtered",
                reason=self._spec.data.limits,
                train_filtered=data.n_too_long,
                train_remaining=len(data.train),
                eval_filtered=data.n_too_long_eval,
                eval_remaining=len(data.evaluation),
            )
        versions = VersionPublisher(resources.engine, resources.weights, self._device, self._streams, resources.probe)
        await versions.refresh_head()
        state = await self._checkpoints.restore(versions.head)
        step = state.step
        await self._write(lambda: resources.folder.begin(to_json(self._spec), step))
        await self._active.wait_for_lease(self._waits, LEASE_WAIT_LIMIT_S)
        await self._checkpoints.save_initial(state)
        await self._learning.restore(self._bus)
        if self._spec.kind == "sft":
            await self._run_sft_job(self._spec, resources, versions, step)
        else:
            await self._run_generating_job(self._spec, resources, versions, state)
        await self._checkpoints.wait_until_saved()
        if self._spec.kind == "eval":
            return
        self._enter("finishing", self._spec.steps)
        engine, folder = resources.engine, resources.folder
        model = await self._write(lambda: folder.export(engine.export_shards()))
        await self._streams.emit_event("model_saved", path=str(model))
        if text := engine.adapter_json:
            adapter = await self._write(lambda: folder.export_adapter(engine.export_shards("adapter"), text))
            await self._streams.emit_event("adapter_saved", path=str(adapter))

    async def _run_generating_job(
        self, spec: GeneratingJob, resources: JobResources, versions: VersionPublisher, state: TrainState
    ) -> None:
        step = state.step
        if versions.head >= 0:
            self._requested_until = versions.head + spec.elastic.max_staleness
        await versions.ensure_published(step)
        async with asyncio.TaskGroup() as scoring:
            fence, n_rows = self._active.lease.fence, len(resources.data.train)
            curriculum = await DurableCurriculum.load(
                self._bus, self._waits, self._active.job_id, spec, resources, fence
            )
            resampling = await DurableResampling.load(
                self._bus, self._active.job_id, self._active.job_no, spec, n_rows, curriculum, fence
            )
            restoring = scoring.create_task(versions.restore_periodically(), name="restore-damaged-weights")
            job = self._context(spec, resources, scoring, curriculum, resampling)
            finished = FinishedLog(self._bus, self._waits, job.id, state.finished_cursor, self._limit_s)
            steps = RequestedSteps(job, finished, state.read_cursor)
            for number in range(step, plan.last_step(spec) + 1):
                await self._pause_point(number)
                await self._step(job, steps, versions, number, save=self._due(step, number))
            if spec.eval is None and self._due(step, end := spec.steps):
                # A final evaluation takes this checkpoint before it starts.
                await self._checkpoints.start_save(self._checkpoints.state(end, steps.needed_from, steps.read_until))
            restoring.cancel()

    async def _run_sft_job(self, spec: SftJob, resources: JobResources, versions: VersionPublisher, first: int) -> None:
        """Train on completions from the data. No worker needs the weights, so only the last version is published."""
        for step in range(first, spec.steps):
            await self._pause_point(step)
            self._enter("training", step)
            if self._due(first, step):
                await self._checkpoints.start_save(self._checkpoints.state(step))
            done = await sft_step(spec, resources, self._device, step)
            await self._log_step(resources, step, done.metrics(), wait_s=0.0, train_s=done.train_s)
        if self._due(first, spec.steps):
            await self._checkpoints.start_save(self._checkpoints.state(spec.steps))
        self._enter("publishing", spec.steps)
        was_committed = versions.head >= spec.steps
        await versions.ensure_published(spec.steps)
        if was_committed:
            await versions.publish(spec.steps)  # load the committed bits, which may differ on another machine

    def _due(self, first: int, step: int) -> bool:
        """Return True if a checkpoint is due before this step, or after the last one."""
        every, end = self._spec.trainer.checkpoint_every, self._spec.steps
        return step > first and (step % every == 0 or step == end)

    async def _step(
        self, job: JobContext, steps: RequestedSteps, versions: VersionPublisher, step: int, *, save: bool
    ) -> None:
        began = time.monotonic()
        self._enter("training" if step < self._spec.steps else "evaluating", step)
        intake = await steps.enter(step, versions.head)
        run = StepRun(job, intake, steps)
        await steps.request()
        if save:
            # Workers generate in the meantime.
            await self._checkpoints.start_save(self._checkpoints.state(step, steps.needed_from, steps.read_until))
        tally = await run.run()
        tally.requested_before = step <= self._requested_until
        await intake.record_scores()
        if step < self._spec.steps:
            self._enter("publishing", step)
            publish_began = time.monotonic()
            await versions.publish(step + 1)
            tally.durations.publish_s = time.monotonic() - publish_began
        times = tally.durations
        times.step_s = time.monotonic() - began
        # Replacement prompts are known only after scoring, so no faster generation would shorten this wait.
        wait_s = times.wait_s - times.resample_s
        await self._log_step(job.resources, step, tally.metrics(), wait_s=wait_s, train_s=times.train_s, tally=tally)
        if (profile := self._profile.observe(tally)) is not None:
            await self._write(lambda: job.resources.folder.write_profile(profile))
        if job.resampling is not None:
            await job.resampling.trim(self._checkpoints.covered_step)

    async def _log_step(
        self,
        resources: JobResources,
        step: int,
        metrics: dict[str, float],
        *,
        wait_s: float,
        train_s: float,
        tally: StepTally | None = None,
    ) -> None:
        observe_step(metrics, trained=step < self._spec.steps)
        await self._warn(await self._write(lambda: resources.folder.log_step(step, metrics)))
        report = StepReport(
            job_id=self._active.job_id,
            step=step,
            metrics=metrics,
            checkpointed_step=self._checkpoints.covered_step,
            wait_s=wait_s,
            train_s=train_s,
            warnings=await self._learning.observe(step, metrics, tally),
        )
        await self._bus.transact([Append(names.JOB_REPORTS, report)])

    # --- the context of the steps ---

    def _context(
        self,
        spec: GeneratingJob,
        resources: JobResources,
        scoring: asyncio.TaskGroup,
        curriculum: DurableCurriculum | None,
        resampling: DurableResampling | None,
    ) -> JobContext:
        return JobContext(
            id=self._active.job_id,
            no=self._active.job_no,
            spec=spec,
            resources=resources,
            streams=self._streams,
            device=self._device,
            waits=self._waits,
            limit_s=self._limit_s,
            scoring=scoring,
            curriculum=curriculum,
            resampling=resampling,
        )

    # --- writes and warnings ---

    async def _write(self, call: Callable[[], T]) -> T:
        """Return the result of a write into the job's folder, in the device's thread, once the disk has space."""
        return await self._disk("the job's folder", lambda: self._device(call))

    async def _warn(self, texts: Sequence[str]) -> None:
        for text in texts:
            await self._streams.emit_event("warning", text=text)

    # --- reports, pauses, lease ---

    def _enter(self, phase: Phase, step: int) -> None:
        self._active.phase, self._active.step = phase, step

    async def _pause_point(self, step: int) -> None:
        if self._active.unpaused.is_set():
            return
        self._enter("paused", step)
        await self._report("paused", step)
        async with self._waits.on("a resume", because="the job was paused", limit_s=PAUSE_LIMIT_S):
            await self._active.unpaused.wait()
        await self._report("running", step)

    async def _report(self, state: JobState, step: int) -> None:
        report = JobReport(job_id=self._active.job_id, state=state, step=step, trainer=self._trainer)
        await self._bus.transact([Append(names.JOB_REPORTS, report)])
