"""The probe that every version of a job is scored on: a few sequences that depend on the vocabulary's size alone."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shared.canary import Canary, Dtype, Scored
from shared.columns import F32, unpack
from shared.errors import Fatal

ROWS, PROMPT_TOKENS, COMPLETION_TOKENS = 4, 8, 12
"""Some hundred tokens: a wrong tensor shows in any of them, and a forward pass of them costs next to nothing."""
COMMON_TOKENS = 4096
"""Ids are below this: large vocabularies end in ids that were never trained or are masked, of which engines may differ.
"""


@dataclass(frozen=True, slots=True)
class Probe:
    """What is asked."""

    temperature: float
    """See `Canary`."""
    dtype: Dtype
    """See `Canary`."""
    rows: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
    """(prompt, completion) of each sequence."""


def probe(vocabulary: int, *, temperature: float, dtype: Dtype) -> Probe:
    """Return the probe of a job; it holds nothing of the user's data.

    Args:
        vocabulary: how many tokens the model has.
        temperature: that the job's log-probabilities are of, above 0.
        dtype: what the trainer computes in.

    """
    length, many = PROMPT_TOKENS + COMPLETION_TOKENS, min(vocabulary, COMMON_TOKENS)
    sequences = [tuple(_token(row, at, many) for at in range(length)) for row in range(ROWS)]
    return Probe(temperature, dtype, tuple((ids[:PROMPT_TOKENS], ids[PROMPT_TOKENS:]) for ids in sequences))


def _token(row: int, at: int, many: int) -> int:
    return int.from_bytes(hashlib.blake2b(f"{row} {at}".encode(), digest_size=8).digest(), "little") % many


def answered(asked: Probe, columns: Sequence[bytes]) -> Canary:
    """Return the canary.

    Args:
        asked: the probe.
        columns: float32 log-probabilities of each row's completion.

    Raises:
        Fatal: they are no numbers.

    """
    answers = [unpack(column, F32) for column in columns]
    if not all(np.isfinite(answer).all() for answer in answers):
        raise Fatal(
            "the model's log-probabilities of a fixed probe are no numbers, so its weights are not published: look for "
            "a learning rate that is too high, or a broken model"
        )
    rows = tuple(
        Scored(prompt=prompt, completion=completion, logprobs=tuple(round(float(value), 6) for value in answer))
        for (prompt, completion), answer in zip(asked.rows, answers, strict=True)
    )
    return Canary(temperature=asked.temperature, dtype=asked.dtype, rows=rows)
