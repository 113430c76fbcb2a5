"""The steps of a job whose samples workers generate: reinforcement learning, or an evaluation.

Consumes: the job's state at its newest checkpoint, and the entries of `rollouts.finished` after its position.
Produces: weight versions, checkpoints, and the records of `StepLog`.
Waits for: what each step waits for (see `step.run`), and while the job is paused, the resume command.
Ends when: the last step is done.
"""

from __future__ import annotations

import asyncio
import time

from rlboost.services.trainer.domain import plan
from rlboost.services.trainer.job.parts import JobParts
from rlboost.services.trainer.ports.storage import TrainState
from rlboost.services.trainer.runtime.job_streams import FinishedLog
from rlboost.services.trainer.step.context import JobContext
from rlboost.services.trainer.step.durable_curriculum import DurableCurriculum
from rlboost.services.trainer.step.durable_resampling import DurableResampling
from rlboost.services.trainer.step.requested_steps import RequestedSteps
from rlboost.services.trainer.step.run import StepRun
from rlboost.shared.job.spec import GeneratingJob


async def run_generating_steps(spec: GeneratingJob, job: JobParts, state: TrainState) -> None:
    """Run all steps after `state`, and publish the version that each one trains."""
    active, host, versions = job.active, job.host, job.versions
    requested_until = versions.head + spec.elastic.max_staleness if versions.head >= 0 else -1
    await versions.ensure_published(state.step)
    async with asyncio.TaskGroup() as scoring:
        fence, n_rows = active.lease.fence, len(job.resources.data.train)
        curriculum = await DurableCurriculum.load(host.bus, host.waits, active.job_id, spec, job.resources, fence)
        resampling = await DurableResampling.load(
            host.bus, active.job_id, active.job_no, spec, n_rows, curriculum, fence
        )
        restoring = scoring.create_task(versions.restore_periodically(), name="restore-damaged-weights")
        context = JobContext(
            id=active.job_id,
            no=active.job_no,
            spec=spec,
            resources=job.resources,
            streams=job.streams,
            device=host.device,
            waits=host.waits,
            limit_s=host.limit_s,
            scoring=scoring,
            curriculum=curriculum,
            resampling=resampling,
        )
        finished = FinishedLog(host.bus, host.waits, active.job_id, state.finished_cursor, host.limit_s)
        steps = RequestedSteps(context, finished, state.read_cursor)
        await GeneratingRun(context, job, steps, requested_until).run(state.step)
        restoring.cancel()


class GeneratingRun:
    """Runs one step after the other."""

    def __init__(self, context: JobContext, job: JobParts, steps: RequestedSteps, requested_until: int) -> None:
        """Bind to the job.

        Args:
            context: what all steps of the job use.
            job: the parts of the job.
            steps: the requested steps.
            requested_until: the last step that an earlier trainer process may have requested, -1 for none.

        """
        self._context = context
        self._n_steps = context.spec.steps
        self._steps = steps
        self._requested_until = requested_until
        self._active = job.active
        self._reporter = job.reporter
        self._checkpoints = job.checkpoints
        self._versions = job.versions
        self._log = job.log

    async def run(self, first: int) -> None:
        """Run the steps from `first` to the last one."""
        spec, checkpoints = self._context.spec, self._checkpoints
        for step in range(first, plan.last_step(spec) + 1):
            await self._reporter.wait_while_paused(step)
            await self._step(step, save=checkpoints.is_due(first, step))
        if spec.eval is None and checkpoints.is_due(first, self._n_steps):
            # A final evaluation takes this checkpoint before it starts.
            await self._save(self._n_steps)

    async def _step(self, step: int, *, save: bool) -> None:
        began = time.monotonic()
        self._active.enter("training" if step < self._n_steps else "evaluating", step)
        intake = await self._steps.enter(step, self._versions.head)
        run = StepRun(self._context, intake, self._steps)
        await self._steps.request()
        if save:
            # Workers generate in the meantime.
            await self._save(step)
        tally = await run.run()
        tally.requested_before = step <= self._requested_until
        await intake.record_scores()
        if step < self._n_steps:
            self._active.enter("publishing", step)
            publish_began = time.monotonic()
            await self._versions.publish(step + 1)
            tally.durations.publish_s = time.monotonic() - publish_began
        tally.durations.step_s = time.monotonic() - began
        await self._log.record_generated(tally)
        if self._context.resampling is not None:
            await self._context.resampling.trim(self._checkpoints.covered_step)

    async def _save(self, step: int) -> None:
        state = self._checkpoints.state(step, self._steps.needed_from, self._steps.read_until)
        await self._checkpoints.start_save(state)
