"""Passes over micro-batches, of which every rank has its own. Rows are padded, as in the torch backend.

A pass gathers each layer's parameters from all ranks, so all ranks make the same number of passes: one that has fewer
micro-batches than another makes the rest with a row that nobody looks at.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, distributed

from services.trainer.adapters.ranks.packed import GradientOf, Packed, rows_of
from services.trainer.adapters.torch.logprobs import LogprobPass
from services.trainer.ports import Row
from shared.columns import I32, pack

_NOTHING = [Row(pack([0], I32), pack([0], I32), b"", 0.0)]


class PaddedPasses:
    """Runs one rank's micro-batches through the model."""

    def __init__(self, forward: LogprobPass, device: str) -> None:
        """Use the pass of a model that is on `device`."""
        self._forward = forward
        self._device = device

    def logprobs(self, batches: Sequence[Packed]) -> list[Tensor]:
        """Return each micro-batch's log-probabilities, [trained tokens]."""
        with torch.no_grad():
            found = [self._forward(rows).cpu() for rows in self._of_all_ranks(batches)]
        return found[: len(batches)]

    def accumulate(self, batches: Sequence[Packed], gradient_of: GradientOf) -> None:
        """Run forward and backward, adding to the gradients."""
        for number, rows in enumerate(self._of_all_ranks(batches)):
            logprobs = self._forward(rows)
            gradient = torch.zeros_like(logprobs)
            if number < len(batches):
                gradient.copy_(gradient_of(number, logprobs.detach()))
            # Its gradient is the real loss's, and that is all that backward is for.
            (logprobs * gradient).sum().backward()  # type: ignore[no-untyped-call]  # torch has no annotation there

    def _of_all_ranks(self, batches: Sequence[Packed]) -> list[Sequence[Row]]:
        most = torch.tensor(len(batches), device=self._device)
        distributed.all_reduce(most, distributed.ReduceOp.MAX)
        own: list[Sequence[Row]] = [rows_of(batch) for batch in batches]
        return own + [_NOTHING] * (int(most) - len(own))
