"""What the torch backend and FSDP2 require of a model for a job's settings. They check the same when they load it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from rlboost.services.trainer.adapters.fsdp.sharding import SETTING as FSDP
from rlboost.services.trainer.adapters.torch.activation_checkpointing import SETTING as CHECKPOINTING
from rlboost.services.trainer.adapters.torch.attention_choice import attention_of, require_packed
from rlboost.services.trainer.adapters.torch.compilation import require_compilable
from rlboost.services.trainer.adapters.torch.layers import layers_of
from rlboost.services.trainer.adapters.torch.lora import Adapter
from rlboost.services.trainer.adapters.torch.routing import require_routers
from rlboost.shared.job.training import LoraSpec

CHECKS: dict[str, Callable[[Any], object]] = {
    "context_parallel": lambda model: require_packed(model.config, model.config._attn_implementation),  # noqa: SLF001 - it has no public name
    "data_parallel": partial(layers_of, setting=FSDP),
    "compile": require_compilable,
    "activation_checkpointing": partial(layers_of, setting=CHECKPOINTING),
    "router_aux_loss_coef": require_routers,
    "router_replay": require_routers,
}
"""Key of `trainer` -> raises ConfigError if a transformers model does not support it."""


def require_adaptable(model: Any, adapter: LoraSpec) -> None:
    """Check that an adapter can be added to a model, which this changes.

    Raises:
        ConfigError: PEFT is not installed, or `lora.targets` names modules that cannot have an adapter.

    """
    Adapter(model, {name: tuple(tensor.shape) for name, tensor in model.named_parameters()}, adapter)


def model_without_weights(source: Path) -> Any:
    """Return the model in a Hugging Face directory on the meta device; None if it cannot be built."""
    try:
        config = AutoConfig.from_pretrained(source, local_files_only=True)
        attention = attention_of(config, warns=False)
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    except Exception:  # noqa: BLE001 - loading the model reports what is wrong with it
        return None
