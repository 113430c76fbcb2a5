"""torch.compile of a model's layers.

Layers of a model share their compiled code. Attention is not compiled: it is computed row by row, so its code would
depend on the rows of each micro-batch.
"""

from __future__ import annotations

from typing import Any

import torch

from rlboost.services.trainer.adapters.torch.layers import layers_of
from rlboost.services.trainer.adapters.torch.packing import packs_rows
from rlboost.shared.errors import ConfigError
from rlboost.shared.model.routers import routers_of

SETTING = "trainer.compile"


def compile_layers(model: Any, device: str) -> None:
    """Compile each layer of a transformers model. Call it before layers are wrapped otherwise.

    The first micro-batches compile, not this call. The number of tokens is a variable of the code.

    Args:
        model: the model.
        device: `cpu`, `cuda` or a GPU with its number.

    Raises:
        ConfigError: the model or the machine does not support it.

    """
    layers = require_compilable(model)
    _require_compiler(device)
    for layer in layers:
        layer.forward = torch.compile(layer.forward, dynamic=True)


def require_compilable(model: Any) -> list[Any]:
    """Return the layers that `compile_layers` compiles. The model may be on the meta device.

    Raises:
        ConfigError: the model does not support it.

    """
    if routers_of(model) or not packs_rows(model):
        raise ConfigError(
            f"{SETTING}: not supported for {type(model).__name__}, whose layers are experts or compute more than "
            "causal attention: remove the setting"
        )
    return layers_of(model, SETTING)


def _require_compiler(device: str) -> None:
    """Compile a function of one operation, since torch has no question for it.

    Raises:
        ConfigError: torch cannot compile for this device.

    """
    try:
        torch.compile(_cosine)(torch.zeros(2, device=device))
    except torch.cuda.OutOfMemoryError:
        raise
    except Exception as error:  # of the compiler, of its libraries, or of a missing compiler
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ConfigError(
            f"{SETTING}: torch.compile does not work on this machine ({reason}): install a C++ compiler such as g++ "
            "where the trainer runs, or remove the setting"
        ) from error


def _cosine(value: torch.Tensor) -> torch.Tensor:
    return value.cos()
