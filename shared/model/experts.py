"""What `config.json` and transformers' model say of a mixture of experts."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlboost.shared.data.vision import TEXT
from rlboost.shared.errors import ConfigError
from rlboost.shared.model.folder import read_config, read_tensor_shapes
from rlboost.shared.wire import MAX_SAMPLE_BYTES, RoutedShape

if TYPE_CHECKING:
    from torch import Tensor


# --- The routers of transformers' mixtures of experts, where engine and trainer hook them -----------------------------


_LAYER = re.compile(r"\blayers\.(\d+)\.")


def routers_of(model: Any) -> list[tuple[int, Any]]:
    """Return (layer, router) of a transformers model: the `gate` next to the `experts` of a layer; none if dense."""
    return [
        (int(match[1]), layer.gate)
        for name, layer in model.named_modules()
        if hasattr(layer, "gate") and hasattr(layer, "experts") and (match := _LAYER.search(name))
    ]


def is_routing(output: Any) -> bool:
    """Return True if a router returned logits, weights and indices of experts, as tensors in this order."""
    return isinstance(output, tuple) and [one.is_floating_point() for one in output] == [True, True, False]


def require_routing(output: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return a router's logits [tokens, experts], and weights and indices of experts [tokens, experts per token].

    Raises:
        ConfigError: it returned something else, as routers of some families and of earlier releases do.

    """
    if not is_routing(output):
        raise ConfigError(
            "the model's routers return no logits, weights and indices of experts: remove trainer.router_replay and "
            "trainer.router_aux_loss_coef, or install the release of transformers that constraints.txt names"
        )
    logits, weights, indices = output
    return logits, weights, indices


# --- What config.json says --------------------------------------------------------------------------------------------


_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""Keys of `config.json` with the number of experts."""
FAMILIES = ("qwen3_moe", "qwen2_moe", "olmoe", "glm4_moe", "deepseek_v3")
"""Model types whose routers are tested; see `file_names` for the names of others."""


def is_mixture(config: Mapping[str, Any]) -> bool:
    """Return True if a model with this `config.json` has experts."""
    text = config.get(TEXT) or config
    return any(text.get(key) for key in _COUNTS)


def count_in_experts(model: Path) -> int:
    """Return how many parameters of the model in a directory are in experts, which only some tokens use.

    Raises:
        ConfigError: a file is missing or invalid.

    """
    return sum(math.prod(shape) for name, shape in read_tensor_shapes(model).items() if ".experts." in name)


def require_mixture(model: Path, key: str) -> None:
    """Check that the model in a directory is a mixture of experts, for a job key that needs one.

    Raises:
        ConfigError: it is dense, or a file is invalid.

    """
    config = read_config(model)
    if not is_mixture(config):
        raise ConfigError(
            f"{key} is for mixtures of experts, but {model} (model type {config.get('model_type')}) has none: remove it"
        )


def require_replayable(model: Path, max_tokens: int) -> RoutedShape:
    """Return the shape of the routed experts of a model, for `trainer.router_replay`.

    Raises:
        ConfigError: the model is dense or of an untested family, its configuration is incomplete, or samples of
            `max_tokens` tokens would be too large.

    """
    require_mixture(model, "trainer.router_replay")
    config = read_config(model)
    if config.get("model_type") not in FAMILIES:
        raise ConfigError(
            f"trainer.router_replay does not support model type {config.get('model_type')} (supported: "
            f"{', '.join(FAMILIES)}): remove it"
        )
    shape = shape_of_routing(config)
    if (n_bytes := max_tokens * shape.token_bytes) > MAX_SAMPLE_BYTES:
        raise ConfigError(
            f"trainer.router_replay: the routed experts of a completion may have {n_bytes:,} bytes, "
            f"{shape.token_bytes} per token, more than {MAX_SAMPLE_BYTES:,}: lower sampling.max_tokens, or remove "
            "router_replay"
        )
    return shape


def shape_of_routing(config: Mapping[str, Any]) -> RoutedShape:
    """Return the shape of the routed experts of a mixture with this `config.json`.

    Raises:
        ConfigError: it has no number of layers, or of experts per token.

    """
    n_experts = next(int(config[key]) for key in _COUNTS if config.get(key))
    if missing := [key for key in ("num_hidden_layers", "num_experts_per_tok") if not config.get(key)]:
        raise ConfigError(f"config.json of model type {config.get('model_type')} has no {missing[0]}: add it")
    return RoutedShape(config["num_hidden_layers"], config["num_experts_per_tok"], n_experts)
