"""The reward of Countdown, with TRL's signature. Standard library only."""

from __future__ import annotations

from collections.abc import Sequence

from rlboost.examples.countdown.task import Problem, answer_of


def score(
    prompts: list[str],  # noqa: ARG001 - TRL's signature; the columns say the same, parsed
    completions: list[str],  # noqa: ARG001 - likewise: without special tokens, a cut completion looks like a whole one
    completion_ids: list[list[int]],  # noqa: ARG001 - TRL's signature; the text decides
    *,
    completions_raw: list[str],
    numbers: Sequence[Sequence[int]],
    target: Sequence[int],
    **_columns: object,
) -> list[float | None]:
    """Return 1.0 for each completion that solves its problem and 0.0 for every other, malformed and cut off ones too.

    Args:
        prompts: the prompts' texts; all arguments are lists over one batch.
        completions: the completions without special tokens.
        completion_ids: the completions' token ids.
        completions_raw: the completions with special tokens: without its `<eos>` one counts as cut off.
        numbers: the data's column of the three digits.
        target: the data's column of the number to reach.

    """
    rewards: list[float | None] = []
    for completion, (first, second, third), goal in zip(completions_raw, numbers, target, strict=True):
        answer = answer_of(completion)
        solved = answer is not None and answer.solves(Problem((first, second, third), goal))
        rewards.append(1.0 if solved else 0.0)
    return rewards
