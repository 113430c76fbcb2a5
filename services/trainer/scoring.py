"""From a whole group to what the user's reward function is asked, and to what people see of its samples."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from services.trainer.domain.collector import WholeGroup
from services.trainer.ports import Data, Prompt, RewardBatch, Scores
from shared.columns import ints
from shared.ids import SampleId

_TEXT_CHARS = 4_000


def question(group: WholeGroup, prompt: Prompt, data: Data) -> RewardBatch:
    """Return what the reward function is asked about a group, in TRL's form.

    A text prompt has texts as completions, with their special tokens, so that it can be seen whether one ended. A
    prompt of chat messages has lists of one assistant's message, without them. Of a conversation a text is the whole,
    with what the environment said; messages are the model's turns.
    """
    ids = [ints(sample.tokens) for sample in group.samples]
    solutions = [data.decode(tokens, True) for tokens in ids]
    completions: list[str | list[dict[str, Any]]]
    if isinstance(prompt.given, str):
        completions = [data.decode(ints(completion), False) for completion in _completions(group)]
    elif group.talks:
        completions = [
            [_assistant(data.decode(ints(turn.tokens), True)) for turn in talk.turns] for talk in group.talks
        ]
    else:
        completions = [[_assistant(text)] for text in solutions]
    columns = {name: [value] * len(ids) for name, value in prompt.columns.items()}
    return RewardBatch([prompt.given] * len(ids), completions, ids, columns, solutions)


def with_environment(scores: Scores, group: WholeGroup, *, named: bool) -> Scores:
    """Return scores with what the environment gave; as one of several parts where it is not alone (`named`)."""
    if scores.rewards is None or not group.talks:
        return scores
    given = tuple(talk.reward for talk in group.talks)
    rewards = tuple(reward + more for reward, more in zip(scores.rewards, given, strict=True))
    return replace(scores, rewards=rewards, parts={**scores.parts, "environment": given} if named else scores.parts)


def summaries(group: WholeGroup, prompt: bytes, scores: Scores, data: Data) -> list[dict[str, Any]]:
    """Return what people see of each sample; `prompt` is an int32 column."""
    prompt_text = data.decode(ints(prompt), False)[:_TEXT_CHARS]
    rewards = scores.rewards or (None,) * len(group.samples)
    rows = []
    for i, (sample, completion, reward) in enumerate(zip(group.samples, _completions(group), rewards, strict=True)):
        sample_id, tokens = SampleId.unpack(sample.sample), ints(completion)
        rows.append(
            {
                "sample": str(sample_id),
                "step": sample_id.step,
                "is_eval": sample_id.is_eval,
                "prompt": prompt_text,
                "completion": data.decode(tokens, False)[:_TEXT_CHARS],
                "reward": reward,
                **({"rewards": {name: values[i] for name, values in scores.parts.items()}} if scores.parts else {}),
                "reason": scores.reason,
                "finish": sample.finish,
                "n_tokens": len(ints(sample.tokens)),
                **({"turns": len(group.talks[i].turns)} if group.talks else {}),
                "spans": [list(span) for span in sample.spans],
                "attempts": sample.attempts,
            }
        )
    return rows


def _completions(group: WholeGroup) -> list[bytes]:
    """Return all that stands behind the prompt, an int32 column each."""
    return [talk.completion for talk in group.talks] or [sample.tokens for sample in group.samples]


def _assistant(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}
