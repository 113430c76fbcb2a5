"""From finished samples to complete groups: collects the `rollouts.finished` entries of one step.

Invariants: every sample counts once (1); every token is at most `max_staleness` weight versions old (4); a group is
complete, or dropped with a reason (6).

A step whose samples are conversations has a `ConversationCollector` in front of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rlboost.services.trainer.domain.groups.conversation import Conversation, completions_of
from rlboost.shared.errors import Fatal, Unprocessable
from rlboost.shared.ids import SampleId, group_of
from rlboost.shared.messages import EngineProfile, Message, SampleDropped, SampleFinished, SeedingEnded, SeedingReopened
from rlboost.shared.wire.columns import F32, I32, length


@dataclass(frozen=True, slots=True)
class WholeGroup:
    """Every sample of a group, in the order of their ids."""

    group: int
    samples: tuple[SampleFinished, ...]
    conversations: tuple[Conversation, ...] = ()
    """The conversation of each sample, if the job has an environment."""

    @property
    def completions(self) -> list[bytes]:
        """Return the completion of each sample; see `completions_of`."""
        return completions_of(self.samples, self.conversations)


@dataclass(frozen=True, slots=True)
class DroppedGroup:
    """A group without a score."""

    group: int
    reason: str
    """`generation`: a sample could not be generated; `stale`: a token is of a weight version that is too old;
    `environment_...`: see `EnvironmentFault`."""
    detail: str


GroupOutcome = WholeGroup | DroppedGroup


class StepCollector:
    """Collects one step's groups."""

    def __init__(self, job_no: int, step: int, sizes: Mapping[int, int], max_staleness: int = 0) -> None:
        """Expect `sizes[group id]` samples of each group.

        Args:
            job_no: number of the job.
            step: the step, which is also the weight version that it trains.
            sizes: group id -> number of samples.
            max_staleness: training groups may have tokens of versions from `step - max_staleness` on, evaluation groups
                of version `step` only. With 0, another version is an error; above 0, the group is dropped.

        """
        self._job_no = job_no
        self._step = step
        self._max_staleness = max_staleness
        self._open = dict(sizes)
        self._sizes = dict(sizes)
        self._arrived: dict[int, dict[int, SampleFinished]] = {group: {} for group in sizes}
        self._seen: set[int] = set()
        self._n_evaluation_samples = sum(n for group, n in sizes.items() if SampleId.unpack(group).is_eval)
        """Number of the step's samples that belong to its evaluation."""
        self._n_evaluation_arrived = 0
        """Number of these that arrived or were dropped."""
        self.trainer_has_device = False
        """True between the end of the step's seeding and its reopening."""
        self.engines: Sequence[EngineProfile] = ()
        """Throughput of the workers, as of the end of seeding."""
        self.duplicates = 0
        """Repeated samples, and samples of earlier steps."""

    def add(self, group: int, n: int) -> None:
        """Expect `n` samples of one more group."""
        self._open[group] = self._sizes[group] = n
        self._arrived[group] = {}

    @property
    def complete(self) -> bool:
        """Return True if every group is complete or dropped."""
        return not self._open

    @property
    def n_samples(self) -> int:
        """Return how many samples belong to the step."""
        return sum(self._sizes.values())

    @property
    def n_arrived(self) -> int:
        """Return how many samples of the step arrived or were dropped."""
        return len(self._seen)

    def arrived_text(self) -> str:
        """Return how many samples have arrived, for people."""
        text = f"{self.n_arrived:,} of {self.n_samples:,} samples have arrived"
        n_evaluation = self._n_evaluation_samples
        if 0 < n_evaluation < self.n_samples:
            text += f" ({self._n_evaluation_arrived:,} of {n_evaluation:,} for the evaluation)"
        return text

    def apply(self, message: Message) -> GroupOutcome | None:
        """Apply one message and return the group that it completes or drops, if any.

        A sample whose columns differ in length drops its group.

        Raises:
            Unprocessable: a sample that was not requested; nothing has changed.
            Fatal: with `max_staleness` 0, a token of another weight version.

        """
        match message:
            case SampleFinished():
                return self._finished(message) if self._is_new(message.sample) else None
            case SampleDropped(sample=sample, reason=reason):
                return self.drop(group_of(sample), "generation", reason) if self._is_new(sample) else None
            case SeedingEnded(step=self._step, engines=engines):
                self.trainer_has_device = True
                self.engines = engines
            case SeedingReopened(step=self._step):
                self.trainer_has_device = False
            case _:
                pass
        return None

    def is_open(self, group: int) -> bool:
        """Return True if a group is neither complete nor dropped."""
        return group in self._open

    def drop(self, group: int, reason: str, detail: str) -> DroppedGroup | None:
        """Drop a group and return it, None if it is not open any more; for the reasons see `DroppedGroup`."""
        if group not in self._open:
            return None
        del self._open[group], self._arrived[group]
        return DroppedGroup(group, reason, detail)

    def is_late(self, sample: int) -> bool:
        """Return True if a sample is of an earlier step."""
        sample_id = SampleId.unpack(sample)
        return sample_id.job == self._job_no and sample_id.step < self._step

    def check_requested(self, sample: int) -> None:
        """Check that a sample belongs to a group of the step.

        Raises:
            Unprocessable: it does not.

        """
        sample_id = SampleId.unpack(sample)
        if sample_id.member >= self._sizes.get(group_of(sample), 0):
            raise Unprocessable(
                f"received sample {sample_id}, which was not requested by step {self._step} of job {self._job_no}"
            )

    def error_of(self, sample: SampleFinished) -> str:
        """Return an error text if a sample's columns differ in length, otherwise "".

        Raises:
            Fatal: with `max_staleness` 0, a token of another weight version.

        """
        name = SampleId.unpack(sample.sample)
        n_tokens = length(sample.tokens, I32)
        spanned = sum(n for _, _, n in sample.spans)
        if spanned != n_tokens or length(sample.logprobs, F32) != n_tokens:
            n_logprobs = length(sample.logprobs, F32)
            return f"sample {name} has {n_tokens} tokens, {n_logprobs} logprobs and spans over {spanned}"
        if self._max_staleness == 0 and (stale := self._staleness(sample)):
            raise Fatal(stale)
        return ""

    def _is_new(self, sample: int) -> bool:
        late = self.is_late(sample)
        if not late:
            self.check_requested(sample)
        if late or sample in self._seen:
            self.duplicates += 1
            return False
        self._seen.add(sample)
        self._n_evaluation_arrived += SampleId.unpack(sample).is_eval
        return True

    def _finished(self, sample: SampleFinished) -> GroupOutcome | None:
        group = group_of(sample.sample)
        if invalid := self.error_of(sample):
            return self.drop(group, "generation", invalid)
        if group not in self._open:
            return None
        arrived = self._arrived[group]
        arrived[sample.sample] = sample
        if len(arrived) < self._sizes[group]:
            return None
        del self._open[group], self._arrived[group]
        samples = tuple(arrived[i] for i in sorted(arrived))
        # Not before the group is complete: a dropped group would get further samples.
        stale = next((name for name in map(self._staleness, samples) if name), None)
        return DroppedGroup(group, "stale", stale) if stale else WholeGroup(group, samples)

    def _staleness(self, sample: SampleFinished) -> str:
        """Return an error text if a sample has tokens of a weight version that is not allowed, otherwise ""."""
        name = SampleId.unpack(sample.sample)
        oldest = self._step - (0 if name.is_eval else self._max_staleness)
        versions = sorted({version for _, version, n_tokens in sample.spans if n_tokens})
        if not versions or (oldest <= versions[0] and versions[-1] <= self._step):
            return ""
        allowed = f"{max(0, oldest)} to {self._step} are" if oldest < self._step else f"{self._step} is"
        return f"sample {name} has tokens of weight versions {versions}; only {allowed} allowed"
