"""Bytes that a job needs on each GPU, from sizes alone. Pure; the figures are those of docs/gpu-memory.md.

These are lower bounds: activations, logits, CUDA contexts and libraries come on top.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from rlboost.jobs.model_size import ModelSize, adapter_parameters
from rlboost.shared.job.spec import JobSpec
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
    n_in_experts: int = 0
    """How many of the parameters are in experts, which megatron's `expert_parallel` divides."""
    n_added: int = 0
    """Parameters of an adapter and of a critic, which AdamW trains in float32; only with torch."""


def added_parameters(spec: JobSpec, size: ModelSize) -> int:
    """Return the parameters of a job's adapter and of its critic."""
    n_added = adapter_parameters(size, spec.adapter) if spec.kind != "eval" and spec.adapter is not None else 0
    return n_added + (size.critic if spec.kind == "rl" and spec.algorithm.critic is not None else 0)


def trained_model(spec: JobSpec, n_parameters: int, n_in_experts: int = 0, n_added: int = 0) -> TrainedModel:
    """Return what a job trains.

    Args:
        spec: the job.
        n_parameters: number of the model's parameters.
        n_in_experts: how many of them are in experts.
        n_added: see `added_parameters`.

    """
    return TrainedModel(
        n_parameters,
        frozen=spec.adapter is not None,
        has_reference=spec.kind == "rl" and spec.algorithm.kl_coef > 0 and spec.adapter is None,
        muon=spec.optimizer.name == "muon",
        n_in_experts=n_in_experts,
        n_added=n_added,
    )


def state_bytes(model: TrainedModel, spec: TrainerSpec) -> int:
    """Return weights, optimizer state and gradients on each of the trainer's GPUs during an update.

    Per parameter: 16 bytes in float32 (weights 4, AdamW's moments 8, gradients 4), with Muon 12; 18 with megatron in
    bfloat16 (a float32 master copy); 4 or 2 if frozen; 16 of an adapter or a critic. FSDP2 divides them by `fsdp_size`,
    by default `data_parallel` x `context_parallel`; megatron by `tensor_parallel` x `pipeline_parallel`, those of
    experts also by `expert_parallel`; moments and master copies by `data_parallel` x `context_parallel` with
    `distributed_optimizer`, of experts too.
    """
    added = 16 * model.n_added / spec.n_shards
    return math.ceil(_on_each_gpu(model, *_per_parameter(model, spec), spec) + added)


def generating_bytes(model: TrainedModel, spec: TrainerSpec) -> int:
    """Return what of that state stays on each GPU while reserved engines generate: `trainer.offload` moves the rest.

    Gradients, 4 bytes per parameter, exist only during an update; with megatron always, unless they are offloaded.
    """
    if spec.offload == "all":
        return 0
    stay = spec.backend == "megatron" and spec.offload == "none"
    gradients = 0.0 if model.frozen or stay else 4.0
    optimizer = _per_parameter(model, spec)[1] if spec.offload == "optimizer" else 0.0
    freed = _on_each_gpu(model, gradients, optimizer, spec)
    freed += (12 if spec.offload == "optimizer" else 4) * model.n_added / spec.n_shards
    return max(0, state_bytes(model, spec) - math.floor(freed))


def _per_parameter(model: TrainedModel, spec: TrainerSpec) -> tuple[float, float]:
    """Return bytes per parameter: of weights and gradients, and of the optimizer (moments and master copies)."""
    half = spec.dtype == "bfloat16"
    if model.frozen:
        weights, optimizer = (2.0 if half else 4.0), 0.0
    elif spec.backend == "megatron" and half:
        weights, optimizer = 6.0, 12.0
    else:
        weights, optimizer = 8.0, (4.0 if model.muon else 8.0)
    if model.has_reference:
        weights += 2.0 if spec.backend == "megatron" and half else 4.0
    return weights, optimizer


def _on_each_gpu(model: TrainedModel, weights: float, optimizer: float, spec: TrainerSpec) -> float:
    """Return bytes on each GPU for this many bytes per parameter: of weights and gradients, and of the optimizer."""
    if spec.backend == "torch":
        return model.n_parameters * (weights + optimizer) / spec.n_shards
    in_replica = model.n_parameters - model.n_in_experts * (1 - 1 / spec.expert_parallel)
    n_copies = spec.data_parallel * spec.context_parallel
    updated = model.n_parameters / n_copies if spec.distributed_optimizer else in_replica
    return (in_replica * weights + updated * optimizer) / (spec.tensor_parallel * spec.pipeline_parallel)


def kv_token_bytes(n_layers: int, n_kv_heads: int, head_dim: int, element_bytes: int = 2) -> int:
    """Return the keys and values of one token in all layers; elements of bfloat16 have 2 bytes."""
    return 2 * n_layers * n_kv_heads * head_dim * element_bytes


def engine_bytes(n_parameters: int, kv_bytes_per_token: int, max_tokens: int, tensor_parallel: int) -> int:
    """Return bfloat16 weights and the KV cache of one sample on each GPU of an engine."""
    return math.ceil((2 * n_parameters + kv_bytes_per_token * max_tokens) / tensor_parallel)
