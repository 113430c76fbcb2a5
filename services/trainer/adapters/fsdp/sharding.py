"""Builds models of transformers that FSDP2 shards (arXiv 2304.11277).

A layer's parameters are gathered only while the layer computes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoConfig, AutoModelForCausalLM

from rlboost.services.trainer.adapters.torch.activation_checkpointing import checkpoint_activations
from rlboost.services.trainer.adapters.torch.compilation import compile_layers
from rlboost.services.trainer.adapters.torch.experts import EXPERTS
from rlboost.services.trainer.adapters.torch.layers import layers_of
from rlboost.services.trainer.adapters.torch.lora import Adapter
from rlboost.services.trainer.adapters.torch.value_model import ValueModel
from rlboost.shared.errors import ConfigError
from rlboost.shared.job.training import LoraSpec

SETTING = "trainer.data_parallel, trainer.context_parallel"


def empty_model(source: Path, attention: str) -> Any:
    """Return a causal language model on the meta device: no rank ever holds whole weights, each reads its own rows.

    Args:
        source: a Hugging Face directory; only its configuration is read.
        attention: the model's `attn_implementation`.

    Raises:
        ConfigError: the directory holds no causal language model.

    """
    try:
        config = AutoConfig.from_pretrained(source, local_files_only=True)
        with init_empty_weights(include_buffers=False):
            module: Any = AutoModelForCausalLM.from_config(
                config, dtype=torch.float32, attn_implementation=attention, experts_implementation=EXPERTS
            )
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"model {source} cannot be loaded as a causal language model: {error}") from error
    module.tie_weights()
    return module.eval()


def empty_critic(source: Path, attention: str) -> ValueModel:
    """Return a critic on the meta device, whose body's parameters have the names of the files in `source`.

    The arguments and errors are those of `empty_model`.
    """
    module = empty_model(source, attention)
    with torch.device("meta"):
        return ValueModel(module.base_model, module.base_model_prefix).eval()


def add_adapter(module: Any, spec: LoraSpec, dtype: torch.dtype) -> Adapter:
    """Freeze an empty model in `dtype`, and add an adapter in float32.

    Raises:
        ConfigError: see `Adapter`.

    """
    for parameter in module.parameters():
        parameter.data = parameter.data.to(dtype)
    return Adapter(module, {name: tuple(tensor.shape) for name, tensor in module.named_parameters()}, spec)


def shard(module: Any, device: str, mesh: DeviceMesh) -> None:
    """Shard an empty module, in place, and allocate this rank's shards uninitialized. A collective call of all ranks.

    Args:
        module: a causal language model or a critic on the meta device, but for its buffers. Each of its layers is
            gathered by itself, everything else with the module.
        device: `cpu` or `cuda`.
        mesh: the ranks. Its last dimension shares the model; a dimension before it makes it HSDP: gradients are
            also summed over it.

    Raises:
        ConfigError: transformers does not mark the model's layers.

    """
    buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
    for sharded in (*layers_of(module, SETTING), module):
        # The root too: by default it stays gathered until the backward pass, which a frozen model does not have.
        fully_shard(sharded, mesh=mesh, reshard_after_forward=True)
        # By default FSDP2 divides by the number of ranks.
        sharded.set_force_sum_reduction_for_comms(True)
        sharded.set_gradient_divide_factor(1.0)
    module.to_empty(device=device)
    for name, buffer in module.named_buffers():
        buffer.copy_(buffers[name])


def prepare_layers(module: Any, device: str, *, activation_checkpointing: bool, compiled: bool) -> None:
    """Compile layers, and make them recompute activations in the backward pass, as asked. Call it before `shard`.

    Raises:
        ConfigError: the model does not support it.

    """
    if compiled:
        compile_layers(module, device)
    if activation_checkpointing:
        checkpoint_activations(module)


def saved_buffers(module: Any) -> dict[str, Tensor]:
    """Return the buffers that checkpoints of the module have."""
    saved = module.state_dict()
    return {name: buffer for name, buffer in module.named_buffers() if name in saved}
