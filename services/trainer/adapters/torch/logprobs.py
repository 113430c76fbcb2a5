"""The pass through a causal language model of transformers that training consists of: tokens in, log-probabilities out.

Rows are padded on the right and given without an attention mask: under the causal mask no real token sees a pad. The
output head runs on positions that predict a trained token only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from services.trainer.adapters.torch.batch import padded
from services.trainer.adapters.torch.chosen import chosen_logprobs
from services.trainer.ports import Row


def in_dtype(dtype: torch.dtype, device: torch.device) -> torch.autocast:
    """Return the context in which matrices are multiplied in `dtype`: float32 or bfloat16."""
    # With its cache all weights' rounded copies would be there until the pass is over, and each is used once.
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=dtype is torch.bfloat16, cache_enabled=False)


class LogprobPass:
    """Passes of one model."""

    def __init__(self, model: Any, *, temperature: float, dtype: torch.dtype, device: torch.device) -> None:
        """Put a hook in front of the model's output head.

        Args:
            model: of transformers, in evaluation mode.
            temperature: log-probabilities are of the distribution at this one.
            dtype: in which matrices are multiplied.
            device: where the model is.

        """
        self._model = model
        self._temperature = temperature
        self._dtype = dtype
        self._device = device
        self._selected: Tensor | None = None
        model.get_output_embeddings().register_forward_pre_hook(self._select)

    def __call__(self, rows: Sequence[Row]) -> Tensor:
        """Return the log-probabilities of all trained tokens, row after row, [tokens]."""
        token_ids, self._selected = (torch.from_numpy(part).to(self._device) for part in padded(rows))
        targets = token_ids.flatten()[self._selected + 1]
        with in_dtype(self._dtype, self._device):
            logits: Tensor = self._model(input_ids=token_ids, use_cache=False).logits[0]
        self._selected = None
        return chosen_logprobs(logits, targets, self._temperature)

    def _select(self, _head: torch.nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Give the output head only the positions that predict a trained token, [1, tokens, hidden].

        As a hook in front of the head it leaves whatever a family does to its logits in place.
        """
        if self._selected is None:  # somebody else's pass
            return inputs
        return (inputs[0].flatten(0, 1).index_select(0, self._selected).unsqueeze(0),)
