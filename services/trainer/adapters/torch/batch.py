"""Converts rows of a micro-batch to arrays: packed token ids, and columns over all trained tokens, row by row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from rlboost.services.trainer.domain.batches.training_row import SequenceRow, TrainingRow
from rlboost.services.trainer.domain.loss.inputs import TokenBatch
from rlboost.shared.wire.columns import F32, I32, U8, length, pack, unpack
from rlboost.shared.wire.routed_experts import RoutedShape

Array = np.ndarray[Any, Any]

DUMMY_ROWS = [SequenceRow(pack([0], I32), pack([0], I32))]
"""A micro-batch of two tokens, for checks, and for ranks with fewer micro-batches than others."""


class Packed(NamedTuple):
    """Rows concatenated without padding."""

    ids: Array
    """Token ids, int64 [tokens]."""
    boundaries: Array
    """0, then the end of each row, int32 [rows + 1]."""
    predicts: Array
    """Positions before trained tokens, int64 [trained tokens]. Indices rather than a mask: selecting by a mask on a GPU
    makes the host wait."""

    @property
    def positions(self) -> Array:
        """The position of each token in its row, int64 [tokens]."""
        positions: Array = np.arange(len(self.ids)) - np.repeat(self.boundaries[:-1], np.diff(self.boundaries))
        return positions

    def padded(self, divisor: int) -> Packed:
        """Return the rows, with a row of padding if `divisor` does not divide their tokens."""
        if not (n_padding := -len(self.ids) % divisor):
            return self
        end = np.int32(len(self.ids) + n_padding)
        return self._replace(ids=np.pad(self.ids, (0, n_padding)), boundaries=np.append(self.boundaries, end))


def packed(rows: Sequence[SequenceRow]) -> Packed:
    """Return rows as one sequence."""
    ids = np.frombuffer(b"".join(part for row in rows for part in (row.prompt, row.completion)), I32)
    boundaries = np.cumsum([0, *(row.n_tokens for row in rows)])
    predicts = np.zeros(len(ids), np.bool_)
    for row, start, end in zip(rows, boundaries, boundaries[1:], strict=False):
        before = start + length(row.prompt, I32) - 1
        predicts[before : end - 1] = unpack(row.loss_mask, U8) if row.loss_mask else True
    return Packed(ids.astype(np.int64), boundaries.astype(np.int32), np.flatnonzero(predicts))


def replayed(rows: Sequence[SequenceRow], predicts: Array, shape: RoutedShape) -> tuple[Array, Array] | None:
    """Return the positions where recorded experts replace the router's, int64 [n], and the experts.

    The latter are [n, layers, experts per token] in the dtype of `shape`. None if no row has any.

    Args:
        rows: a micro-batch.
        predicts: the positions before trained tokens, see `Packed`.
        shape: shape of the rows' routed experts.

    """
    known = [bool(row.routed_experts) for row in rows]
    if not any(known):
        return None
    experts = shape.unpack(bytearray().join(row.routed_experts for row in rows))  # writable, as torch wants arrays
    return predicts[np.repeat(known, lengths(rows))], experts


def lengths(rows: Sequence[SequenceRow]) -> list[int]:
    """Return the number of trained tokens of each row."""
    return [row.n_loss_tokens for row in rows]


def sampled(rows: Sequence[TrainingRow]) -> Array:
    """Return the log-probability of each completion token when it was sampled, float32 [tokens]."""
    return np.concatenate([unpack(row.sampled, F32) for row in rows])


def proximal(rows: Sequence[TrainingRow]) -> Array | None:
    """Return the same under the weights at the start of the step, None unless all rows have it."""
    return _joined([row.proximal for row in rows])


def reference(rows: Sequence[TrainingRow]) -> Array | None:
    """Return the same under the reference model, None unless all rows have it."""
    return _joined([row.reference for row in rows])


def values(rows: Sequence[TrainingRow]) -> tuple[Array, Array]:
    """Return the critic's value before each completion token, and its target, float32 [tokens] each."""
    before, returns = [row.values for row in rows], [row.returns for row in rows]
    return unpack(b"".join(before), F32), unpack(b"".join(returns), F32)


def columns(rows: Sequence[SequenceRow], column: Tensor) -> list[bytes]:
    """Split a column over all completion tokens into one float32 column per row."""
    ends = np.cumsum(lengths(rows))
    return [part.tobytes() for part in np.split(column.detach().cpu().numpy().astype(F32), ends[:-1])]


def advantages(rows: Sequence[TrainingRow]) -> Array:
    """Return each completion token's advantage, float32 [tokens]."""
    return np.concatenate([unpack(row.advantages, F32) for row in rows])


def token_batch(rows: Sequence[TrainingRow], logprobs: Tensor, reference_logprobs: Tensor | None) -> TokenBatch:
    """Return the argument of the loss, on the device of the log-probabilities.

    Args:
        rows: a micro-batch.
        logprobs: log-probabilities of all trained tokens, row by row, [tokens].
        reference_logprobs: the same under the reference model; None to take the rows' own, if they have them.

    """

    def column(values: Array | None) -> Tensor | None:
        return None if values is None else torch.from_numpy(values).to(logprobs.device)

    sampled_logprobs, weights = column(sampled(rows)), column(advantages(rows))
    assert sampled_logprobs is not None
    assert weights is not None
    if reference_logprobs is None:
        reference_logprobs = column(reference(rows))
    return TokenBatch(
        logprobs, sampled_logprobs, weights, tuple(lengths(rows)), column(proximal(rows)), reference_logprobs
    )


def _joined(columns: Sequence[bytes]) -> Array | None:
    return np.concatenate([unpack(column, F32) for column in columns]) if all(columns) else None
