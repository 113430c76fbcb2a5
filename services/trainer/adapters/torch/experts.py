"""Experts of transformers' models under autocast.

torch's grouped matrix product ignores autocast, so experts with float32 weights would compute in float32 while the rest
of the model, and the engine that generates, compute in bfloat16.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, grouped_mm_experts_forward

EXPERTS = "rlboost_autocast"
"""The name under which transformers knows this implementation: a model's `experts_implementation`."""


class _Cast:
    """A module of experts whose parameters are read in another dtype."""

    def __init__(self, experts: Any, dtype: torch.dtype) -> None:
        self._experts = experts
        self._dtype = dtype

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._experts, name)
        return value.to(self._dtype) if isinstance(value, torch.nn.Parameter) else value


def autocast_experts(experts: Any, hidden: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted sum of each token's experts, computed in autocast's dtype if autocast is enabled.

    Args:
        experts: transformers' module with the parameters of a layer's experts.
        hidden: [tokens, hidden size].
        indices: each token's experts, [tokens, experts per token].
        weights: their weights, [tokens, experts per token].

    """
    device = hidden.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        experts, hidden = _Cast(experts, dtype), hidden.to(dtype)
    result: Tensor = grouped_mm_experts_forward(experts, hidden, indices, weights)
    return result


ALL_EXPERTS_FUNCTIONS.register(EXPERTS, autocast_experts)
