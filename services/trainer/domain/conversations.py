"""Samples of several turns: the model's turns and the environment's answers, their ids, and their text for people."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any, NamedTuple, Protocol

from rlboost.services.trainer.domain.advantages import total
from rlboost.shared.errors import Unprocessable
from rlboost.shared.ids import SampleId
from rlboost.shared.messages import SampleFinished, TurnAnswered
from rlboost.shared.model.tool_calls import HERMES, Call, CallStyle, opens_thought, read_calls
from rlboost.shared.wire import I32, U8, ints, length, pack

# --- The ids under which the turns of conversations are generated -----------------------------------------------------
# A sample's first turn has the sample's own id, and is requested with its group, which shares the prompt. Each later
# turn is a group of one, numbered after the step's groups. So are all turns of a conversation that begins again in
# place of one that a fault ended; these numbers come last. Ids are derived, never random, so a restarted trainer
# requests the same turns.


@dataclass(frozen=True, slots=True)
class TurnIds:
    """The ids of one step's turns, of its training groups or of its evaluation groups."""

    n_groups: int
    group_size: int
    """Size of the largest group."""
    max_turns: int
    replacements: int = 0
    """Conversations of each group that may begin again."""

    @property
    def n_numbers(self) -> int:
        """Return the number of group numbers, which must fit into an id."""
        return self._first_replacement + self.n_groups * self.replacements * self.max_turns

    @property
    def _first_replacement(self) -> int:
        return self.n_groups * (1 + (self.max_turns - 1) * self.group_size)

    def replacement(self, group: int, index: int) -> int:
        """Return the packed id of the first turn of a group's replacement, counted from 0."""
        first = SampleId.unpack(group)
        return first._replace(group=self._first_replacement + index * self.n_groups + first.group, member=0).pack()

    def group_of(self, first: int) -> int:
        """Return the packed id of the group of the conversation whose first turn has the id `first`."""
        found = SampleId.unpack(first)
        number = (found.group - self._first_replacement) % self.n_groups
        return found._replace(group=number if found.group >= self.n_groups else found.group, member=0).pack()

    def id_of(self, first: int, turn: int) -> int:
        """Return the packed id of a turn of the conversation whose first turn, number 0, has the id `first`."""
        if turn == 0:
            return first
        number, stride = self.later_turns(first)
        return SampleId.unpack(first)._replace(group=number + (turn - 1) * stride, member=0).pack()

    def later_turns(self, first: int) -> tuple[int, int]:
        """Return the group number of turn 1 of a conversation, and the distance to that of the next one."""
        found = SampleId.unpack(first)
        if found.group >= self._first_replacement:
            stride = self.replacements * self.n_groups
            return found.group + stride, stride
        return self.n_groups + found.group * self.group_size + found.member, self.n_groups * self.group_size

    def turn_of(self, packed: int) -> tuple[int, int]:
        """Invert `id_of`: return the id of the conversation's first turn, and the number of the turn."""
        found = SampleId.unpack(packed)
        if found.group < self.n_groups:
            return packed, 0
        if (number := found.group - self._first_replacement) >= 0:
            turn, number = divmod(number, max(1, self.replacements * self.n_groups))
            return found._replace(group=self._first_replacement + number).pack(), turn
        index, member = divmod(found.group - self.n_groups, self.group_size)
        turn, group = divmod(index, self.n_groups)
        return found._replace(group=group, member=member).pack(), turn + 1


class StepTurnIds(NamedTuple):
    """The ids of all turns of one step."""

    training: TurnIds | None
    """None if the job trains on no generated groups."""
    evaluation: TurnIds | None
    """None if the job does not evaluate."""

    def of(self, packed: int) -> TurnIds:
        """Return the ids of the kind of group that a sample or turn belongs to.

        Raises:
            Unprocessable: the job has no groups of this kind.

        """
        sample = SampleId.unpack(packed)
        ids = self.evaluation if sample.is_eval else self.training
        if ids is None:
            raise Unprocessable(f"received sample {sample}, which was not requested: the job has no such groups")
        return ids


# --- One sample's conversation: the model's turns, and the environment's answers --------------------------------------


class Row(NamedTuple):
    """One token sequence of a conversation."""

    prompt: bytes
    completion: bytes
    loss_mask: bytes
    """See `SequenceRow.loss_mask`."""
    logprobs: bytes
    """float32 column of the tokens with a loss."""


class Interval(NamedTuple):
    """A span of time, in Unix seconds by Redis' clock."""

    start: float
    end: float

    @property
    def seconds(self) -> float:
        """Return its length."""
        return self.end - self.start


_UNKNOWN = Interval(0.0, 0.0)


@dataclass(slots=True)
class Conversation:
    """A conversation so far: turns and answers alternate, and their tokens never change."""

    sample: int
    """The sample of the group that it is."""
    turns: list[SampleFinished] = field(default_factory=list)
    answers: list[TurnAnswered] = field(default_factory=list)
    first: int = 0
    """The id of its first turn: the sample's, unless it began again in place of another."""
    prompt: bytes = b""
    """int32 column: what a session of an agent begins with; empty if the group has a prompt."""
    lifetime: Interval = _UNKNOWN
    """When it began and ended. That of an environment begins when its first turn was generated."""
    generation: list[Interval] = field(default_factory=list)
    """Of each turn: when the model was called, and when its last token was there, with all waits between them."""
    rewards: Mapping[int, float] = field(default_factory=dict)
    """Turn of a session -> the reward of rows that end with it, or continue it to a turn without one."""

    def __post_init__(self) -> None:
        """Take the sample's id for that of the first turn, unless another is given."""
        self.first = self.first or self.sample

    @property
    def reward(self) -> float:
        """Return the sum of all rewards so far."""
        return total([answer.reward for answer in self.answers])

    def row_rewards(self, whole: float) -> list[float]:
        """Return the reward of each row, where that of the conversation is `whole`."""
        return [whole]

    @property
    def cost(self) -> float:
        """Return the sum of all costs so far."""
        return total([answer.cost for answer in self.answers])

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
    def spans(self) -> list[tuple[str, int, int]]:
        """Return what generated the model's tokens, turn by turn; see `SampleFinished.spans`."""
        return [span for turn in self.turns for span in turn.spans]

    @property
    def n_observation_tokens(self) -> int:
        """Return how many tokens are the environment's."""
        return sum(length(observation, I32) for _, observation in self._tokens())

    @property
    def model_s(self) -> float:
        """Return for how many seconds at least one turn was being generated, or waited for its worker."""
        covered, until = 0.0, self.lifetime.start
        for start, end in sorted(self.generation):
            covered += max(0.0, end - max(start, until))
            until = max(until, end)
        return covered

    @property
    def outside_s(self) -> float:
        """Return for how many seconds no turn was: tools, sandboxes, and the code of the agent or environment."""
        return max(0.0, self.lifetime.seconds - self.model_s)

    def _tokens(self) -> list[tuple[bytes, bytes]]:
        turns = [turn.tokens for turn in self.turns]
        return list(zip_longest(turns, [answer.tokens for answer in self.answers], fillvalue=b""))

    def rows(self, prompt: bytes) -> list[Row]:
        """Return the token sequences to train on, after the group's prompt, an int32 column."""
        logprobs = b"".join(turn.logprobs for turn in self.turns)
        return [Row(prompt, self.completion, self.loss_mask, logprobs)]

    def answer(
        self, observation: Sequence[int], reward: float, cost: float, *, done: bool, max_tokens: int, max_turns: int
    ) -> TurnAnswered:
        """Return the message that answers the last turn, and that ends the conversation where a limit is reached.

        Args:
            observation: token ids between this turn and the next one.
            reward: the environment's reward for this turn.
            cost: what this turn cost.
            done: whether the environment ends the conversation.
            max_tokens: limit of everything after the prompt, the model's tokens and the environment's.
            max_turns: limit of the model's turns.

        """
        last = self.turns[-1]
        fits = length(self.completion, I32) + len(observation) < max_tokens
        if done:
            return TurnAnswered(sample=last.sample, reward=reward, cost=cost, over="done")
        # After a turn without a token the environment has nothing to answer.
        if last.finish == "length" or not last.tokens or len(self.turns) >= max_turns or not fits:
            return TurnAnswered(sample=last.sample, reward=reward, cost=cost, over="cut")
        return TurnAnswered(sample=last.sample, tokens=pack(observation, I32), reward=reward, cost=cost)

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


# --- A conversation as messages for people, with the tool calls of each turn ------------------------------------------


class Decode(Protocol):
    """The tokenizer's decoder."""

    def __call__(self, tokens: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Return the text of token ids."""


def messages_of(
    conversation: Conversation,
    decode: Decode,
    style: CallStyle = HERMES,
    start: bytes = b"",
    tools: Sequence[Mapping[str, Any]] = (),
) -> list[dict[str, Any]]:
    """Return the turns and answers of a conversation, alternating, texts without special tokens.

    - `{role: "assistant", content, tool_calls, spans, time}`: a turn of the model. `content` is its text less the
      calls, whose JSON texts are in `tool_calls`, or what the model wrote if it cannot be read; `spans` as in samples;
      `time` is when it was asked for and finished, in seconds since the conversation began.
    - `{role: "environment", content, reward, over}`: the answer. `content` is what the model reads before its next
      turn, as its chat template formats it; `over` is `done` or `cut` if the conversation ends with it.

    Args:
        conversation: complete.
        decode: the tokenizer's decoder.
        style: how the model writes tool calls.
        start: token ids of the prompt, an int32 column.
        tools: schemas of the environment's tools, which give arguments their types as the tools got them.

    """
    found: list[dict[str, Any]] = []
    before = decode(ints(start)[-64:], skip_special_tokens=False)
    began = conversation.lifetime.start
    times = [[round(at - began, 3) for at in interval] for interval in conversation.generation]
    for turn, answer, time in zip_longest(conversation.turns, conversation.answers, times):
        tokens = ints(turn.tokens)
        text, raw = (decode(tokens, skip_special_tokens=skips) for skips in (True, False))
        content, calls = _without_calls(text, raw, style, tools, in_thought=opens_thought(before))
        spans = [list(span) for span in turn.spans]
        found.append({"role": "assistant", "content": content, "tool_calls": calls, "spans": spans, "time": time})
        if answer is not None:
            content = decode(ints(answer.tokens), skip_special_tokens=True).strip()
            before = decode(ints(answer.tokens)[-64:], skip_special_tokens=False)
            found.append({"role": "environment", "content": content, "reward": answer.reward, "over": answer.over})
            if answer.cost:
                found[-1]["cost"] = answer.cost
    return found


def _without_calls(
    text: str, raw: str, style: CallStyle, tools: Sequence[Mapping[str, Any]], *, in_thought: bool
) -> tuple[str, list[str]]:
    """Return a text less its tool calls, and these; `raw` has special tokens, such as the tags of calls."""
    calls = read_calls(raw, style, tools, in_thought=in_thought) if style.format else []
    if not calls:
        return text, []
    for written in {call.start: raw[call.start : call.end] for call in calls}.values():
        for shown in (written, _SPECIAL.sub("", written), _OUTER.sub("", written)):
            if shown in text:
                text = text.replace(shown, "", 1)
                break
    return text.strip(), [_shown(call, raw) for call in calls]


_SPECIAL = re.compile(r"<\|[^<>]*>|<[^<>]*\|>|<\uff5c[^<>]*\uff5c>|\[[A-Z_]+\]")
_OUTER = re.compile(r"\A<[^<>]*>|<[^<>]*>\Z")
"""Tags that a tokenizer may have as special tokens, which are in no text."""


def _shown(call: Call, raw: str) -> str:
    if call.problem:
        return raw[call.start : call.end].strip()
    shown = json.dumps({"name": call.name, "arguments": call.arguments}, ensure_ascii=False)
    return shown.encode(errors="backslashreplace").decode()  # JSON can spell a lone surrogate, which nothing accepts
