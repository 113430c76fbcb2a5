"""Micro-batches as columns of bytes, the form in which the trainer sends them to its ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from torch import Tensor

from rlboost.services.trainer.domain.batches.training_row import SequenceRow
from rlboost.services.trainer.domain.loss.aggregation import divisor
from rlboost.shared.job.algorithm import Aggregation
from rlboost.shared.wire.columns import I32, U8, ints, length, pack, unpack

LossGradientFn = Callable[[int, Tensor], Tensor]
"""(index of the micro-batch, log-probabilities or values of its trained tokens) -> gradient of the loss with respect to
them. Called on the ranks that compute log-probabilities."""


class PackedBatch(NamedTuple):
    """One micro-batch; rows are concatenated without padding."""

    tokens: bytes
    """int32 column: prompt and completion of each row, concatenated."""
    prompts: bytes
    """int32 column: each row's prompt length."""
    completions: bytes
    """int32 column: each row's completion length."""
    loss_mask: bytes
    """uint8 column, one entry per completion token: 1 if the loss covers it."""
    routed_experts: bytes = b""
    """Concatenated columns of the rows."""
    routed_bytes: bytes = b""
    """int32 column: how many of these bytes each row has."""


class Balancing(NamedTuple):
    """The weight of the load-balancing loss of a mixture of experts in an update's loss."""

    coefficient: float = 0.0
    aggregation: Aggregation = "token_mean"
    """See `domain.loss.aggregation`."""

    def factor(self, batch: PackedBatch) -> float:
        """Return the factor of a micro-batch's load-balancing loss."""
        masks = np.split(unpack(batch.loss_mask, U8), np.cumsum(ints(batch.completions))[:-1])
        return self.coefficient * divisor(self.aggregation, [int(mask.sum()) for mask in masks])


NO_BALANCING = Balancing()


def pack_rows(rows: Sequence[SequenceRow]) -> PackedBatch:
    """Pack rows for a rank."""
    completions = [length(row.completion, I32) for row in rows]
    return PackedBatch(
        tokens=b"".join(part for row in rows for part in (row.prompt, row.completion)),
        prompts=pack([length(row.prompt, I32) for row in rows], I32),
        completions=pack(completions, I32),
        loss_mask=b"".join(row.loss_mask or b"\1" * n for row, n in zip(rows, completions, strict=True)),
        routed_experts=b"".join(row.routed_experts for row in rows),
        routed_bytes=pack([len(row.routed_experts) for row in rows], I32),
    )


def unpack_rows(batch: PackedBatch) -> list[SequenceRow]:
    """Return the rows, with tokens, loss mask and routed experts only."""
    prompts, completions = ints(batch.prompts), ints(batch.completions)
    ends = np.cumsum([n for pair in zip(prompts, completions, strict=True) for n in pair])
    parts = np.split(unpack(batch.tokens, I32), ends[:-1])
    loss_masks = np.split(unpack(batch.loss_mask, U8), np.cumsum(completions)[:-1])
    routed = np.split(unpack(batch.routed_experts, U8), np.cumsum(ints(batch.routed_bytes))[:-1])
    return [
        SequenceRow(prompt.tobytes(), completion.tobytes(), loss_mask=mask.tobytes(), routed_experts=experts.tobytes())
        for prompt, completion, mask, experts in zip(parts[::2], parts[1::2], loss_masks, routed, strict=True)
    ]
