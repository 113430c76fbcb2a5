"""One sample's conversation: the model's turns, and the environment's answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

from rlboost.shared.messages import SampleFinished, TurnAnswered
from rlboost.shared.wire.columns import I32, U8, length, pack


@dataclass(slots=True)
class Conversation:
    """A conversation so far: turns and answers alternate, and their tokens never change."""

    sample: int
    """Its id, which is that of its first turn."""
    turns: list[SampleFinished] = field(default_factory=list)
    answers: list[TurnAnswered] = field(default_factory=list)

    @property
    def reward(self) -> float:
        """Return the sum of all rewards so far."""
        return sum(answer.reward for answer in self.answers)

    @property
    def completion(self) -> bytes:
        """Return everything after the prompt, an int32 column."""
        return b"".join(turn + observation for turn, observation in self._tokens())

    @property
    def loss_mask(self) -> bytes:
        """Return a uint8 column aligned with `completion`: 1 for the model's tokens, 0 for the environment's."""
        masks = ([1] * length(turn, I32) + [0] * length(observation, I32) for turn, observation in self._tokens())
        return b"".join(pack(mask, U8) for mask in masks)

    @property
    def n_observation_tokens(self) -> int:
        """Return how many tokens are the environment's."""
        return sum(length(observation, I32) for _, observation in self._tokens())

    def _tokens(self) -> list[tuple[bytes, bytes]]:
        turns = [turn.tokens for turn in self.turns]
        return list(zip_longest(turns, [answer.tokens for answer in self.answers], fillvalue=b""))

    def answer(
        self, observation: Sequence[int], reward: float, *, done: bool, max_tokens: int, max_turns: int
    ) -> TurnAnswered:
        """Return the message that answers the last turn, and that ends the conversation where a limit is reached.

        Args:
            observation: token ids between this turn and the next one.
            reward: the environment's reward for this turn.
            done: whether the environment ends the conversation.
            max_tokens: limit of everything after the prompt, the model's tokens and the environment's.
            max_turns: limit of the model's turns.

        """
        last = self.turns[-1]
        fits = length(self.completion, I32) + len(observation) < max_tokens
        if done:
            return TurnAnswered(sample=last.sample, reward=reward, over="done")
        # After a turn without a token the environment has nothing to answer.
        if last.finish == "length" or not last.tokens or len(self.turns) >= max_turns or not fits:
            return TurnAnswered(sample=last.sample, reward=reward, over="cut")
        return TurnAnswered(sample=last.sample, tokens=pack(observation, I32), reward=reward)

    def as_sample(self) -> SampleFinished:
        """Return the conversation as one sample, with the model's tokens only.

        It ended by itself only if the environment was done and the last turn was not cut.
        """
        experts = [turn.routed_experts for turn in self.turns if turn.tokens]
        return SampleFinished(
            sample=self.sample,
            tokens=b"".join(turn.tokens for turn in self.turns),
            logprobs=b"".join(turn.logprobs for turn in self.turns),
            finish="stop" if self.answers[-1].over == "done" and self.turns[-1].finish == "stop" else "length",
            spans=[span for turn in self.turns for span in turn.spans],
            attempts=max(turn.attempts for turn in self.turns),
            group_done=False,
            routed_experts=b"".join(experts) if all(experts) else b"",
        )


def completions_of(samples: Sequence[SampleFinished], conversations: Sequence[Conversation]) -> list[bytes]:
    """Return everything after the prompt of each sample, an int32 column each; `conversations` are theirs, if any."""
    return [one.completion for one in conversations] or [sample.tokens for sample in samples]
