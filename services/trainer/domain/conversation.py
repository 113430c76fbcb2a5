"""One sample's conversation: what the model said in its turns, and what the environment answered."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

from shared.columns import I32, U8, length, pack
from shared.messages import SampleFinished, TurnAnswered


@dataclass(slots=True)
class Talk:
    """A conversation so far. Turn and answer take turns; the tokens of both stay what they were."""

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
        """Return everything behind the prompt, an int32 column."""
        return b"".join(said + told for said, told in self._parts())

    @property
    def trained(self) -> bytes:
        """Return a uint8 column beside `completion`: 1 for a token of the model, 0 for one of the environment."""
        parts = ([1] * length(said, I32) + [0] * length(told, I32) for said, told in self._parts())
        return b"".join(pack(part, U8) for part in parts)

    @property
    def n_told(self) -> int:
        """Return how many tokens are the environment's."""
        return sum(length(told, I32) for _, told in self._parts())

    def _parts(self) -> list[tuple[bytes, bytes]]:
        said = [turn.tokens for turn in self.turns]
        return list(zip_longest(said, [answer.tokens for answer in self.answers], fillvalue=b""))

    def answered(
        self, told: Sequence[int], reward: float, *, done: bool, max_tokens: int, max_turns: int
    ) -> TurnAnswered:
        """Return what an answer to the last turn comes to.

        Args:
            told: the tokens that the next turn's prompt would have behind this turn.
            reward: what the environment gave.
            done: whether it has ended the conversation.
            max_tokens: how long everything behind the prompt may get, the model's tokens and the environment's.
            max_turns: how often the model may speak.

        """
        last = self.turns[-1]
        fits = length(self.completion, I32) + len(told) < max_tokens
        if done:
            return TurnAnswered(sample=last.sample, reward=reward, over="done")
        # A turn without a token says nothing: what followed it would be no answer.
        if last.finish == "length" or not last.tokens or len(self.turns) >= max_turns or not fits:
            return TurnAnswered(sample=last.sample, reward=reward, over="cut")
        return TurnAnswered(sample=last.sample, tokens=pack(told, I32), reward=reward)

    def whole(self) -> SampleFinished:
        """Return the conversation as one sample, of the model's own tokens."""
        return SampleFinished(
            sample=self.sample,
            tokens=b"".join(turn.tokens for turn in self.turns),
            logprobs=b"".join(turn.logprobs for turn in self.turns),
            finish="stop" if self.answers[-1].over == "done" else "length",
            spans=[span for turn in self.turns for span in turn.spans],
            attempts=max(turn.attempts for turn in self.turns),
            group_done=False,
        )
