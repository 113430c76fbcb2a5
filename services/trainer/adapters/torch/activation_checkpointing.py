"""Activation checkpointing (arXiv 1604.06174): recompute each layer's activations in the backward pass."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch.utils.checkpoint import checkpoint

from rlboost.services.trainer.adapters.torch.layers import layers_of

SETTING = "trainer.activation_checkpointing"


def checkpoint_activations(model: Any) -> None:
    """Make each layer of a transformers model save only its input for the backward pass.

    The switch of transformers is not used: it works in training mode only, which also enables dropout. Layers that
    FSDP2 shards are gathered for the recomputation too: its hooks wrap `forward`, and run before a layer's backward
    pass. Dropout that is active in the forward pass must still be active in the backward pass.

    Raises:
        ConfigError: transformers does not mark the model's layers.

    """
    for layer in layers_of(model, SETTING):
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
