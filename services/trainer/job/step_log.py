"""Records each finished step of a job.

Consumes: the step's metrics and, of a step that generates, its tally.
Produces: a row of the run log; a `StepReport` with the warnings that hold; a `step_ended` event for a step that
generates; the run's profile; Prometheus metrics.
"""

from __future__ import annotations

from rlboost.services.trainer.domain.metrics import StepTally
from rlboost.services.trainer.domain.profile_recorder import ProfileRecorder
from rlboost.services.trainer.job.checkpoints import Checkpoints
from rlboost.services.trainer.job.metrics import observe_step
from rlboost.services.trainer.ports.storage import RunFolder
from rlboost.services.trainer.runtime.disk_waits import FolderWrites
from rlboost.services.trainer.runtime.job_streams import JobStreams
from rlboost.services.trainer.step.learning_watch import LearningWatch
from rlboost.shared.messages import StepReport
from rlboost.shared.streams import names
from rlboost.shared.streams.bus import Append


class StepLog:
    """Records the steps of one job."""

    def __init__(
        self,
        job_id: str,
        n_steps: int,
        streams: JobStreams,
        folder: RunFolder,
        write: FolderWrites,
        checkpoints: Checkpoints,
        learning: LearningWatch,
    ) -> None:
        """Bind to the job.

        Args:
            job_id: the job.
            n_steps: number of training steps of the job.
            streams: the job's streams.
            folder: the job's folder.
            write: writes into `folder`.
            checkpoints: reports say which steps are covered by one.
            learning: warns about the metrics.

        """
        self._job_id = job_id
        self._n_steps = n_steps
        self._streams = streams
        self._folder = folder
        self._write = write
        self._checkpoints = checkpoints
        self._learning = learning
        self._profile = ProfileRecorder()

    async def record_generated(self, tally: StepTally) -> None:
        """Record a step whose samples were generated, once its durations are complete."""
        times = tally.durations
        # Replacement prompts are known only after scoring, so no faster generation would shorten this wait.
        wait_s = times.wait_s - times.resample_s
        await self.record(tally.step, tally.metrics(), wait_s=wait_s, train_s=times.train_s, tally=tally)
        if not tally.requested_before:
            tokens = tally.tokens_by_worker()
            await self._streams.emit_event("step_ended", step=tally.step, step_s=round(times.step_s, 3), tokens=tokens)
        if (profile := self._profile.observe(tally)) is not None:
            await self._write(lambda: self._folder.write_profile(profile))

    async def record(
        self, step: int, metrics: dict[str, float], *, wait_s: float, train_s: float, tally: StepTally | None = None
    ) -> None:
        """Record a step.

        Args:
            step: number of the step.
            metrics: the step's row of the run log.
            wait_s: how long the trainer waited for samples, which faster generation would shorten.
            train_s: how long it computed.
            tally: counts of the step, if its samples were generated.

        """
        observe_step(metrics, trained=step < self._n_steps)
        await self._streams.emit_warnings(await self._write(lambda: self._folder.log_step(step, metrics)))
        report = StepReport(
            job_id=self._job_id,
            step=step,
            metrics=metrics,
            checkpointed_step=self._checkpoints.covered_step,
            wait_s=wait_s,
            train_s=train_s,
            warnings=await self._learning.observe(step, metrics, tally),
        )
        await self._streams.bus.transact([Append(names.JOB_REPORTS, report)])
