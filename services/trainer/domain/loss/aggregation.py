"""Aggregates the token losses of an update: a factor per token, and a divisor of the sum.

The factor of a token depends only on its completion, and the divisor is a count. So the sum over any micro-batches,
divided once at the end, is the aggregate of the whole update.
"""

from __future__ import annotations

from collections.abc import Sequence

from rlboost.shared.job.algorithm import Aggregation


def factor(kind: Aggregation, length: int, max_tokens: int) -> float:
    """Return the factor of each token of a completion of `length` tokens.

    Args:
        kind: `algorithm.aggregation`. `token_mean`: DAPO, arXiv 2503.14476, equation 8, over the whole update;
            `sequence_mean`: GRPO, arXiv 2402.03300, equation 3; `sequence_sum`: REINFORCE of whole completions as in
            RLOO, arXiv 2402.14740; `constant`: Dr. GRPO, arXiv 2503.20783, with the generation limit as the constant.
        length: number of tokens of the completion.
        max_tokens: `sampling.max_tokens`.

    """
    match kind:
        case "sequence_mean":
            return 1.0 / length
        case "constant":
            return 1.0 / max_tokens
        case "token_mean" | "sequence_sum":
            return 1.0


def divisor(kind: Aggregation, lengths: Sequence[int]) -> int:
    """Return the contribution of completions to the divisor: their tokens for `token_mean`, otherwise their number."""
    return sum(lengths) if kind == "token_mean" else len(lengths)
