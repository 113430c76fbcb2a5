"""From turns and answers to complete groups of the step that they are of, and these after scoring."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlboost.services.trainer.domain.advantages import total
from rlboost.services.trainer.domain.conversations import Conversation, Interval, Row, StepTurnIds, completions_of
from rlboost.shared.errors import Fatal, Unprocessable
from rlboost.shared.ids import SampleId, group_of
from rlboost.shared.job.fleet import HeldOutSet
from rlboost.shared.messages import (
    EngineProfile,
    GroupOpened,
    Message,
    SampleDropped,
    SampleFinished,
    SeedingEnded,
    SeedingReopened,
    SessionEnded,
    SessionRewarded,
    TurnAnswered,
    TurnOpened,
)
from rlboost.shared.streams.bus import Entry, position
from rlboost.shared.wire import F32, I32, length

# --- A complete group after its rewards are computed ------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ScoredGroup:
    """A complete group with a reward for each sample."""

    group: int
    """Its id."""
    samples: tuple[SampleFinished, ...]
    rewards: tuple[float, ...]
    parts: Mapping[str, Sequence[float | None]] = field(default_factory=dict)
    """Reward function -> its reward per sample, if there are several; None where it does not apply."""
    conversations: tuple[Conversation, ...] = ()
    """The conversation of each sample, if the job has an environment."""
    prompt: bytes = b""
    """int32 column of token ids, of all samples."""
    penalties: tuple[float, ...] = ()
    """The length penalty of each sample; empty if the job has none."""
    row: int = 0
    """Index of its prompt in the training or the evaluation data."""
    held_out: HeldOutSet | None = None
    """The set that it evaluates; None for a training group."""
    images: Sequence[str] = ()
    """Digests of the images of its prompt."""
    costs: tuple[float, ...] = ()
    """The cost of each sample; empty if none has any."""
    cost_coef: float = 0.0
    """`algorithm.cost_coef`."""
    taught: Mapping[tuple[bytes, bytes], bytes] = field(default_factory=dict)
    """(Prompt, completion) of each row -> float32 column: log-probabilities of a teacher that workers serve."""

    @property
    def shaped_rewards(self) -> list[float]:
        """Return the rewards minus penalties for length and cost, which are trained."""
        none = (0.0,) * len(self.rewards)
        columns = zip(self.rewards, self.penalties or none, self.cost_penalties or none, strict=True)
        return [total((reward, -length, -cost)) for reward, length, cost in columns]

    @property
    def cost_penalties(self) -> tuple[float, ...]:
        """Return what the cost takes off each reward; empty if the job's costs are only logged."""
        return tuple(self.cost_coef * cost for cost in self.costs) if self.cost_coef else ()

    @property
    def has_row_rewards(self) -> bool:
        """Return True if an agent has rewarded answers of its own, so that the group's rows are compared."""
        return any(conversation.rewards for conversation in self.conversations)

    @property
    def compared_rewards(self) -> list[float]:
        """Return the rewards that advantages follow from: of each sample, or of each row if it `has_row_rewards`."""
        shaped = self.shaped_rewards
        if not self.has_row_rewards:
            return shaped
        pairs = zip(self.conversations, shaped, strict=True)
        return [reward for conversation, whole in pairs for reward in conversation.row_rewards(whole)]

    @property
    def completions(self) -> list[bytes]:
        """Return the completion of each sample; see `completions_of`."""
        return completions_of(self.samples, self.conversations)


def recorded(group: ScoredGroup) -> dict[str, Any]:
    """Return a group as it is in the run's record; docs/run-log.md describes it."""
    name, talks = SampleId.unpack(group.group), group.conversations
    scores = {"reward": group.rewards, **{f"reward/{part}": values for part, values in group.parts.items()}}
    if group.costs:
        scores["cost"] = group.costs
    samples, shaped = [], group.shaped_rewards
    for i, sample in enumerate(group.samples):
        rows = talks[i].rows(group.prompt) if talks else [Row(group.prompt, sample.tokens, b"", sample.logprobs)]
        sequences = [row._replace(prompt=b"") if row.prompt == group.prompt else row for row in rows]
        spans = talks[i].spans if talks else sample.spans
        values = {score: of_samples[i] for score, of_samples in scores.items()}
        own = {"rewards_of_rows": talks[i].row_rewards(shaped[i])} if group.has_row_rewards else {}
        samples.append({**values, **own, "finish": sample.finish, "spans": spans, "sequences": sequences})
    number = f"{'e' if name.is_eval else ''}{name.group}"
    return {"group": number, "row": group.row, "prompt": group.prompt, "samples": samples}


# --- From the entries of `rollouts.finished` to complete groups -------------------------------------------------------
# Invariants: every sample counts once (1); every token is at most `max_staleness` weight versions old (4); a group is
# complete, or dropped with a reason (6).
#
# A sample is a conversation. Without an environment it ends with its first turn. With one, answers are in the same log
# as turns, so a step that is trained again from its log gets the same conversations, and its groups in the same order:
# a group is complete with the answer that ends its last conversation.
#
# A conversation that a fault ends is lost. Another one begins in its place, up to a number for each group, with ids
# that the answer with the fault names. After that, the group is complete without it, while enough others are left: a
# lost sample is in no mean and no deviation.


NONDETERMINISTIC = "environment_nondeterministic"
"""The reason of a group whose environment, created again, behaves differently than before."""


@dataclass(frozen=True, slots=True)
class WholeGroup:
    """Every sample of a group that was not lost, in the order of their ids."""

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

    def __init__(
        self,
        job_no: int,
        step: int,
        sizes: Mapping[int, int],
        max_staleness: int = 0,
        turns: StepTurnIds | None = None,
        min_group_size: int | None = None,
    ) -> None:
        """Expect `sizes[group id]` samples of each group.

        Args:
            job_no: number of the job.
            step: the step, which is also the weight version that it trains.
            sizes: group id -> number of samples.
            max_staleness: training groups may have tokens of versions from `step - max_staleness` on, evaluation groups
                of version `step` only. With 0, another version is an error; above 0, the group is dropped.
            turns: ids of the turns that an environment answers; None: a sample is complete with its first turn.
            min_group_size: a training group with fewer samples left is dropped, and an evaluation group without any;
                None: a group without all of them.

        """
        self._min_group_size = min_group_size
        self._lost: dict[int, set[int]] = {}
        """Group -> its samples that are not generated again."""
        self._replacements: dict[int, dict[int, int]] = {}
        """Group -> first turn of each conversation that replaces a lost one -> its sample; 0 if it has not begun."""
        self.lost: Counter[str] = Counter()
        """Reason -> conversations that a fault ended, begun again or not."""
        self.n_begun_again = 0
        """How many of them were begun again."""
        self._turns = turns
        self._conversations: dict[int, Conversation] = {}
        self._unanswered: dict[int, Conversation] = {}
        """Turn -> its conversation."""
        self._prompts: dict[int, bytes] = {}
        """Open group -> digest of its prompt, as this trainer process computed it."""
        self._job_no = job_no
        self._step = step
        self._max_staleness = max_staleness
        self._open = dict(sizes)
        self._sizes = dict(sizes)
        self._arrived: dict[int, dict[int, SampleFinished]] = {group: {} for group in sizes}
        self._seen: set[int] = set()
        self._newly_arrived: list[SampleFinished] = []
        self._n_evaluation_samples = sum(n for group, n in sizes.items() if SampleId.unpack(group).is_eval)
        """Number of the step's samples that belong to its evaluation."""
        self._n_evaluation_arrived = 0
        """Number of these that arrived or were dropped."""
        self.trainer_has_device = False
        """True between the end of the step's seeding and its reopening."""
        self.engines: Sequence[EngineProfile] = ()
        """Throughput of the workers, as of the end of seeding."""
        self.n_whole = 0
        """Number of complete groups."""
        self.drops: list[DroppedGroup] = []
        self.duplicates = 0
        """Repeated samples, and samples of earlier steps."""
        self._now = 0.0
        """When the message that is applied was written, in Unix seconds."""

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

    def expect(self, group: int, prompt_digest: bytes) -> None:
        """Set the digest that the `GroupOpened` of a group in the log must have."""
        self._prompts[group] = prompt_digest

    def take_unanswered(self) -> list[Conversation]:
        """Return the conversations whose last turn has no answer yet, each turn once."""
        unanswered, self._unanswered = list(self._unanswered.values()), {}
        return unanswered

    def take_arrived(self) -> list[tuple[SampleFinished, Conversation | None]]:
        """Return the whole samples, with their conversations if there are any, since the last call."""
        arrived, self._newly_arrived = self._newly_arrived, []
        return [(one, self._conversations.get(one.sample)) for one in arrived]

    def apply(self, message: Message, at: float = 0.0) -> GroupOutcome | None:
        """Apply one message, written at `at` in Unix seconds; return the group that it completes or drops, if any.

        A turn whose columns differ in length drops its group.

        Raises:
            Unprocessable: a turn that was not requested; nothing has changed.
            Fatal: with `max_staleness` 0, a token of another weight version.

        """
        self._now = at
        match message:
            case SampleFinished():
                return self._add_sample(message) if self._turns is None else self._add_turn(message)
            case SampleDropped(sample=turn, reason=reason):
                sample, first, _ = self._turn_of(turn)
                conversation = self._conversations.get(sample)
                is_replaced = conversation is not None and conversation.first != first
                return None if is_replaced else self._lose(sample, "generation", reason)
            case GroupOpened():
                return self._open_group(message)
            case TurnAnswered():
                return self._add_answer(message)
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
        self._unanswered = {turn: one for turn, one in self._unanswered.items() if group_of(one.sample) != group}
        self.drops.append(DroppedGroup(group, reason, detail))
        return self.drops[-1]

    def conversations(self, group: int) -> list[Conversation]:
        """Return the conversations of a group that have a turn."""
        members = range(group, group + self._sizes[group])
        return [self._conversations[sample] for sample in members if sample in self._conversations]

    def reserve_replacement(self, sample: int) -> int | None:
        """Return the first turn's id of a conversation that begins in a sample's place, None if its group has none."""
        group, ids = group_of(sample), None if self._turns is None else self._turns.of(sample)
        reserved = self._replacements.setdefault(group, {})
        free = (ids.replacement(group, index) for index in range(ids.replacements)) if ids else iter(())
        first = next((first for first in free if first not in reserved), None)
        if first is not None:
            reserved[first] = 0
        return first

    def _lose(self, sample: int, reason: str, detail: str) -> GroupOutcome | None:
        """Continue a group without a sample, if enough are left; once for each sample."""
        if not self._is_new(sample):
            return None
        group = group_of(sample)
        lost = self._lost.setdefault(group, set())
        lost.add(sample)
        is_eval = SampleId.unpack(group).is_eval
        least = self._sizes[group] if self._min_group_size is None else 1 if is_eval else self._min_group_size
        if self._sizes[group] - len(lost) < least:
            return self.drop(group, reason, detail)
        return self._completed(group)

    def _turn_of(self, turn: int) -> tuple[int, int, int]:
        """Return the sample that a turn belongs to, the first turn of its conversation, and the turn's number."""
        if self._turns is None:
            return turn, turn, 0
        ids = self._turns.of(turn)
        first, number = ids.turn_of(turn)
        sample = self._replacements.get(ids.group_of(first), {}).get(first) or first
        return sample, first, number

    def _is_late(self, sample: int) -> bool:
        sample_id = SampleId.unpack(sample)
        return sample_id.job == self._job_no and sample_id.step < self._step

    def _check_requested(self, sample: int) -> None:
        sample_id = SampleId.unpack(sample)
        if sample_id.member >= self._sizes.get(group_of(sample), 0):
            raise Unprocessable(
                f"received sample {sample_id}, which was not requested by step {self._step} of job {self._job_no}"
            )

    def _is_new(self, sample: int) -> bool:
        late = self._is_late(sample)
        if not late:
            self._check_requested(sample)
        if late or sample in self._seen:
            self.duplicates += 1
            return False
        self._seen.add(sample)
        self._n_evaluation_arrived += SampleId.unpack(sample).is_eval
        return True

    def _error_of(self, turn: SampleFinished) -> str:
        """Return an error text if a turn's columns differ in length, otherwise ""."""
        name = SampleId.unpack(turn.sample)
        n_tokens = length(turn.tokens, I32)
        spanned = sum(n for _, _, n in turn.spans)
        if spanned != n_tokens or length(turn.logprobs, F32) != n_tokens:
            n_logprobs = length(turn.logprobs, F32)
            return f"sample {name} has {n_tokens} tokens, {n_logprobs} logprobs and spans over {spanned}"
        if self._max_staleness == 0 and (stale := self._staleness(turn)):
            raise Fatal(stale)
        return ""

    def _staleness(self, sample: SampleFinished) -> str:
        """Return an error text if a sample has tokens of a weight version that is not allowed, otherwise ""."""
        name = SampleId.unpack(sample.sample)
        oldest = self._step - (0 if name.is_eval else self._max_staleness)
        versions = sorted({version for _, version, n_tokens in sample.spans if n_tokens})
        if not versions or (oldest <= versions[0] and versions[-1] <= self._step):
            return ""
        allowed = f"{max(0, oldest)} to {self._step} are" if oldest < self._step else f"{self._step} is"
        return f"sample {name} has tokens of weight versions {versions}; only {allowed} allowed"

    def _add_sample(self, sample: SampleFinished) -> GroupOutcome | None:
        """Add a whole sample to its group."""
        group = group_of(sample.sample)
        if not self._is_new(sample.sample):
            return None
        if invalid := self._error_of(sample):
            return self.drop(group, "generation", invalid)
        if group not in self._open:
            return None
        self._arrived[group][sample.sample] = sample
        self._newly_arrived.append(sample)
        return self._completed(group)

    def _completed(self, group: int) -> GroupOutcome | None:
        """Return a group that is complete, None if it is not."""
        if group not in self._open or len(self._arrived[group]) + len(self._lost.get(group, ())) < self._sizes[group]:
            return None
        arrived = self._arrived[group]
        del self._open[group], self._arrived[group]
        samples = tuple(arrived[i] for i in sorted(arrived))
        # Not before the group is complete: a dropped group would get further samples.
        if stale := next((text for text in map(self._staleness, samples) if text), None):
            return DroppedGroup(group, "stale", stale)
        conversations = () if self._turns is None else tuple(self._conversations[one.sample] for one in samples)
        self.n_whole += 1
        return WholeGroup(group, samples, conversations)

    def _add_turn(self, turn: SampleFinished) -> DroppedGroup | None:
        if self._is_late(turn.sample):
            self.duplicates += 1
            return None
        sample, first, number = self._turn_of(turn.sample)
        conversation = self._conversations.get(sample) or Conversation(sample, first=first)
        self._check_requested(sample)
        if conversation.first != first or number < len(conversation.turns):
            self.duplicates += 1
            return None
        if number > len(conversation.answers):
            raise Unprocessable(f"received turn {number} of sample {SampleId.unpack(sample)}, which was not requested")
        if invalid := self._error_of(turn):
            return self.drop(group_of(sample), "generation", invalid)
        self._conversations[sample] = conversation
        asked_at = conversation.lifetime.end if conversation.turns else self._now
        conversation.turns.append(turn)
        conversation.generation.append(Interval(asked_at, self._now))
        conversation.lifetime = Interval(conversation.generation[0].start, self._now)
        if self.is_open(group_of(sample)):
            self._unanswered[turn.sample] = conversation
        return None

    def _open_group(self, message: GroupOpened) -> DroppedGroup | None:
        digest = self._prompts.pop(message.group, None)
        if digest is None:
            return None  # a repetition, or of an earlier step
        if message.reason:
            return self.drop(message.group, message.reason, message.detail)
        if message.prompt_digest != digest:
            detail = "after a restart of the trainer, reset returned another prompt than before"
            return self.drop(message.group, NONDETERMINISTIC, detail)
        return None

    def _add_answer(self, message: TurnAnswered) -> GroupOutcome | None:
        sample, first, number = self._turn_of(message.sample)
        conversation = self._conversations.get(sample)
        if conversation is None or conversation.first != first or number != len(conversation.answers):
            return None  # a repetition, or of an earlier step
        self._unanswered.pop(message.sample, None)
        conversation.answers.append(message)
        conversation.lifetime = conversation.lifetime._replace(end=self._now)
        if not message.reason:
            return self._add_sample(conversation.as_sample()) if message.over else None
        self.lost[message.reason] += 1
        if message.replaced_by:
            self.n_begun_again += 1
            self._replacements.setdefault(group_of(sample), {})[message.replaced_by] = sample
            self._conversations[sample] = Conversation(sample, first=message.replaced_by)
            return None
        return self._lose(sample, message.reason, message.detail)


# --- The open steps: the one being trained, and those whose groups are requested ahead of it -------------------------
# `rollouts.finished` has one order for all steps. That order alone determines which groups a step gets and in which
# order, so a step that is trained again from the stream gets the same.


class OpenSteps:
    """Routes each entry to the collector of its step, and tracks the position that open steps must be read from."""

    def __init__(self, read_until: str) -> None:
        """Start without a step; an earlier process has counted late samples up to `read_until`."""
        self._read_until = position(read_until)
        self._open: dict[int, StepCollector] = {}
        self._first_position: dict[int, str] = {}
        """Step -> position before its first entry, in the order of these positions."""
        self._current = 0

    def open(self, step: int, collector: StepCollector) -> None:
        """Route entries of `step` to `collector` from now on."""
        self._open[step] = collector

    def enter(self, step: int) -> None:
        """Set the open step that is being trained, and close the steps before it."""
        self._current = step
        for done in [number for number in self._open if number < step]:
            del self._open[done]
            self._first_position.pop(done, None)

    def holds(self, message: Message) -> bool:
        """Return True if a message is of an open step or an earlier one; False if its step is not requested yet."""
        step = _step_of(message)
        return step is None or step <= max(self._open)

    def apply(self, before: str, entry: Entry) -> tuple[int, GroupOutcome] | None:
        """Apply the next entry; `before` is the position of the entry before it.

        Returns:
            The step and the outcome of the group that the entry completes or drops, if any.

        Raises:
            Unprocessable, Fatal: see `StepCollector.apply`; a sample of a step that is not open was not requested.

        """
        step = _step_of(entry.message)
        if step in self._open:
            self._first_position.setdefault(step, before)
        else:
            if step is not None and step < self._current and position(entry.id) <= self._read_until:
                return None
            step = self._current  # its collector counts late samples, and rejects unrequested ones
        outcome = self._open[step].apply(entry.message, position(entry.id)[0] / 1e3)
        return None if outcome is None else (step, outcome)

    def needed_from(self, cursor: str) -> str:
        """Return the position before the first entry that an open step needs, `cursor` if there is none yet."""
        return next(iter(self._first_position.values()), cursor)


def _step_of(message: Message) -> int | None:
    match message:
        case SampleFinished() | SampleDropped() | TurnAnswered() | TurnOpened():
            return SampleId.unpack(message.sample).step
        case SessionEnded() | SessionRewarded():
            return SampleId.unpack(message.session).step
        case GroupOpened():
            return SampleId.unpack(message.group).step
        case SeedingEnded() | SeedingReopened():
            return message.step
        case _:
            return None
