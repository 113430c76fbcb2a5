"""Names of the weights of a mixture of experts.

Hugging Face files, vLLM and the weight store have one tensor per expert and projection. transformers computes with all
experts of a layer in two three-dimensional parameters, `experts.gate_up_proj` and `experts.down_proj`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

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


# --- Names of the weights ---------------------------------------------------------------------------------------------


_FUSED = re.compile(r"(.*\bexperts)\.(gate_up_proj|down_proj)")
_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Keys of `config.json` with the number of experts."""
FAMILIES = ("qwen3_moe", "qwen2_moe", "olmoe", "glm4_moe", "deepseek_v3")
"""Model types that are tested. Others work if their files have the same names."""
_PARTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


def names_of_expert(fused: str, expert: int) -> list[str]:
    """Return the names of one expert's matrices in a parameter, stacked along their rows; empty if it is not fused."""
    match = _FUSED.fullmatch(fused)
    return [f"{match[1]}.{expert}.{part}.weight" for part in _PARTS[match[2]]] if match else []


def n_matrices(name: str) -> int:
    """Return how many matrices of one expert are stacked in a parameter; 0 if it is not fused."""
    match = _FUSED.fullmatch(name)
    return len(_PARTS[match[2]]) if match else 0


def matrices(fused: str, tensor: Tensor) -> list[Tensor]:
    """Return the matrices of all experts in a fused parameter, [experts, rows, columns], as views, expert by expert."""
    return [matrix for rows in tensor for matrix in rows.chunk(n_matrices(fused))]


def split_experts(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors by their names in Hugging Face files; an expert's matrices are views."""
    views: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if not n_matrices(name):
            views[name] = tensor
            continue
        names = [one for expert in range(len(tensor)) for one in names_of_expert(name, expert)]
        views |= zip(names, matrices(name, tensor.detach()), strict=True)
    return views


def is_mixture(config: Mapping[str, Any]) -> bool:
    """Return True if a model with this `config.json` has experts."""
    return any(config.get(key) for key in _COUNTS)


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


def require_known_experts(model: Path) -> None:
    """Check a model directory as `require_known_layout` does; the weights of a dense model are not read.

    Raises:
        ConfigError: the experts have other names, or a file is invalid.

    """
    config = read_config(model)
    if is_mixture(config):
        require_known_layout(config, read_tensor_shapes(model))


def require_known_layout(config: Mapping[str, Any], names: Iterable[str]) -> None:
    """Check that the tensors of a mixture of experts have the names that `split_experts` gives.

    Args:
        config: the model's `config.json`.
        names: names of the tensors in the model's files.

    Raises:
        ConfigError: they have others.

    """
    if is_mixture(config) and not any(name.endswith(".experts.0.down_proj.weight") for name in names):
        raise ConfigError(
            f"model type {config.get('model_type')}: its files have no tensor experts.0.down_proj.weight: mixtures of "
            "experts are supported if they have gate_proj, up_proj and down_proj per expert, as those of "
            f"{', '.join(FAMILIES)}"
        )
