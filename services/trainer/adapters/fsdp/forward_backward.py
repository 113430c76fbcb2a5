"""Forward and backward over each rank's own micro-batches. Rows are packed, as in the torch backend.

A forward pass gathers each layer's parameters from all ranks, so all ranks make the same number of passes: a rank with
fewer micro-batches than another repeats a dummy row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor, distributed

from rlboost.services.trainer.adapters.ranks.packed import Balancing, LossGradientFn, PackedBatch, unpack_rows
from rlboost.services.trainer.adapters.torch.batch import DUMMY_ROWS
from rlboost.services.trainer.adapters.torch.context_parallel import ContextGroup
from rlboost.services.trainer.adapters.torch.routing import Balance
from rlboost.services.trainer.domain.batches.training_row import SequenceRow
from rlboost.services.trainer.domain.loss import sums


class ColumnPass(Protocol):
    """Forward passes of one model: `LogprobPass`, or `ValuePass` of a critic."""

    @property
    def balance(self) -> Balance | None:
        """Return the balance of experts over this rank's tokens in the last pass, None if they are not balanced."""

    def __call__(self, rows: Sequence[SequenceRow]) -> Tensor:
        """Return a value of each trained token, row by row, [tokens]."""


class FsdpForwardBackward:
    """`ForwardBackward` of one rank."""

    def __init__(self, forward: ColumnPass, device: str, context: ContextGroup | None, balancing: Balancing) -> None:
        """Use the forward pass of a model that is on `device`.

        Args:
            forward: computes log-probabilities or values.
            device: the model's device.
            context: divides the tokens of each micro-batch, if any.
            balancing: for a mixture of experts.

        """
        self._forward = forward
        self._device = device
        self._context = context
        self._balancing = balancing

    def columns(self, batches: Sequence[PackedBatch]) -> list[Tensor]:
        """Return each micro-batch's log-probabilities or values, [trained tokens]."""
        with torch.no_grad():
            columns = [self._forward(rows).cpu() for rows in self._with_dummies(batches)]
        return columns[: len(batches)]

    def accumulate(self, batches: Sequence[PackedBatch], loss_gradient: LossGradientFn) -> dict[str, float]:
        """Run forward and backward, adding to the gradients; return sums about the routers of experts."""
        totals: dict[str, float] = {}
        for index, rows in enumerate(self._with_dummies(batches)):
            column = self._forward(rows)
            gradient = torch.zeros_like(column)
            if index < len(batches):
                if self._context is None or self._context.is_first:
                    gradient.copy_(loss_gradient(index, column.detach()))
                if self._context is not None:
                    self._context.broadcast(gradient)
            # A surrogate whose gradient is the loss's.
            surrogate = (column * gradient).sum()
            if (balance := self._forward.balance) is not None and index < len(batches):
                if self._balancing.coefficient:
                    share = balance.n_tokens / sum(row.n_tokens for row in rows)  # of this rank's slice of the tokens
                    surrogate = surrogate + self._balancing.factor(batches[index]) * share * balance.loss
                sums.add(totals, balance.sums())
            surrogate.backward()
        return totals

    def _with_dummies(self, batches: Sequence[PackedBatch]) -> list[Sequence[SequenceRow]]:
        most = torch.tensor(len(batches), device=self._device)
        distributed.all_reduce(most, distributed.ReduceOp.MAX)
        own: list[Sequence[SequenceRow]] = [unpack_rows(batch) for batch in batches]
        return own + [DUMMY_ROWS] * (int(most) - len(own))
