"""From turns and answers to complete groups of conversations: collects those of one step with an environment.

Answers are in the same log as turns. So a step that is trained again from its log gets the same conversations, and its
groups in the same order: a group is complete with the answer that ends its last conversation.
"""

from __future__ import annotations

from rlboost.services.trainer.domain.groups.collector import DroppedGroup, GroupOutcome, StepCollector, WholeGroup
from rlboost.services.trainer.domain.groups.conversation import Conversation
from rlboost.services.trainer.domain.groups.turns import StepTurnIds
from rlboost.shared.errors import Unprocessable
from rlboost.shared.ids import SampleId, group_of
from rlboost.shared.messages import GroupOpened, Message, SampleDropped, SampleFinished, TurnAnswered

NONDETERMINISTIC = "environment_nondeterministic"
"""The reason of a group whose environment, created again, behaves differently than before."""


class ConversationCollector:
    """Collects one step's conversations, and passes each complete one to the step's groups as one sample."""

    def __init__(self, groups: StepCollector, ids: StepTurnIds) -> None:
        """Collect the conversations of `groups`; `ids` are those of their turns."""
        self.groups = groups
        self._ids = ids
        self._conversations: dict[int, Conversation] = {}
        self._unanswered: dict[int, Conversation] = {}
        """Turn -> its conversation."""
        self._prompts: dict[int, bytes] = {}
        """Open group -> digest of its prompt, as this trainer process computed it."""

    def expect(self, group: int, prompt_digest: bytes) -> None:
        """Set the digest that the `GroupOpened` of a group in the log must have."""
        self._prompts[group] = prompt_digest

    def take_unanswered(self) -> list[Conversation]:
        """Return the conversations whose last turn has no answer yet, each turn once."""
        unanswered, self._unanswered = list(self._unanswered.values()), {}
        return unanswered

    def apply(self, message: Message) -> GroupOutcome | None:
        """Apply one message and return the group that it completes or drops, if any.

        Raises:
            Unprocessable: a turn that was not requested; nothing has changed.
            Fatal: see `StepCollector.apply`.

        """
        outcome = self._fold(message)
        if isinstance(outcome, DroppedGroup):
            dropped = outcome.group
            self._unanswered = {turn: one for turn, one in self._unanswered.items() if group_of(one.sample) != dropped}
        return outcome

    def _fold(self, message: Message) -> GroupOutcome | None:
        match message:
            case SampleFinished():
                return self._add_turn(message)
            case SampleDropped():
                return self.groups.apply(message.model_copy(update={"sample": self._turn_of(message.sample)[0]}))
            case GroupOpened():
                return self._open_group(message)
            case TurnAnswered():
                return self._add_answer(message)
            case _:
                return self.groups.apply(message)

    def _turn_of(self, sample: int) -> tuple[int, int]:
        return self._ids.of(sample).turn_of(sample)

    def _add_turn(self, turn: SampleFinished) -> DroppedGroup | None:
        if self.groups.is_late(turn.sample):
            self.groups.duplicates += 1
            return None
        sample, number = self._turn_of(turn.sample)
        conversation = self._conversations.get(sample) or Conversation(sample)
        self.groups.check_requested(sample)
        if number < len(conversation.turns):
            self.groups.duplicates += 1
            return None
        if number > len(conversation.answers):
            raise Unprocessable(f"received turn {number} of sample {SampleId.unpack(sample)}, which was not requested")
        if invalid := self.groups.error_of(turn):
            return self.groups.drop(group_of(sample), "generation", invalid)
        self._conversations[sample] = conversation
        conversation.turns.append(turn)
        if self.groups.is_open(group_of(sample)):
            self._unanswered[turn.sample] = conversation
        return None

    def _open_group(self, message: GroupOpened) -> DroppedGroup | None:
        digest = self._prompts.pop(message.group, None)
        if digest is None:
            return None  # a repetition, or of an earlier step
        if message.reason:
            return self.groups.drop(message.group, message.reason, message.detail)
        if message.prompt_digest != digest:
            detail = "after a restart of the trainer, reset returned another prompt than before"
            return self.groups.drop(message.group, NONDETERMINISTIC, detail)
        return None

    def _add_answer(self, message: TurnAnswered) -> GroupOutcome | None:
        sample, number = self._turn_of(message.sample)
        conversation = self._conversations.get(sample)
        if conversation is None or number != len(conversation.answers):
            return None  # a repetition, or of an earlier step
        self._unanswered.pop(message.sample, None)
        conversation.answers.append(message)
        if message.reason:
            return self.groups.drop(group_of(sample), message.reason, message.detail)
        if not message.over:
            return None
        outcome = self.groups.apply(conversation.as_sample())
        if isinstance(outcome, WholeGroup):
            conversations = tuple(self._conversations[one.sample] for one in outcome.samples)
            return WholeGroup(outcome.group, outcome.samples, conversations)
        return outcome
