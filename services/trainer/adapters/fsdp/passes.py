"""Passes over micro-batches, of which every rank has its own. Rows are padded, as in the torch backend.

A pass gathers each layer's parameters from all ranks, so all ranks make the same number of passes: one that has fewer
micro-batches than another makes the rest with a row that nobody looks at.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, distributed
from torch.nn import functional

from services.trainer.adapters import torch_rows
from services.trainer.adapters.ranks.packed import GradientOf, Packed, rows_of
from services.trainer.ports import Row
from shared.columns import I32, pack

_NOTHING = [Row(pack([0], I32), pack([0], I32), b"", 0.0)]


class PaddedPasses:
    """Runs one rank's micro-batches through the model."""

    def __init__(self, module: Any, temperature: float, dtype: torch.dtype, device: str) -> None:
        """Use `module`; log-probabilities are of the distribution at `temperature`, matrices multiplied in `dtype`."""
        self._module = module
        self._temperature = temperature
        self._dtype = dtype
        self._device = device
        self._selected: Tensor | None = None
        module.get_output_embeddings().register_forward_pre_hook(self._select)

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

    def _forward(self, rows: Sequence[Row]) -> Tensor:
        ids, predicts = torch_rows.padded(rows)
        token_ids = torch.from_numpy(ids).to(self._device)
        self._selected = torch.from_numpy(predicts).to(self._device)
        with self._autocast():
            logits: Tensor = self._module(input_ids=token_ids, use_cache=False).logits[0]
        targets = token_ids[:, 1:][self._selected[:, :-1]]
        return -functional.cross_entropy(logits.float() / self._temperature, targets, reduction="none")

    def _select(self, _head: torch.nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor]:
        """Give the output head only the positions that predict a trained token, [1, tokens, hidden]."""
        return (inputs[0][self._selected].unsqueeze(0),)

    def _autocast(self) -> AbstractContextManager[None]:
        return torch.autocast(self._device, dtype=torch.bfloat16, enabled=self._dtype is torch.bfloat16)
