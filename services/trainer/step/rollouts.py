"""How the samples of one step's groups are generated: in a single turn, or in conversations with an environment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from rlboost.services.trainer.domain.groups.collector import GroupOutcome, StepCollector
from rlboost.services.trainer.domain.plan import PlannedGroup
from rlboost.services.trainer.step.context import JobContext
from rlboost.shared.messages import GroupRequested, Message, Sampling


class Rollouts(Protocol):
    """The rollouts of one step: `SingleTurn`, or `MultiTurn` if the job has an environment."""

    @property
    def groups(self) -> StepCollector:
        """The step's groups, and which of their samples are complete."""

    @property
    def prompts(self) -> Mapping[int, bytes]:
        """Started group -> its prompt, an int32 column."""

    def add(self, group: PlannedGroup) -> None:
        """Add a replacement group."""

    async def start(self, groups: Sequence[PlannedGroup]) -> list[GroupRequested]:
        """Start groups of the step; return the requests of those that can start. The other ones are dropped by the log.

        Raises:
            Fatal: the environments took too long.

        """

    def check_started(self) -> None:
        """Check that a group has started, once all groups were tried.

        Raises:
            Fatal: none could start.

        """

    def apply(self, message: Message) -> GroupOutcome | None:
        """Apply one message of the log; see `StepCollector.apply`."""

    def answer_turns(self) -> None:
        """Have environments answer the complete turns that have no answer in the log."""

    def release(self, group: int) -> None:
        """Discard what a dropped group still uses."""


class SingleTurn:
    """Rollouts without an environment: each sample is one completion of its data row's prompt."""

    def __init__(self, job: JobContext, step: int, planned: Sequence[PlannedGroup]) -> None:
        """Start no group yet; `planned` are the groups of `step`."""
        self.groups = collector_of(job, step, planned)
        self._job = job
        self._step = step
        self.prompts: dict[int, bytes] = {}

    def add(self, group: PlannedGroup) -> None:
        """See `Rollouts.add`."""
        self.groups.add(group.id, group.n)

    async def start(self, groups: Sequence[PlannedGroup]) -> list[GroupRequested]:
        """Return the request of each group."""
        self.prompts.update({group.id: self._job.prompt(group).tokens for group in groups})
        return [request_of(self._job, self._step, group, self.prompts[group.id]) for group in groups]

    def check_started(self) -> None:
        """Do nothing: every group starts."""

    def apply(self, message: Message) -> GroupOutcome | None:
        """See `StepCollector.apply`."""
        return self.groups.apply(message)

    def answer_turns(self) -> None:
        """Do nothing: there are no turns."""

    def release(self, group: int) -> None:
        """Do nothing: a group uses no resources."""


def collector_of(job: JobContext, step: int, planned: Sequence[PlannedGroup]) -> StepCollector:
    """Return the collector of a step's groups."""
    return StepCollector(job.no, step, {group.id: group.n for group in planned}, job.spec.elastic.max_staleness)


def request_of(job: JobContext, step: int, group: PlannedGroup, prompt: bytes) -> GroupRequested:
    """Return the request of a group whose prompt is an int32 column."""
    spec, resources = job.spec, job.resources
    return GroupRequested(
        job_id=job.id,
        group=group.id,
        n=group.n,
        prompt=prompt,
        sampling=Sampling(
            temperature=spec.sampling.temperature,
            top_p=spec.sampling.top_p,
            max_tokens=spec.sampling.max_tokens,
            stop_token_ids=resources.data.stop_token_ids,
            routed_experts=() if group.is_eval else tuple(resources.replayed or ()),
        ),
        version=step,
        seed=group.seed,
        max_staleness=0 if group.is_eval else spec.elastic.max_staleness,
        vocab_size=resources.data.vocab_size,
    )
