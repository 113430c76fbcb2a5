"""Records each finished step of a job, and warns when the job's metrics show no learning, or damage.

Consumes: the step's metrics and, of a step that generates, its tally; once, the metrics that earlier trainers recorded,
so that a successor repeats no warning.
Produces: a row of the run log, and a link of the run's record; a `StepReport` with the warnings that hold; `warning`
and `warning_cleared` events; a `step_ended` event for a step that generates; the run's profile; Prometheus metrics.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence

import structlog
from prometheus_client import Counter, Gauge

from rlboost.services.trainer.domain.groups import recorded
from rlboost.services.trainer.domain.metrics import ProfileRecorder, RolloutTally, StepTally
from rlboost.services.trainer.domain.warnings import Change, JobFacts, WarningTracker
from rlboost.services.trainer.job.checkpoints import Checkpoints
from rlboost.services.trainer.job.job import Job
from rlboost.services.trainer.ports.samples import Data
from rlboost.services.trainer.ports.storage import LoggedSample
from rlboost.shared.job.run_record import pack_groups
from rlboost.shared.messages import StepReport
from rlboost.shared.streams import names
from rlboost.shared.streams.bus import Append
from rlboost.shared.wire import ints

log = structlog.get_logger(__name__)

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
