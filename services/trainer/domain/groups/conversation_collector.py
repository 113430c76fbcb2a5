"""From turns and answers to complete groups of conversations: the fold of one step with an environment.

Answers are in the same log as turns. So a step that is trained again from its log gets the same conversations, and its
groups in the same order: a group is complete with the answer that ends its last conversation.
"""

from __future__ import annotations

from collections.abc import Mapping

from rlboost.services.trainer.domain.groups.collector import DroppedGroup, GroupOutcome, StepCollector, WholeGroup
from rlboost.services.trainer.domain.groups.conversation import Conversation
from rlboost.services.trainer.domain.groups.turns import StepTurnIds
from rlboost.shared.errors import Unprocessable
from rlboost.shared.ids import SampleId, group_of
from rlboost.shared.messages import GroupOpened, Message, SampleDropped, SampleFinished, TurnAnswered


class ConversationCollector(StepCollector):
    """Collects one step's groups of conversations."""

    def __init__(self, job_no: int, step: int, sizes: Mapping[int, int], max_staleness: int, ids: StepTurnIds) -> None:
        """Expect `sizes[group id]` conversations of each group; `ids` are those of their turns."""
        super().__init__(job_no, step, sizes, max_staleness)
        self._ids = ids
        self._conversations: dict[int, Conversation] = {}
        self._unanswered: dict[int, Conversation] = {}
        self._prompts: dict[int, bytes] = {}
        """Open group -> digest of its prompt, as this trainer process computed it."""

    def expect(self, group: int, prompt_digest: bytes) -> None:
        """Set the digest that the `GroupOpened` of a group in the log must have."""
        self._prompts[group] = prompt_digest

    def take_unanswered(self) -> list[Conversation]:
        """Return the conversations whose last turn has no answer yet, each turn once."""
        unanswered, self._unanswered = list(self._unanswered.values()), {}
        return unanswered

    def fold(self, message: Message) -> GroupOutcome | None:
        """See `StepCollector.fold`."""
        match message:
            case SampleFinished():
                return self._add_turn(message)
            case SampleDropped():
                return super().fold(message.model_copy(update={"sample": self._turn_of(message.sample)[0]}))
            case GroupOpened():
                return self._open_group(message)
            case TurnAnswered():
                return self._add_answer(message)
            case _:
                return super().fold(message)

    def _turn_of(self, sample: int) -> tuple[int, int]:
        return self._ids.of(sample).turn_of(sample)

    def _add_turn(self, turn: SampleFinished) -> DroppedGroup | None:
        if self._is_late(turn.sample):
            return None
        sample, number = self._turn_of(turn.sample)
        conversation = self._conversations.get(sample) or Conversation(sample)
        self._check_requested(sample)
        if number < len(conversation.turns):
            self.duplicates += 1
            return None
        if number > len(conversation.answers):
            raise Unprocessable(f"received turn {number} of sample {SampleId.unpack(sample)}, which was not requested")
        if invalid := self._check(turn):
            return self._drop(group_of(sample), "generation", invalid)
        self._conversations[sample] = conversation
        conversation.turns.append(turn)
        if self.is_open(group_of(sample)):
            self._unanswered[turn.sample] = conversation
        return None

    def _open_group(self, message: GroupOpened) -> DroppedGroup | None:
        digest = self._prompts.pop(message.group, None)
        if digest is None:
            return None  # a repetition, or of an earlier step
        if message.reason:
            return self._drop(message.group, message.reason, message.detail)
        if message.prompt_digest != digest:
            detail = "after a restart of the trainer, reset returned another prompt than before"
            return self._drop(message.group, NONDETERMINISTIC, detail)
        return None

    def _add_answer(self, message: TurnAnswered) -> GroupOutcome | None:
        sample, number = self._turn_of(message.sample)
        conversation = self._conversations.get(sample)
        if conversation is None or number != len(conversation.answers):
            return None  # a repetition, or of an earlier step
        self._unanswered.pop(message.sample, None)
        conversation.answers.append(message)
        if message.reason:
            return self._drop(group_of(sample), message.reason, message.detail)
        if not message.over:
            return None
        outcome = super().fold(conversation.as_sample())
        if isinstance(outcome, WholeGroup):
            conversations = tuple(self._conversations[one.sample] for one in outcome.samples)
            return WholeGroup(outcome.group, outcome.samples, conversations)
        return outcome

    def _drop(self, group: int, reason: str, detail: str) -> DroppedGroup | None:
        self._unanswered = {turn: one for turn, one in self._unanswered.items() if group_of(one.sample) != group}
        return super()._drop(group, reason, detail)


NONDETERMINISTIC = "environment_nondeterministic"
"""The reason of a group whose environment, created again, behaves differently than before."""
