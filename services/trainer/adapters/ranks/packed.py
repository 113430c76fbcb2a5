"""Micro-batches as ranks get them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from torch import Tensor

from services.trainer.ports import Row
from shared.columns import I32, U8, ints, length, pack, unpack

GradientOf = Callable[[int, Tensor], Tensor]
"""(number of the micro-batch, log-probabilities of its trained tokens) -> the loss's gradient with respect to them.
Called where log-probabilities come out."""


class Packed(NamedTuple):
    """One micro-batch as a rank gets it."""

    tokens: bytes
    """int32 column: all rows, prompt and completion, end to end."""
    prompts: bytes
    """int32 column: how long each row's prompt is."""
    completions: bytes
    """int32 column: how long each row's completion is."""
    trained: bytes
    """uint8 column, one entry a token of the completions: 1 for those that the loss is on."""


def packed(rows: Sequence[Row]) -> Packed:
    """Return what a rank gets of rows."""
    completions = [length(row.completion, I32) for row in rows]
    return Packed(
        tokens=b"".join(part for row in rows for part in (row.prompt, row.completion)),
        prompts=pack([length(row.prompt, I32) for row in rows], I32),
        completions=pack(completions, I32),
        trained=b"".join(row.trained or b"\1" * n for row, n in zip(rows, completions, strict=True)),
    )


def rows_of(batch: Packed) -> list[Row]:
    """Return the rows again, with their tokens and which of them are trained on, and nothing else."""
    prompts, completions = ints(batch.prompts), ints(batch.completions)
    ends = np.cumsum([n for pair in zip(prompts, completions, strict=True) for n in pair])
    parts = np.split(unpack(batch.tokens, I32), ends[:-1])
    trained = np.split(unpack(batch.trained, U8), np.cumsum(completions)[:-1])
    return [
        Row(prompt.tobytes(), completion.tobytes(), b"", 0.0, trained=mask.tobytes())
        for prompt, completion, mask in zip(parts[::2], parts[1::2], trained, strict=True)
    ]
