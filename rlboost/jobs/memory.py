"""Bytes that a job needs on each GPU, from sizes alone. Pure; the figures are those of docs/gpu-memory.md.

These are lower bounds: activations, logits, CUDA contexts and libraries come on top.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from rlboost.shared.job.training import TrainerSpec


@dataclass(frozen=True)
class TrainedModel:
    """What determines the size of the trainer's state."""

    n_parameters: int
    frozen: bool = False
    """True if only an adapter is trained."""
    has_reference: bool = False
    """True if a copy of the model is kept for a KL penalty."""
    muon: bool = False


def state_bytes(model: TrainedModel, spec: TrainerSpec) -> int:
    """Return weights, optimizer state and gradients on each of the trainer's GPUs during an update.

    Per parameter: 16 bytes in float32 (weights 4, AdamW's moments 8, gradients 4), with Muon 12; 18 with megatron in
    bfloat16 (a float32 master copy); 4 or 2 if frozen. FSDP2 divides them by `data_parallel`; megatron by
    `tensor_parallel` x `pipeline_parallel`, and moments and master copies also by `data_parallel` with
    `distributed_optimizer`.
    """
    half = spec.dtype == "bfloat16"
    if model.frozen:
        per_parameter, sharded = (2.0 if half else 4.0), 0.0
    elif spec.backend == "megatron" and half:
        per_parameter, sharded = 6.0, 12.0
    else:
        per_parameter, sharded = 8.0, (4.0 if model.muon else 8.0)
    if model.has_reference:
        per_parameter += 2.0 if spec.backend == "megatron" and half else 4.0
    if spec.backend == "torch":
        return math.ceil(model.n_parameters * (per_parameter + sharded) / spec.data_parallel)
    n_replicas = spec.data_parallel if spec.distributed_optimizer else 1
    n_splits = spec.tensor_parallel * spec.pipeline_parallel
    return math.ceil(model.n_parameters * (per_parameter + sharded / n_replicas) / n_splits)


def generating_bytes(model: TrainedModel, spec: TrainerSpec) -> int:
    """Return what of that state stays on each GPU while reserved engines generate: `trainer.offload` moves the rest.

    Gradients, 4 bytes per parameter, exist only during an update, except with megatron.
    """
    if spec.offload == "all":
        return 0
    moments = 4.0 if model.muon else 12.0 if spec.backend == "megatron" and spec.dtype == "bfloat16" else 8.0
    freed = 0.0 if model.frozen or spec.backend == "megatron" else 4.0
    if spec.offload == "optimizer" and not model.frozen:
        freed += moments
    n_ranks = spec.data_parallel if spec.backend == "torch" else spec.tensor_parallel * spec.pipeline_parallel
    return max(0, state_bytes(model, spec) - math.floor(model.n_parameters * freed / n_ranks))


def kv_token_bytes(n_layers: int, n_kv_heads: int, head_dim: int, element_bytes: int = 2) -> int:
    """Return the keys and values of one token in all layers; elements of bfloat16 have 2 bytes."""
    return 2 * n_layers * n_kv_heads * head_dim * element_bytes


def engine_bytes(n_parameters: int, kv_bytes_per_token: int, max_tokens: int, tensor_parallel: int) -> int:
    """Return bfloat16 weights and the KV cache of one sample on each GPU of an engine."""
    return math.ceil((2 * n_parameters + kv_bytes_per_token * max_tokens) / tensor_parallel)
