"""The layers of a transformers model."""

from __future__ import annotations

from typing import Any

from transformers.modeling_layers import GradientCheckpointingLayer

from rlboost.shared.errors import ConfigError


def layers_of(model: Any, setting: str) -> list[Any]:
    """Return the layers of a transformers model, for a setting that replaces their `forward`.

    Raises:
        ConfigError: transformers does not mark the model's layers.

    """
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise ConfigError(
            f"{setting}: not supported for {type(model).__name__}, whose layers transformers does not mark: remove the "
            "setting"
        )
    return layers
