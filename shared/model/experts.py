"""Names of the weights of a mixture of experts.

Hugging Face files, vLLM and the weight store have one tensor per expert and projection. transformers computes with all
experts of a layer in two three-dimensional parameters, `experts.gate_up_proj` and `experts.down_proj`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from rlboost.shared.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

_FUSED = re.compile(r"(.*\bexperts)\.(gate_up_proj|down_proj)")
_PARTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


def names_of_expert(fused: str, expert: int) -> list[str]:
    """Return the names of one expert's matrices in a parameter, stacked along their rows; empty if it is not fused."""
    match = _FUSED.fullmatch(fused)
    return [f"{match[1]}.{expert}.{part}.weight" for part in _PARTS[match[2]]] if match else []


def split_experts(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors by their names in Hugging Face files; an expert's matrices are views."""
    views: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if not names_of_expert(name, 0):
            views[name] = tensor
            continue
        for expert, rows in enumerate(tensor.detach()):
            names = names_of_expert(name, expert)
            views |= zip(names, rows.chunk(len(names)), strict=True)
    return views


def require_known_layout(model_type: str, names: Iterable[str], in_files: Iterable[str]) -> None:
    """Check that a model's files have the expert tensors that `split_experts` gave.

    Raises:
        ConfigError: they do not.

    """
    if unknown := {name for name in names if "experts." in name} - set(in_files):
        raise ConfigError(
            f"model type {model_type}: its files have no tensor {min(unknown)}: mixtures of experts are supported if "
            "they are saved with gate_proj, up_proj and down_proj per expert, as those of Qwen and DeepSeek"
        )
