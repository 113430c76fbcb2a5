"""Forward pass of a causal language model of transformers, from rows to log-probabilities of their trained tokens.

Rows are padded on the right and passed without an attention mask: under the causal mask no real token sees padding. The
output head runs only on positions that predict a trained token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rlboost.services.trainer.adapters.torch.batch import padded
from rlboost.services.trainer.adapters.torch.selected_logprobs import selected_logprobs
from rlboost.services.trainer.domain.training_row import TrainingRow


def in_dtype(dtype: torch.dtype, device: torch.device) -> torch.autocast:
    """Return a context in which matrices are multiplied in `dtype`: float32 or bfloat16."""
    # Its cache would hold a rounded copy of every weight until the pass ends, and each copy is used once.
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=dtype is torch.bfloat16, cache_enabled=False)


class LogprobPass:
    """Forward passes of one model."""

    def __init__(self, model: Any, *, temperature: float, dtype: torch.dtype, device: torch.device) -> None:
        """Register a hook on the model's output head.

        Args:
            model: a transformers model, in evaluation mode.
            temperature: divides the logits.
            dtype: of matrix multiplications.
            device: the model's device.

        """
        self._model = model
        self._temperature = temperature
        self._dtype = dtype
        self._device = device
        self._selected: Tensor | None = None
        model.get_output_embeddings().register_forward_pre_hook(self._select)

    def __call__(self, rows: Sequence[TrainingRow]) -> Tensor:
        """Return the log-probabilities of all trained tokens, row by row, [tokens]."""
        token_ids, self._selected = (torch.from_numpy(part).to(self._device) for part in padded(rows))
        targets = token_ids.flatten()[self._selected + 1]
        with in_dtype(self._dtype, self._device):
            logits: Tensor = self._model(input_ids=token_ids, use_cache=False).logits[0]
        self._selected = None
        return selected_logprobs(logits, targets, self._temperature)

    def _select(self, _head: torch.nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Reduce the output head's input to positions that predict a trained token, [1, tokens, hidden].

        Because it is a hook, whatever a model family does to its logits after the head still happens.
        """
        if self._selected is None:  # a forward pass of other code
            return inputs
        return (inputs[0].flatten(0, 1).index_select(0, self._selected).unsqueeze(0),)
