"""Which GPUs train and serve a model with common settings: bytes of `memory.py` plus a CUDA context. Pure.

Trainers: bfloat16, AdamW, activation checkpointing, and one micro-batch of as many tokens as the longest sample on each
GPU, all of them trained. Workers: vLLM with bfloat16 weights. Computed, not measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from rlboost.jobs.memory import (
    ModelSize,
    TrainedModel,
    adapter_parameters,
    generating_bytes,
    kv_token_bytes,
    size_of,
    update_memory,
)
from rlboost.shared.job.training import LoraSpec, TrainerSpec

GPUS = {"24 GB": 22.5, "48 GB": 44.5, "80 GB": 79.2, "141 GB": 139.8}
"""Name -> GiB that CUDA reports."""
_GIB = 1 << 30
_CONTEXT_GIB = 1.5
"""CUDA context and libraries' workspaces."""
_UTILIZATION = 0.9
"""Part of a GPU's memory that vLLM takes."""
_KV_FILL = 0.85
"""Part of vLLM's cache that the manager fills."""


def full_gib(size: ModelSize, tokens: int, gpus: int = 1) -> float:
    """Return the trainer's peak on each GPU: float32 weights, gradients and moments, sharded by FSDP2."""
    return _gib(size, TrainedModel(size.total), tokens, gpus)


def lora_gib(size: ModelSize, tokens: int, lora: LoraSpec) -> float:
    """Return the trainer's peak with a bfloat16 base, which is not cast for matmuls, and a float32 adapter."""
    model = TrainedModel(size.total, frozen=True, n_added=adapter_parameters(size, lora))
    update = update_memory(size, model, _trainer(1), tokens)
    layer_inputs = 2 * tokens * size.hidden * size.layers
    update = update._replace(working_weights=0, activations=update.activations - layer_inputs)
    return update.total / _GIB + _CONTEXT_GIB


def n_samples(size: ModelSize, tokens: int, gib: float) -> int:
    """Return how many samples of this many tokens a worker's KV cache holds next to bfloat16 weights."""
    free = gib * _UTILIZATION - _CONTEXT_GIB - 2 * size.total / _GIB
    # `size.key` is the size of all key heads.
    return max(int(free * _KV_FILL * _GIB / (kv_token_bytes(size.layers, 1, size.key) * tokens)), 0)


def smallest(gib: float) -> str:
    """Return the name of the smallest GPU with that memory."""
    return next((name for name, size in GPUS.items() if gib <= size), "none")


class Variant(NamedTuple):
    """A way to train a model."""

    name: str
    gib: float
    """Peak on each of the trainer's GPUs."""
    gpu: str
    """The smallest that has it, or `none`."""
    generating_gib: dict[str, float]
    """`trainer.offload` -> what stays on each GPU while a reserved engine generates on it."""


class ModelFit(NamedTuple):
    """What fits of a model."""

    parameters: int
    active_parameters: int
    """Parameters that compute one token; fewer than all in a mixture of experts."""
    tokens: int
    variants: list[Variant]
    samples: dict[str, int]
    """GPU of a worker -> samples that its KV cache holds; 0: the model does not fit."""


def fit_of(config: Mapping[str, Any], tokens: int) -> ModelFit:
    """Return what fits of the model that a `config.json` describes.

    Args:
        config: the model's configuration.
        tokens: of the longest sample with its prompt.

    Raises:
        ConfigError: a kind of model whose memory cannot be computed.

    """
    size, lora = size_of(config.get("text_config", config)), LoraSpec(rank=32, alpha=64)
    whole = TrainedModel(size.total)
    adapted = TrainedModel(size.total, frozen=True, n_added=adapter_parameters(size, lora))
    muon = TrainedModel(size.total, muon=True)
    found = [
        _variant("all weights, 1 GPU", full_gib(size, tokens), whole),
        _variant("all weights with Muon, 1 GPU", _gib(size, muon, tokens, 1), muon),
        *(_variant(f"all weights, each of {n} GPUs", full_gib(size, tokens, n), whole, n) for n in (2, 4, 8)),
        _variant(f"LoRA of rank {lora.rank}, 1 GPU", lora_gib(size, tokens, lora), adapted),
    ]
    samples = {name: n_samples(size, tokens, gib) for name, gib in GPUS.items()}
    return ModelFit(size.total, size.active, tokens, found, samples)


def _variant(name: str, gib: float, model: TrainedModel, gpus: int = 1) -> Variant:
    stays = {
        offload: generating_bytes(model, _trainer(gpus).model_copy(update={"offload": offload})) / _GIB + _CONTEXT_GIB
        for offload in ("none", "optimizer", "all")
    }
    return Variant(name, gib, smallest(gib), stays)


def _gib(size: ModelSize, model: TrainedModel, tokens: int, gpus: int) -> float:
    return update_memory(size, model, _trainer(gpus), tokens).total / _GIB + _CONTEXT_GIB


def _trainer(gpus: int) -> TrainerSpec:
    return TrainerSpec(dtype="bfloat16", data_parallel=gpus, activation_checkpointing=True)
