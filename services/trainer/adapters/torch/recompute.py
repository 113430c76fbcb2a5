"""Activation checkpointing (arXiv 1604.06174): what a layer computes is not kept, but computed again."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_layers import GradientCheckpointingLayer

from shared.errors import ConfigError


def recompute_layers(model: Any) -> None:
    """Keep of each layer of a transformers model no more than its input, from now on.

    transformers' own switch works in training mode only, which would also turn dropout on. Layers that FSDP2 shards
    are whole for the second time, too: its hooks are around `forward`, and before a layer's backward pass. What drops
    values in the forward pass must still do so in the backward pass.

    Raises:
        ConfigError: nobody has told which modules are its layers.

    """
    for layer in _layers(model):
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)


def check_recomputable(source: Path) -> None:
    """See that `recompute_layers` can serve the model in a Hugging Face directory; no weights are read.

    Raises:
        ConfigError: it cannot.

    """
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(source, local_files_only=True))
    except Exception:  # noqa: BLE001 - whoever loads the model says what is wrong with it
        return
    _layers(model)


def _layers(model: Any) -> list[Any]:
    found = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not found:
        raise ConfigError(
            f"trainer.activation_checkpointing: transformers does not mark the layers of {type(model).__name__}, so "
            "all that they compute is kept: leave it out, and lower trainer.micro_batch_tokens instead"
        )
    return found
