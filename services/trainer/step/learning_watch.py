"""Warns when a job's metrics show no learning, or damage.

Applies `domain.warnings.tracker` to each step, and emits what changes as events.

Consumes: the metrics of each finished step; once, those that earlier trainers recorded, so that a successor repeats no
warning. Produces: `warning` and `warning_cleared` events. Ends when: the job ends. An exception in this module
is logged and never fails the job.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

import structlog

from rlboost.services.trainer.domain.metrics import RolloutTally, StepTally
from rlboost.services.trainer.domain.warnings.rules import JobFacts
from rlboost.services.trainer.domain.warnings.tracker import Change, WarningTracker
from rlboost.services.trainer.ports.data import Data
from rlboost.services.trainer.runtime.job_streams import JobStreams, RetryingBus
from rlboost.shared.job.spec import JobSpec
from rlboost.shared.streams import names
from rlboost.shared.wire.columns import ints

log = structlog.get_logger(__name__)

_PROMPT_CHARS, _COMPLETION_CHARS, _DETAIL_CHARS = 120, 300, 300
"""Longest texts in a warning; of a prompt, its end."""


class LearningWatch:
    """Watches the steps of one job."""

    def __init__(self, job_id: str, spec: JobSpec, streams: JobStreams, data: Data) -> None:
        """Watch a job from its first step; `restore` continues after recorded steps."""
        self._job_id = job_id
        self._streams = streams
        self._data = data
        self._tracker = WarningTracker(JobFacts.of(job_id, spec))

    async def restore(self, bus: RetryingBus) -> None:
        """Take the steps that the manager has recorded, without warnings."""
        stored = await bus(lambda raw: raw.hash_all(names.job_metrics(self._job_id)))
        try:
            for step, text in sorted(stored.items(), key=lambda item: int(item[0])):
                self._tracker.observe(int(step), json.loads(text))
        except Exception:  # a warning must not end a job
            log.exception("learning_watch_failed", job=self._job_id)

    async def observe(self, step: int, metrics: Mapping[str, float], tally: StepTally | None = None) -> list[str]:
        """Take a finished step, emit what changes, and return the text of each warning that holds.

        Args:
            step: number of the step.
            metrics: the step's row of the run log.
            tally: the step's groups; one completion is shown; None if the job generates nothing.

        """
        try:
            for change in self._tracker.observe(step, metrics):
                await self._emit(change, step, tally)
        except Exception:  # a warning must not end a job
            log.exception("learning_watch_failed", job=self._job_id, step=step)
        return self._tracker.warnings

    async def _emit(self, change: Change, step: int, tally: StepTally | None) -> None:
        finding = change.finding
        if not change.holds:
            text = f"no longer: {finding.seen} (a warning since step {change.since_step + 1})"
            await self._streams.emit_event("warning_cleared", name=finding.name, step=step, text=text)
            return
        shown = "" if tally is None else example(finding.name, tally.rollouts, self._data)
        text = f"{finding.text}. {shown}" if shown else finding.text
        await self._streams.emit_event("warning", name=finding.name, step=step, text=text)


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
