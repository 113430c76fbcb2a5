"""Forward pass of a causal language model of transformers, from rows to log-probabilities of their trained tokens.

Rows are packed without padding. The output head runs only on positions that predict a trained token, in chunks: with a
large vocabulary, the logits of a long row would need more memory than everything else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from rlboost.services.trainer.adapters.torch.batch import Packed, packed, replayed
from rlboost.services.trainer.adapters.torch.context_parallel import ContextGroup
from rlboost.services.trainer.adapters.torch.packing import model_inputs, packs_rows, select_rows
from rlboost.services.trainer.adapters.torch.routing import Balance, Replay, Routers
from rlboost.services.trainer.adapters.torch.selected_logprobs import selected_logprobs
from rlboost.services.trainer.domain.batches.training_row import SequenceRow
from rlboost.shared.model.logit_limits import MAX_LOGITS
from rlboost.shared.wire.routed_experts import RoutedShape


def in_dtype(dtype: torch.dtype, device: torch.device) -> torch.autocast:
    """Return a context in which matrices are multiplied in `dtype`: float32 or bfloat16."""
    # Its cache would hold a rounded copy of every weight until the pass ends, and each copy is used once.
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=dtype is torch.bfloat16, cache_enabled=False)


class LogprobPass:
    """Forward passes of one model."""

    def __init__(
        self,
        model: Any,
        *,
        temperature: float,
        dtype: torch.dtype,
        device: torch.device,
        max_logits: int = MAX_LOGITS,
        context: ContextGroup | None = None,
        replayed: RoutedShape | None = None,
        balances: bool = False,
    ) -> None:
        """Replace the model's `forward`, which FSDP2 surrounds with hooks, and register hooks on routers of experts.

        Args:
            model: a transformers model, in evaluation mode.
            temperature: divides the logits.
            dtype: dtype of matrix multiplications.
            device: the model's device.
            max_logits: logits that exist at a time; at least those of one token do.
            context: the ranks that divide the tokens of each micro-batch, if any.
            replayed: the shape of the rows' routed experts, which replace those of the model's routers.
            balances: whether `balance` gets gradients.

        Raises:
            ConfigError: `replayed` or `balances`, and the model has no known routers.

        """
        self._model = model
        self._forward = model.forward
        self._packs = packs_rows(model)
        self._temperature = temperature
        self._dtype = dtype
        self._device = device
        self._chunk = max(1, max_logits // model.config.get_text_config().vocab_size)
        self._context = context
        self._balances = balances
        self._routers = Routers(model, required=balances or replayed is not None)
        self._replayed = replayed
        self.balance: Balance | None = None
        """Balance of experts over this rank's tokens in the last pass; None if the model is dense, or gradients were
        disabled."""
        model.forward = self._model_forward

    def __call__(self, rows: Sequence[SequenceRow]) -> Tensor:
        """Return the log-probabilities of all trained tokens, row by row, [tokens]."""
        batch, context = packed(rows), self._context
        shard = slice(0, len(batch.ids))
        if context is not None:
            batch = batch.padded(context.size)
            shard = context.slice_of(len(batch.ids))
        ids, positions = (torch.from_numpy(array).to(self._device) for array in (batch.ids, batch.predicts))
        targets, inputs = ids[positions + 1], model_inputs(batch, ids, packs=self._packs, context=context)
        n_real = min(shard.stop, sum(row.n_tokens for row in rows)) - shard.start
        self._routers.begin(n_real if torch.is_grad_enabled() else None, self._replay(rows, batch, shard))
        with in_dtype(self._dtype, self._device):
            if context is None:
                logprobs: Tensor = self._model(**inputs, positions=positions, targets=targets)
            else:
                own = context.positions(batch.predicts, len(ids))
                found = self._model(**inputs, positions=positions[own] - shard.start, targets=targets[own])
                logprobs = context.joined(found, own, len(positions))
        with torch.set_grad_enabled(self._balances and torch.is_grad_enabled()):
            self.balance = self._routers.end()
        return logprobs

    def _replay(self, rows: Sequence[SequenceRow], batch: Packed, shard: slice) -> Replay | None:
        """Return the recorded experts of this rank's slice of the tokens."""
        if self._replayed is None or (found := replayed(rows, batch.predicts, self._replayed)) is None:
            return None
        at, experts = found
        own = slice(*np.searchsorted(at, [shard.start, shard.stop]))
        positions, recorded = (torch.from_numpy(a).to(self._device) for a in (at[own] - shard.start, experts[own]))
        return Replay(positions, recorded.long())

    def _model_forward(self, *, positions: Tensor, targets: Tensor, **given: Any) -> Tensor:
        """Return the log-probabilities of `targets`, which the tokens at `positions` predict."""
        hidden = select_rows(self._model.base_model(**given).last_hidden_state[0], positions)
        return in_chunks(self._of_hidden, hidden, targets, self._chunk)

    def _of_hidden(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """Return log-probabilities of targets from the last layer's outputs, [tokens].

        The model's own `forward` gets them from its body. So whatever a family does to its logits after the output head
        still happens.
        """
        with _returning(self._model.base_model, hidden[None]):
            logits: Tensor = self._forward(use_cache=False).logits[0]
        return selected_logprobs(logits, targets, self._temperature)


def in_chunks(of_hidden: Callable[[Tensor, Tensor], Tensor], hidden: Tensor, targets: Tensor, n: int) -> Tensor:
    """Return `of_hidden(hidden, targets)`, [tokens], computed for at most `n` tokens at a time."""
    *earlier, last = zip(*(torch.split(part, n) for part in (hidden, targets)), strict=True)
    # The backward pass begins with the last chunk, so its logits may wait for it; those of others are recomputed.
    return torch.cat([*(checkpoint(of_hidden, *chunk, use_reentrant=False) for chunk in earlier), of_hidden(*last)])


class _BodyOutput:
    """The output of a model's body with nothing but the last hidden states."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getattr__(self, name: str) -> None:
        return None

    def __getitem__(self, index: Any) -> Any:
        return (self.last_hidden_state,)[index]


@contextmanager
def _returning(body: Any, hidden: Tensor) -> Iterator[None]:
    """Let a module return these hidden states, whatever its arguments."""
    body.forward = lambda *_, **__: _BodyOutput(hidden)
    try:
        yield
    finally:
        del body.forward
