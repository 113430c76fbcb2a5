"""Runs one job, from its newest checkpoint to its end.

Consumes: the job file, the newest checkpoint, and the entries of `rollouts.finished` after its position. Produces:
weight versions, step reports, checkpoints (one at the end), and the final model. Waits for: the job's lease, which
`Trainer.renew_lease` acquires; while the job is paused, the resume command, which `Trainer.follow_commands` applies;
disk space; and what each step waits for (see `step.run`). Ends when: the last step is done, or an error ends the job.

After a kill, a trainer repeats the steps since the newest checkpoint. Their samples are in the stream, so none is
generated twice, and committed versions are not published twice: see `publishing`. Entries that a later step needs stay
after the position of the checkpoint.

*Traces of steps*, when a user asks for them. Consumes: the hash that `POST /v1/jobs/{job_id}/profile` writes, before
each step. Produces: a Chrome trace of each rank in the job's folder `profile/`; a `profile_written` event, and warnings
about what could not be recorded, which ends no job. Ends when: the job does; a profile of more steps than are left ends
with the last one.

*The record of each step*. Consumes: the step's metrics and, of a step that generates, its tally; once, the metrics that
earlier trainers recorded, so that a successor repeats no warning. Produces: a row of the run log, and a link of the
run's record; a `StepReport` with the warnings that hold; `warning` and `warning_cleared` events; a `step_ended` event
for a step that generates; the run's profile; Prometheus metrics.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import datetime
from functools import partial
from pathlib import Path

import structlog
from prometheus_client import Counter, Gauge

from rlboost.services.trainer.domain import plan
from rlboost.services.trainer.domain.groups import recorded
from rlboost.services.trainer.domain.metrics import ProfileRecorder, RolloutTally, StepTally
from rlboost.services.trainer.domain.warnings import Change, JobFacts, WarningTracker
from rlboost.services.trainer.job.checkpoints import Checkpoints
from rlboost.services.trainer.job.job import LEASE_WAIT_LIMIT_S, Job
from rlboost.services.trainer.job.publishing import VersionPublisher, publish_models, renew_images
from rlboost.services.trainer.ports.samples import Data
from rlboost.services.trainer.ports.storage import JobResources, LoggedSample, RunEnd, TrainState
from rlboost.services.trainer.step import offline
from rlboost.services.trainer.step.durable import DurableCurriculum, DurablePaidCalls, DurableResampling
from rlboost.services.trainer.step.intake import Intake
from rlboost.services.trainer.step.judging import OtherModels
from rlboost.services.trainer.step.run import StepRun
from rlboost.services.trainer.step.sessions import other_policies, watch_policies
from rlboost.services.trainer.step.texts import logged_samples
from rlboost.shared.errors import Conflict, Fenced, Retryable, leaves
from rlboost.shared.job.offline import OfflineJob
from rlboost.shared.job.run_record import pack_groups
from rlboost.shared.job.spec import GeneratingJob, JobSpec, to_json
from rlboost.shared.messages import StepReport
from rlboost.shared.streams import names
from rlboost.shared.streams.bus import Append, Delete
from rlboost.shared.wire import ints

log = structlog.get_logger(__name__)

# --- Traces of steps --------------------------------------------------------------------------------------------------


class Profiling:
    """The profiles of one job."""

    def __init__(self, job: Job) -> None:
        """Record nothing yet."""
        self._job = job
        self._n_left = 0
        """Steps that are still to be recorded."""
        self._folder = Path()

    @asynccontextmanager
    async def step(self, step: int) -> AsyncIterator[None]:
        """Record the step that the body trains, if it was asked for."""
        if not self._n_left:
            await self._start(step)
        yield
        if self._n_left:
            self._n_left -= 1
            if not self._n_left or step + 1 >= self._job.spec.steps:
                await self._stop(step)

    async def _start(self, step: int) -> None:
        job, key = self._job, names.job_profile(self._job.id)
        asked = await job.bus.retry(lambda bus: bus.hash_all(key))
        if not asked or step >= job.spec.steps:
            return
        await job.bus.transact([Delete(key)])
        self._n_left = int(asked["steps"])
        self._folder = job.resources.folder.path_of(f"profile/step-{step}")
        await job.warn(*await job.device.run(lambda: job.resources.engine.start_profile(self._folder)))

    async def _stop(self, step: int) -> None:
        job, self._n_left = self._job, 0
        await job.warn(*await job.device.run(job.resources.engine.stop_profile))
        await job.emit_event("profile_written", step=step, path=str(self._folder))


# --- The job ----------------------------------------------------------------------------------------------------------


BUILD_LIMIT_S = 4 * 3600.0

Build = Callable[[JobSpec, str, datetime], JobResources]
"""Builds a job's resources from its file, its id and when it was created, which is the same in each process that
continues it. Blocks; downloads the model if it is the id of one on the Hugging Face Hub. Raises `ConfigError` if a file
that the job names is missing or invalid."""


async def run_job(job: Job, build: Build) -> None:
    """Train to the end.

    Args:
        job: claimed by this trainer.
        build: builds the job's resources; called on the device's thread.

    Raises:
        RLBoostError: why the job failed; `Retryable`: another process can continue the job.
        ExceptionGroup: of such errors.

    """
    spec = job.spec
    await job.report("running", job.step)
    because = "they are being loaded, or downloaded if the model is an id"
    async with job.waits.on("the job's model and data", because=because, limit_s=BUILD_LIMIT_S):
        job.resources = await job.device.run(lambda: build(spec, job.id, job.created))
    try:
        run = JobRun(job)
        async with job.device.turns(job):
            try:
                await run.to_the_end()
            finally:
                await run.close(sys.exception())
    finally:
        del job.resources  # the trainer refers to the job until its next one


def is_failure(error: BaseException) -> bool:
    """Return True for an error that fails the job: another process would meet it, too."""
    return isinstance(error, Exception) and not isinstance(error, Retryable | Conflict)


def _end_of(job: Job, error: BaseException | None) -> RunEnd:
    if error is None:
        return "completed"
    found = leaves(error)
    if job.superseded.is_set() or any(isinstance(leaf, Fenced) for leaf in found):
        return "stopped"
    if any(map(is_failure, found)):
        return "failed"
    return "cancelled" if job.cancelled.is_set() else "stopped"


class JobRun:
    """The run of a job whose resources are built."""

    def __init__(self, job: Job) -> None:
        """Read and write nothing yet."""
        self._job = job
        self._checkpoints = Checkpoints(job)
        self._versions = VersionPublisher(job)
        self._log = StepLog(job, self._checkpoints)
        self._profiling = Profiling(job)

    async def to_the_end(self) -> None:
        """Load, restore, run all steps, and write the final model."""
        job, spec = self._job, self._job.spec
        await self._load()
        state = await self._restore()
        if isinstance(spec, OfflineJob):
            await self._run_offline_steps(spec, state.step)
        else:
            await self._run_generating_steps(spec, state)
        await self._checkpoints.wait_until_saved()
        weights = ""
        if spec.kind != "eval":
            job.enter("finishing", spec.steps)
            await self._export()
            weights = await self._versions.digest(spec.steps)
        await job.write(lambda: job.resources.folder.record_end(weights))

    async def _load(self) -> None:
        """Load the model, start user-code processes, and emit warnings about settings and filtered prompts."""
        job, spec = self._job, self._job.spec
        resources, data = job.resources, job.resources.data
        if not isinstance(spec, OfflineJob):
            plan.check(spec, data.n_evaluation)
        if resources.machines is not None:
            await resources.machines.gather()
        await job.device.compute(lambda: resources.engine.load_hf(resources.model))
        await resources.rewards.start()
        if resources.environments is not None:
            await resources.environments.start()
        await job.warn(*data.advice)
        if spec.kind == "rl" and spec.sampling.advice:
            await job.warn(spec.sampling.advice)
        if data.n_too_long or data.n_too_long_eval:
            await job.emit_event(
                "prompts_filtered",
                reason=spec.data.limits,
                train_filtered=data.n_too_long,
                train_remaining=len(data.train),
                eval_filtered=data.n_too_long_eval,
                eval_remaining=len(data.evaluation),
            )

    async def _restore(self) -> TrainState:
        """Return the position that the job continues from, once this trainer holds the job's lease."""
        job = self._job
        # First, since another process of this trainer may still write checkpoints and metrics.
        await job.wait_for_lease(LEASE_WAIT_LIMIT_S)
        await self._versions.refresh_head()
        state = await self._checkpoints.restore(self._versions.head)
        await job.write(lambda: job.resources.folder.begin(to_json(job.spec), state.step, state.data_digest))
        await self._checkpoints.save_initial(state)
        await self._log.restore()
        return state

    async def _export(self) -> None:
        """Write the final model into the job's folder."""
        job, engine, folder = self._job, self._job.resources.engine, self._job.resources.folder
        model = await job.write(lambda: folder.export(engine.export_shards()))
        await job.emit_event("model_saved", path=str(model))
        if text := engine.adapter_json:
            adapter = await job.write(lambda: folder.export_adapter(engine.export_shards("adapter"), text))
            await job.emit_event("adapter_saved", path=str(adapter))

    async def close(self, error: BaseException | None) -> None:
        """Stop what the job has started. An error in one part is raised once the others are closed too.

        Args:
            error: what has ended the run before its end.

        """
        resources = self._job.resources
        async with AsyncExitStack() as closing:  # the last one first
            closing.push_async_exit(partial(self._close_folder, error))
            # Not awaited: a cancelled job has ended, even if its last micro-batch is still being computed.
            closing.callback(self._job.device.post, resources.engine.close)
            closing.push_async_callback(resources.weights.close)
            for other in resources.models.values():
                closing.push_async_callback(other.weights.close)
            if resources.environments is not None:
                closing.push_async_callback(resources.environments.close)
            closing.push_async_callback(resources.rewards.close)
            self._checkpoints.cancel()

    async def _close_folder(
        self, error: BaseException | None, _: object, of_closing: BaseException | None, __: object
    ) -> None:
        end = _end_of(self._job, of_closing or error)  # the one that the trainer gets
        await self._job.warn(*await asyncio.to_thread(self._job.resources.folder.close, end))

    # --- the steps of a job whose samples workers generate: reinforcement learning, or an evaluation ---

    async def _run_generating_steps(self, spec: GeneratingJob, state: TrainState) -> None:
        """Run all steps after `state`, and publish the version that each one trains."""
        job, checkpoints, versions = self._job, self._checkpoints, self._versions
        requested_until = versions.head + spec.elastic.max_staleness if versions.head >= 0 else -1
        await publish_models(job)
        await versions.ensure_published(state.step)
        async with asyncio.TaskGroup() as scoring:
            curriculum = await DurableCurriculum.load(job)
            resampling = await DurableResampling.load(job, curriculum)
            paid_calls = await DurablePaidCalls.load(job) if job.resources.environments is not None else None
            if paid_calls is not None and job.resources.environments is not None:
                job.resources.environments.record_calls(paid_calls)
            restoring = scoring.create_task(versions.restore_periodically(), name="restore-damaged-weights")
            renewing = scoring.create_task(renew_images(job), name="renew-images")
            models = await OtherModels.load(job)
            judging = None if models is None else scoring.create_task(models.questions.read(), name="read-other-models")
            others = await other_policies(job)
            watching = scoring.create_task(watch_policies(job, others), name="watch-policies")
            intake = Intake(job, state, scoring, curriculum, resampling, models, others)
            if models is not None:
                checkpoints.more_trims = models.questions.trims
            for step in range(state.step, plan.last_step(spec) + 1):
                await job.wait_while_paused(step)
                save = checkpoints.is_due(state.step, step)
                async with self._profiling.step(step):
                    await self._run_generating_step(intake, step, save=save, requested_before=step <= requested_until)
                if resampling is not None:
                    await resampling.trim(checkpoints.covered_step)
                if paid_calls is not None:
                    await paid_calls.trim(checkpoints.covered_step)
            if spec.eval is None and checkpoints.is_due(state.step, spec.steps):
                # A final evaluation takes this checkpoint before it starts.
                await self._save(intake, spec.steps)
            restoring.cancel()
            renewing.cancel()
            watching.cancel()
            if judging is not None:
                judging.cancel()

    async def _run_generating_step(self, intake: Intake, step: int, *, save: bool, requested_before: bool) -> None:
        """Run one step.

        Args:
            intake: all requested steps.
            step: number of the step; the one after the last training step only evaluates.
            save: whether a checkpoint is due before it.
            requested_before: whether an earlier trainer process may have requested it.

        """
        job, began = self._job, time.monotonic()
        job.enter("training" if step < job.spec.steps else "evaluating", step)
        groups = await intake.enter(step, self._versions.head)
        run = StepRun(intake, groups)
        await intake.request()
        if save:
            # Workers generate in the meantime.
            await self._save(intake, step)
        tally = await run.run()
        tally.requested_before = requested_before
        await groups.record_scores()
        weights = ""
        if step < job.spec.steps:
            job.enter("publishing", step)
            publish_began = time.monotonic()
            await self._versions.publish(step + 1)
            weights = await self._versions.digest(step + 1)
            tally.durations.publish_s = time.monotonic() - publish_began
        tally.durations.step_s = time.monotonic() - began
        shown = tally, job.resources.data, job.spec.log.samples
        await self._log.record_generated(tally, weights, await asyncio.to_thread(logged_samples, *shown))

    async def _save(self, intake: Intake, step: int) -> None:
        await self._checkpoints.start_save(self._checkpoints.state(step, *intake.cursors))

    # --- the steps of a job that learns from completions in the data, without workers or rewards ---

    async def _run_offline_steps(self, spec: OfflineJob, first: int) -> None:
        """Run all steps from `first`. No worker needs the weights, so only the last version is published."""
        job, checkpoints, versions = self._job, self._checkpoints, self._versions
        for step in range(first, spec.steps):
            await job.wait_while_paused(step)
            if checkpoints.is_due(first, step):
                await checkpoints.start_save(checkpoints.state(step))
            evaluated = await self._evaluate(spec, step)
            job.enter("training", step)
            async with self._profiling.step(step):
                trained = await offline.train_step(job, spec, step)
            await self._log.record(step, trained | evaluated, wait_s=0.0, train_s=trained["time/train_s"])
        if checkpoints.is_due(first, spec.steps):
            await checkpoints.start_save(checkpoints.state(spec.steps))
        if evaluated := await self._evaluate(spec, spec.steps):
            await self._log.record(spec.steps, evaluated, wait_s=0.0, train_s=0.0)
        if spec.kind == "reward":
            return  # no engine generates with a reward model
        job.enter("publishing", spec.steps)
        was_committed = versions.head >= spec.steps
        await versions.ensure_published(spec.steps)
        if was_committed:
            await versions.publish(spec.steps)  # load the committed bits, which may differ on another machine

    async def _evaluate(self, spec: OfflineJob, step: int) -> dict[str, float]:
        """Return the metrics of the present weights on the held-out rows, empty if no evaluation is due."""
        if spec.eval is None or not spec.eval.is_due(step, spec.steps):
            return {}
        self._job.enter("evaluating", step)
        return await offline.evaluate(self._job, spec)


# --- The trainer's metrics for Prometheus: steps, the time of their phases, and what the last step measured -----------


PHASES = ("seeding", "wait", "train", "publish")
SHOWN = (
    *("reward/mean", "reward/std", "frac_reward_zero_std", "completions/mean_length", "completions/clipped_ratio"),
    *("entropy", "loss", "grad_norm", "lr", "kl", "off_policy/staleness", "groups/dropped_ratio"),
    *("perf/tokens_per_s", "eval/reward_mean", "eval/pass@1"),
)
"""Metrics of the run log that are exported, the last two for each held-out set. A fixed list: jobs may report any
number of others."""
_STEPS = Counter("rlboost_trainer_steps", "Training steps finished by this process")
_PHASES = Counter("rlboost_trainer_phase_seconds", "Time of finished steps by phase", ["phase"])
_LAST = Gauge("rlboost_trainer_step_metric", "Main metrics of the last step, named as in the run log", ["name"])


def observe_step(metrics: Mapping[str, float], *, trained: bool) -> None:
    """Export a finished training step, or an evaluation after the last one."""
    _STEPS.inc(trained)
    for phase in PHASES:
        _PHASES.labels(phase).inc(metrics.get(f"time/{phase}_s", 0.0))
    _LAST.clear()
    for name, value in metrics.items():
        if re.sub("^eval/[^/]+/", "eval/", name) in SHOWN:
            _LAST.labels(name).set(value)


# --- The record of each finished step ---------------------------------------------------------------------------------


class StepLog:
    """Records the steps of one job."""

    def __init__(self, job: Job, checkpoints: Checkpoints) -> None:
        """Bind to the job; reports say which steps `checkpoints` cover."""
        self._job = job
        self._checkpoints = checkpoints
        self._profile = ProfileRecorder()
        self._warnings = WarningTracker(JobFacts.of(job.id, job.spec))

    async def restore(self) -> None:
        """Take the steps that the manager has recorded, without warnings."""
        stored = await self._job.bus.retry(lambda bus: bus.hash_all(names.job_metrics(self._job.id)))
        try:
            for step, text in sorted(stored.items(), key=lambda item: int(item[0])):
                self._warnings.observe(int(step), json.loads(text))
        except Exception:  # a warning must not end a job
            log.exception("learning_watch_failed", job=self._job.id)

    async def record_generated(self, tally: StepTally, weights: str, samples: Sequence[LoggedSample] = ()) -> None:
        """Record a step whose samples were generated, once its durations are complete, and log some; see `record`."""
        times = tally.durations
        # Replacement prompts are known only after scoring, so no faster generation would shorten this wait.
        seconds = {"wait_s": times.wait_s - times.resample_s, "train_s": times.train_s}
        await self.record(tally.step, tally.metrics(), **seconds, tally=tally, weights=weights, samples=samples)
        if not tally.requested_before:
            tokens = tally.tokens_by_worker()
            await self._job.emit_event("step_ended", step=tally.step, step_s=round(times.step_s, 3), tokens=tokens)
        if (profile := self._profile.observe(tally)) is not None:
            await self._job.write(lambda: self._job.resources.folder.write_profile(profile))

    async def record(
        self,
        step: int,
        metrics: dict[str, float],
        *,
        wait_s: float,
        train_s: float,
        tally: StepTally | None = None,
        weights: str = "",
        samples: Sequence[LoggedSample] = (),
    ) -> None:
        """Record a step.

        Args:
            step: number of the step.
            metrics: the step's row of the run log.
            wait_s: how long the trainer waited for samples, which faster generation would shorten.
            train_s: how long it computed.
            tally: counts of the step, if its samples were generated.
            weights: digest of the version that it has published, if there is one.
            samples: for the loggers that show some.

        """
        job, folder = self._job, self._job.resources.folder
        observe_step(metrics, trained=step < job.spec.steps)
        await job.warn(*await job.write(lambda: folder.log_step(step, metrics, samples)))

        def record() -> None:
            groups = b"" if tally is None else pack_groups(map(recorded, tally.rollouts.groups))
            folder.record_step(step, metrics, groups, weights)

        await job.write(record)
        report = StepReport(
            job_id=job.id,
            step=step,
            metrics=metrics,
            checkpointed_step=self._checkpoints.covered_step,
            wait_s=wait_s,
            train_s=train_s,
            warnings=await self._watch(step, metrics, tally),
        )
        await job.bus.transact([Append(names.JOB_REPORTS, report)])

    async def _watch(self, step: int, metrics: Mapping[str, float], tally: StepTally | None) -> list[str]:
        """Take a finished step, emit what changes, and return the text of each warning that holds."""
        try:
            for change in self._warnings.observe(step, metrics):
                await self._emit(change, step, tally)
        except Exception:  # a warning must not end a job
            log.exception("learning_watch_failed", job=self._job.id, step=step)
        return self._warnings.warnings

    async def _emit(self, change: Change, step: int, tally: StepTally | None) -> None:
        finding = change.finding
        if not change.holds:
            text = f"no longer: {finding.seen} (a warning since step {change.since_step + 1})"
            await self._job.emit_event("warning_cleared", name=finding.name, step=step, text=text)
            return
        shown = "" if tally is None else example(finding.name, tally.rollouts, self._job.resources.data)
        text = f"{finding.text}. {shown}" if shown else finding.text
        await self._job.emit_event("warning", name=finding.name, step=step, text=text)


# --- What illustrates a warning ---------------------------------------------------------------------------------------


_PROMPT_CHARS, _COMPLETION_CHARS, _DETAIL_CHARS = 120, 300, 300
"""Longest texts in a warning; of a prompt, its end."""


def example(name: str, tally: RolloutTally, data: Data) -> str:
    """Return what illustrates a finding, as one line: a completion with its reward, or why a group was dropped."""
    if name == "many_groups_dropped" and tally.first_detail:
        detail = " ".join(tally.first_detail.split())[:_DETAIL_CHARS]
        return f"The first group dropped in the last step: {detail}"
    groups = tally.evaluated if name == "eval_reward_zero" else tally.scored
    found = [(reward, group.samples[i].sample, group, i) for group in groups for i, reward in enumerate(group.rewards)]
    if not found:
        return ""
    reward, _, group, i = min(found, key=lambda one: one[:2])
    prompt, completion = (
        data.decode(ints(column), skip_special_tokens=False) for column in (group.prompt, group.completions[i])
    )
    if len(prompt) > _PROMPT_CHARS:
        prompt = "..." + prompt[-_PROMPT_CHARS:]
    if len(completion) > _COMPLETION_CHARS:  # the answer is often at the end
        half = _COMPLETION_CHARS // 2
        completion = f"{completion[:half]} ... {completion[-half:]}"
    # As JSON, so that line breaks and control characters do not reach a terminal.
    prompt, completion = (json.dumps(text, ensure_ascii=False) for text in (prompt, completion))
    return f"Sampled: prompt {prompt}, completion {completion}, reward {reward:g}"
