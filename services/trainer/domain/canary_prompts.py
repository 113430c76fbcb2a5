"""Canary prompts, the input of the parity check: a few sequences that depend on the size of the vocabulary only."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rlboost.shared.errors import Fatal
from rlboost.shared.weights.manifest import ParityDtype, ParityReference, ScoredSequence
from rlboost.shared.wire import F32, unpack

ROWS, PROMPT_TOKENS, COMPLETION_TOKENS = 4, 8, 12
"""Small enough for a cheap forward pass; any wrong tensor changes the log-probabilities."""
COMMON_TOKENS = 4096
"""Upper bound of token ids: the last ids of large vocabularies may be untrained or masked, and engines differ on them.
"""


@dataclass(frozen=True, slots=True)
class CanaryPrompts:
    """The sequences to score, and how."""

    temperature: float
    """See `ParityReference`."""
    dtype: ParityDtype
    """See `ParityReference`."""
    rows: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
    """(prompt, completion) of each sequence."""
    top_p: float = 1.0
    """See `ParityReference`."""


def build_canary_prompts(
    vocabulary: int, *, temperature: float, dtype: ParityDtype, top_p: float = 1.0
) -> CanaryPrompts:
    """Return the canary prompts of a job; they contain no user data.

    Args:
        vocabulary: number of tokens of the model.
        temperature: temperature of the job's log-probabilities, above 0.
        dtype: the dtype that the trainer computes in.
        top_p: of the samples that are trained on.

    """
    length, many = PROMPT_TOKENS + COMPLETION_TOKENS, min(vocabulary, COMMON_TOKENS)
    sequences = [tuple(_token(row, at, many) for at in range(length)) for row in range(ROWS)]
    rows = tuple((ids[:PROMPT_TOKENS], ids[PROMPT_TOKENS:]) for ids in sequences)
    return CanaryPrompts(temperature, dtype, rows, top_p)


def _token(row: int, at: int, many: int) -> int:
    return int.from_bytes(hashlib.blake2b(f"{row} {at}".encode(), digest_size=8).digest(), "little") % many


def build_reference(canaries: CanaryPrompts, columns: Sequence[bytes]) -> ParityReference:
    """Return the parity reference of a version.

    Args:
        canaries: the sequences.
        columns: the version's log-probabilities of each row's completion, float32.

    Raises:
        Fatal: a log-probability is not finite.

    """
    answers = [unpack(column, F32) for column in columns]
    if not all(np.isfinite(answer).all() for answer in answers):
        raise Fatal(
            "the model's log-probabilities of the canary prompts are not finite, so its weights are not published: "
            "check for a learning rate that is too high, or a broken model"
        )
    rows = tuple(
        ScoredSequence(prompt=prompt, completion=completion, logprobs=tuple(round(float(value), 6) for value in answer))
        for (prompt, completion), answer in zip(canaries.rows, answers, strict=True)
    )
    return ParityReference(temperature=canaries.temperature, top_p=canaries.top_p, dtype=canaries.dtype, rows=rows)
