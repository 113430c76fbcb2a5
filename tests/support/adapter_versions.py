"""LoRA adapters of tiny models: as versions that a worker has pulled, and merged."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from rlboost.shared.weights.cache import PulledVersion
from rlboost.shared.weights.cached_version import AdaptedVersion
from tests.support import tiny_models
from tests.support.staged_versions import pulled
from tests.support.staged_weights import shard

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")


def pulled_base(model: Any, directory: Path) -> PulledVersion:
    """Return the model as version 0."""
    return pulled((shard(*item) for item in tiny_models.weights(model)), directory)


def adapter_tensors(
    model: Any, targets: Sequence[str] = (*ATTENTION, *MLP), *, rank: int = 4, seed: int = 0
) -> dict[str, torch.Tensor]:
    """Return the tensors of an adapter that changes log-probabilities by much, under PEFT's names."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for name, weight in tiny_models.weights(model):
        module = name.removesuffix(".weight")
        if module.rpartition(".")[2] in targets:
            rows, columns = weight.shape
            found[f"base_model.model.{module}.lora_A.weight"] = torch.randn(rank, columns, generator=generator)
            found[f"base_model.model.{module}.lora_B.weight"] = torch.randn(rows, rank, generator=generator) * 0.02
    return found


def staged_adapter(
    base: PulledVersion, tensors: dict[str, torch.Tensor], directory: Path, *, version: int = 1, alpha: float = 8.0
) -> AdaptedVersion:
    """Return an adapter version as a worker has pulled it."""
    rank = next(tensor.shape[0] for name, tensor in tensors.items() if "lora_A" in name)
    config = json.dumps({"peft_type": "LORA", "r": rank, "lora_alpha": alpha})
    version_ = pulled((shard(*item) for item in tensors.items()), directory, version, base=base, adapter_json=config)
    return AdaptedVersion(version_, base)


def merged(model: Any, staged: AdaptedVersion) -> Any:
    """Return a copy of the model with the adapter merged into its weights."""
    changed = copy.deepcopy(model)
    changed.load_state_dict(dict(staged.tensors()), strict=False)
    return changed
