"""From turns and answers to whole groups of conversations: the fold of one step where there is an environment.

What was answered is in the same log as what was said. So a step that is trained again from its log gets the same
conversations, and its groups in the same order: a group is whole with the answer that ends its last conversation.
"""

from __future__ import annotations

from collections.abc import Mapping

from services.trainer.domain.collector import DroppedGroup, Outcome, StepCollector, WholeGroup
from services.trainer.domain.conversation import Talk
from services.trainer.domain.turns import TurnIds
from shared.errors import Fatal
from shared.ids import SampleId, group_of
from shared.messages import GroupOpened, Message, SampleDropped, SampleFinished, TurnAnswered


class TalkCollector(StepCollector):
    """Collects one step's groups of conversations."""

    def __init__(
        self, job_no: int, step: int, sizes: Mapping[int, int], max_staleness: int, ids: Mapping[bool, TurnIds]
    ) -> None:
        """Expect `sizes[group id]` conversations of each group; `ids[True]` are those of evaluation groups."""
        super().__init__(job_no, step, sizes, max_staleness)
        self._ids = ids
        self._talks: dict[int, Talk] = {}
        self._unanswered: dict[int, Talk] = {}
        self._prompts: dict[int, bytes] = {}
        """Open group -> digest of what this trainer would have it begin with."""

    def expect(self, group: int, prompt_digest: bytes) -> None:
        """Note what a group begins with, to be compared with what it began with before."""
        self._prompts[group] = prompt_digest

    def take_unanswered(self) -> list[Talk]:
        """Return the conversations whose last turn no answer has followed yet, each turn once."""
        talks, self._unanswered = list(self._unanswered.values()), {}
        return talks

    def fold(self, message: Message) -> Outcome | None:
        """See `StepCollector.fold`."""
        match message:
            case SampleFinished():
                self._said(message)
                return None
            case SampleDropped():
                return super().fold(message.model_copy(update={"sample": self._turn_of(message.sample)[0]}))
            case GroupOpened():
                return self._opened(message)
            case TurnAnswered():
                return self._answered(message)
            case _:
                return super().fold(message)

    def _turn_of(self, sample: int) -> tuple[int, int]:
        return self._ids[SampleId.unpack(sample).is_eval].turn_of(sample)

    def _said(self, turn: SampleFinished) -> None:
        if self._is_late(turn.sample):
            return
        sample, number = self._turn_of(turn.sample)
        talk = self._talks.get(sample) or Talk(sample)
        self._expects(sample)
        if number < len(talk.turns):
            self.duplicates += 1
            return
        if number > len(talk.answers):
            raise Fatal(f"turn {number} of sample {SampleId.unpack(sample)} came, but nobody asked for it")
        self._check(turn)
        self._talks[sample] = talk
        talk.turns.append(turn)
        if self.is_open(group_of(sample)):
            self._unanswered[turn.sample] = talk

    def _opened(self, message: GroupOpened) -> DroppedGroup | None:
        digest = self._prompts.pop(message.group, None)
        if digest is None:
            return None  # a repetition, or of an earlier step
        if message.reason:
            return self._drop(message.group, message.reason, message.detail)
        if message.prompt_digest != digest:
            detail = "reset begins in another way than before the trainer was restarted"
            return self._drop(message.group, NOT_THE_SAME, detail)
        return None

    def _answered(self, message: TurnAnswered) -> Outcome | None:
        sample, number = self._turn_of(message.sample)
        talk = self._talks.get(sample)
        if talk is None or number != len(talk.answers):
            return None  # a repetition, or of an earlier step
        self._unanswered.pop(message.sample, None)
        talk.answers.append(message)
        if message.reason:
            return self._drop(group_of(sample), message.reason, message.detail)
        if not message.over:
            return None
        outcome = super().fold(talk.whole())
        if isinstance(outcome, WholeGroup):
            talks = tuple(self._talks[one.sample] for one in outcome.samples)
            return WholeGroup(outcome.group, outcome.samples, talks)
        return outcome

    def _drop(self, group: int, reason: str, detail: str) -> DroppedGroup | None:
        self._unanswered = {turn: talk for turn, talk in self._unanswered.items() if group_of(talk.sample) != group}
        return super()._drop(group, reason, detail)


NOT_THE_SAME = "environment_not_the_same"
"""The reason of a group whose environment, made anew, does not do what it did before."""
