"""Names of the weights of a mixture of experts.

Hugging Face files, vLLM and the weight store have one tensor per expert and projection. transformers computes with all
experts of a layer in two three-dimensional parameters, `experts.gate_up_proj` and `experts.down_proj`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlboost.shared.errors import ConfigError
from rlboost.shared.model.folder import read_config, read_tensor_shapes

if TYPE_CHECKING:
    from torch import Tensor

_FUSED = re.compile(r"(.*\bexperts)\.(gate_up_proj|down_proj)")
_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Keys of `config.json` with the number of experts."""
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
        names: of the tensors in its files.

    Raises:
        ConfigError: they have others.

    """
    if is_mixture(config) and not any(name.endswith(".experts.0.down_proj.weight") for name in names):
        raise ConfigError(
            f"model type {config.get('model_type')}: its files have no tensor experts.0.down_proj.weight: mixtures of "
            "experts are supported if they have gate_proj, up_proj and down_proj per expert, as those of Qwen"
        )
