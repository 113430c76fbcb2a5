"""A complete group as texts: what reward functions get of it, and what people see."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from itertools import accumulate, pairwise
from operator import attrgetter
from types import MappingProxyType
from typing import Any

from rlboost.services.trainer.domain.advantages import total
from rlboost.services.trainer.domain.conversations import Conversation, messages_of
from rlboost.services.trainer.domain.groups import WholeGroup
from rlboost.services.trainer.domain.metrics import StepTally
from rlboost.services.trainer.ports.samples import Data, Prompt, RewardBatch, Scores, Verdict
from rlboost.services.trainer.ports.storage import LoggedSample
from rlboost.shared.ids import SampleId
from rlboost.shared.messages.codec import Span
from rlboost.shared.model.tool_call_formats import Tools
from rlboost.shared.wire import ints

_TEXT_CHARS = 4_000
"""Published prompts and completions are cut to this length, in their middle: questions and answers are at the ends."""
_MESSAGE_CHARS = 600
"""Maximum characters that are published of each message of a long conversation."""


def reward_batch(group: WholeGroup, prompt: Prompt, data: Data) -> RewardBatch:
    """Return the arguments of the reward function for a group, in TRL's form.

    Completions are without special tokens: texts for a text prompt, lists with one assistant message for chat messages.
    For a conversation, a text is everything after the prompt, including the environment's answers; a list has the
    model's turns. `completions_raw` are texts of everything after the prompt, with special tokens.
    """
    ids = [ints(sample.tokens) for sample in group.samples]
    whole = [ints(completion) for completion in group.completions]
    solutions = [data.decode(tokens, skip_special_tokens=True) for tokens in ids]
    completions: list[str | list[dict[str, Any]]]
    if isinstance(prompt.given, str):
        completions = [data.decode(tokens, skip_special_tokens=True) for tokens in whole]
    elif group.conversations:
        completions = [
            [_assistant(data.decode(ints(turn.tokens), skip_special_tokens=True)) for turn in conversation.turns]
            for conversation in group.conversations
        ]
    else:
        completions = [[_assistant(text)] for text in solutions]
    columns = {name: [value] * len(ids) for name, value in prompt.columns.items()}
    raw = [data.decode(tokens, skip_special_tokens=False) for tokens in whole]
    return RewardBatch([prompt.given] * len(ids), completions, ids, columns, solutions, raw)


def add_conversation_rewards(scores: Scores, group: WholeGroup, *, name: str = "") -> Scores:
    """Return scores plus rewards and costs of the environment or agent; with a name, its rewards are also a part."""
    if scores.rewards is None or not group.conversations:
        return scores
    given = tuple(conversation.reward for conversation in group.conversations)
    rewards = tuple(total((reward, more)) for reward, more in zip(scores.rewards, given, strict=True))
    costs = scores.costs or (0.0,) * len(rewards)
    costs = tuple(total((cost, one.cost)) for cost, one in zip(costs, group.conversations, strict=True))
    parts = {**scores.parts, name: given} if name else scores.parts
    return replace(scores, rewards=rewards, parts=parts, costs=costs if any(costs) else ())


def verdict_fields(verdict: Verdict) -> dict[str, Any]:
    """Return the published fields of what a model on workers says of a completion."""
    fields = asdict(verdict) | {"answer": _without_middle(verdict.answer, _TEXT_CHARS)}
    return fields | {"spans": [list(span) for span in verdict.spans]}


def _shown(part: str, verdict: Verdict) -> tuple[str, dict[str, Any]]:
    """Return the name of a part of the reward, that of its model if it has none, and the fields of its verdict."""
    return part or verdict.job_id.rpartition(".")[2], verdict_fields(verdict)


def sample_summaries(
    group: WholeGroup,
    prompt: bytes,
    scores: Scores,
    data: Data,
    tools: Tools = (),
    verdicts: Mapping[str, Sequence[Verdict]] = MappingProxyType({}),
) -> list[dict[str, Any]]:
    """Return the published fields of each sample, texts without special tokens; `prompt` is an int32 column."""
    rewards = scores.rewards or (None,) * len(group.samples)
    rows = []
    for i, (sample, completion, reward) in enumerate(zip(group.samples, group.completions, rewards, strict=True)):
        sample_id, tokens = SampleId.unpack(sample.sample), ints(completion)
        own = group.conversations[i].prompt if group.conversations else b""
        prompt_text = _without_middle(data.decode(ints(own or prompt), skip_special_tokens=True), _TEXT_CHARS)
        rows.append(
            {
                "sample": str(sample_id),
                "step": sample_id.step,
                "is_eval": sample_id.is_eval,
                "prompt": prompt_text,
                "completion": _without_middle(data.decode(tokens, skip_special_tokens=True), _TEXT_CHARS),
                "reward": reward,
                **({"rewards": {name: values[i] for name, values in scores.parts.items()}} if scores.parts else {}),
                **({"cost": scores.costs[i]} if scores.costs else {}),
                **({"reward_models": dict(scores.models)} if scores.models else {}),
                **({"verdicts": dict(_shown(part, given[i]) for part, given in verdicts.items())} if verdicts else {}),
                "reason": scores.reason,
                "finish": sample.finish,
                "n_tokens": len(ints(sample.tokens)),
                "spans": [list(span) for span in sample.spans],
                **(
                    conversation_fields(group.conversations[i], data, prompt, tools)
                    if group.conversations
                    else span_characters(tokens, sample.spans, data)
                ),
                "attempts": sample.attempts,
            }
        )
    return rows


def logged_samples(tally: StepTally, data: Data, n: int) -> list[LoggedSample]:
    """Return the first sample of each of the first `n` groups, training groups if there are any; long texts are cut."""
    groups = sorted(tally.rollouts.scored or tally.rollouts.evaluated, key=attrgetter("group"))[:n]
    found = []
    for group in groups:
        first = WholeGroup(group.group, group.samples[:1], group.conversations[:1])
        (shown,) = sample_summaries(first, group.prompt, Scores(group.rewards[:1]), data)
        found.append(LoggedSample(tally.step, shown["prompt"], shown["completion"], group.rewards[0]))
    return found


def conversation_fields(
    conversation: Conversation, data: Data, start: bytes = b"", tools: Tools = ()
) -> dict[str, Any]:
    """Return the number of turns, when they began (Unix seconds), how many seconds they took, and `messages_of`.

    Each text is cut in its middle.
    """
    messages = messages_of(conversation, data.decode, data.call_style, start, tools)
    limit = max(_MESSAGE_CHARS, _TEXT_CHARS // len(messages))
    for message in messages:
        message["content"] = _without_middle(message["content"], limit)
        if "tool_calls" in message:
            message["tool_calls"] = [_without_middle(call, limit) for call in message["tool_calls"]]
    times = {"began_at": round(conversation.lifetime.start, 3)}
    times |= {"duration_s": round(conversation.lifetime.seconds, 3), "outside_s": round(conversation.outside_s, 3)}
    return {"turns": len(conversation.turns), **times, "messages": messages}


def span_characters(tokens: Sequence[int], spans: Sequence[Span], data: Data) -> dict[str, list[int]]:
    """Return how many characters of a completion's whole text each span generated; empty for a single span."""
    if len(spans) < 2:
        return {}
    n_tokens = accumulate(n for _, _, n in spans)
    ends = [len(data.decode(tokens[:n], skip_special_tokens=True)) for n in n_tokens]
    return {"span_characters": [end - start for start, end in pairwise([0, *ends])]}


def _assistant(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def _without_middle(text: str, limit: int) -> str:
    half, n_cut = limit // 2, len(text) - limit
    return text if n_cut <= 0 else f"{text[:half]}\n[{n_cut:,} characters cut]\n{text[-half:]}"
