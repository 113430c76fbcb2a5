"""From a whole group to what the user's reward function is asked, and to what people see of its samples."""

from __future__ import annotations

from typing import Any

from services.trainer.domain.collector import WholeGroup
from services.trainer.ports import Data, Prompt, RewardBatch, Scores
from shared.columns import ints
from shared.ids import SampleId

_TEXT_CHARS = 4_000


def question(group: WholeGroup, prompt: Prompt, data: Data) -> RewardBatch:
    """Return what the reward function is asked about a group, in TRL's form.

    A text prompt has texts as completions, with their special tokens, so that it can be seen whether one ended. A
    prompt of chat messages has lists of one assistant's message, without them.
    """
    ids = [ints(sample.tokens) for sample in group.samples]
    solutions = [data.decode(tokens, True) for tokens in ids]
    completions: list[str | list[dict[str, Any]]]
    if isinstance(prompt.given, str):
        completions = [data.decode(tokens, False) for tokens in ids]
    else:
        completions = [[{"role": "assistant", "content": text}] for text in solutions]
    columns = {name: [value] * len(ids) for name, value in prompt.columns.items()}
    return RewardBatch([prompt.given] * len(ids), completions, ids, columns, solutions)


def summaries(group: WholeGroup, prompt: Prompt, scores: Scores, data: Data) -> list[dict[str, Any]]:
    """Return what people see of each sample."""
    prompt_text = data.decode(ints(prompt.tokens), False)[:_TEXT_CHARS]
    rewards = scores.rewards or (None,) * len(group.samples)
    rows = []
    for i, (sample, reward) in enumerate(zip(group.samples, rewards, strict=True)):
        sample_id, tokens = SampleId.unpack(sample.sample), ints(sample.tokens)
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
                "n_tokens": len(tokens),
                "spans": [list(span) for span in sample.spans],
                "attempts": sample.attempts,
            }
        )
    return rows
