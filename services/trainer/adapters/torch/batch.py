"""From rows of a micro-batch to arrays: padded token ids, and columns over all trained tokens, row after row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from services.trainer.domain.tokens import TokenBatch
from services.trainer.ports import Row
from shared.columns import F32, I32, U8, unpack

Array = np.ndarray[Any, Any]


def padded(rows: Sequence[Row]) -> tuple[Array, Array]:
    """Return token ids [rows, longest], and the places in them, counted through all rows, before trained tokens [n].

    n is the number of trained tokens. Places and no mask: to select by a mask on a GPU, the host would have to wait.
    """
    width = max(row.n_tokens for row in rows)
    ids = np.zeros((len(rows), width), np.int64)
    predicts = np.zeros((len(rows), width), np.bool_)
    for i, row in enumerate(rows):
        prompt, completion = unpack(row.prompt, I32), unpack(row.completion, I32)
        end = len(prompt) + len(completion)
        ids[i, : len(prompt)] = prompt
        ids[i, len(prompt) : end] = completion
        predicts[i, len(prompt) - 1 : end - 1] = unpack(row.trained, U8) if row.trained else True
    return ids, np.flatnonzero(predicts)


def lengths(rows: Sequence[Row]) -> list[int]:
    """Return how many tokens of each row are trained on."""
    return [row.n_trained for row in rows]


def sampled(rows: Sequence[Row]) -> Array:
    """Return the log-probability of each completion token when it was drawn, float32 [tokens]."""
    return np.concatenate([unpack(row.logprobs, F32) for row in rows])


def proximal(rows: Sequence[Row]) -> Array | None:
    """Return the same under the weights that the step began with, None unless all rows have it."""
    return _joined([row.proximal for row in rows])


def starting(rows: Sequence[Row]) -> Array | None:
    """Return the same under the weights that the job began with, None unless all rows have it."""
    return _joined([row.reference for row in rows])


def values(rows: Sequence[Row]) -> tuple[Array, Array]:
    """Return what a critic expected before each completion token, and what it should have, float32 [tokens] each."""
    before, returns = [row.values for row in rows], [row.returns for row in rows]
    return unpack(b"".join(before), F32), unpack(b"".join(returns), F32)


def columns(rows: Sequence[Row], column: Tensor) -> list[bytes]:
    """Return each row's part of a column over all completion tokens, float32."""
    ends = np.cumsum(lengths(rows))
    return [part.tobytes() for part in np.split(column.detach().cpu().numpy().astype(F32), ends[:-1])]


def advantages(rows: Sequence[Row]) -> Array:
    """Return each completion token's advantage, its own or that of its row, float32 [tokens]."""
    if (known := _joined([row.advantages for row in rows])) is not None:
        return known
    return np.repeat(np.asarray([row.advantage for row in rows], F32), lengths(rows))


def token_batch(rows: Sequence[Row], logprobs: Tensor, reference: Tensor | None) -> TokenBatch:
    """Return what the loss is given of the rows, on the device of their log-probabilities.

    Args:
        rows: a micro-batch.
        logprobs: of all trained tokens, row after row, [tokens].
        reference: the same under the weights that the job began with, unless the rows have it or nobody asks.

    """

    def column(values: Array | None) -> Tensor | None:
        return None if values is None else torch.from_numpy(values).to(logprobs.device)

    drawn, weights = column(sampled(rows)), column(advantages(rows))
    assert drawn is not None
    assert weights is not None
    if reference is None:
        reference = column(starting(rows))
    return TokenBatch(logprobs, drawn, weights, tuple(lengths(rows)), column(proximal(rows)), reference)


def _joined(columns: Sequence[bytes]) -> Array | None:
    return np.concatenate([unpack(column, F32) for column in columns]) if all(columns) else None
