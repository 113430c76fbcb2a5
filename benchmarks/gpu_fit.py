"""Which model fits which GPU: memory of the trainer and of a worker, computed, not measured.

The bytes are those of `rlboost memory`: bfloat16, AdamW, activation checkpointing, micro-batches of 4,096 tokens on
each GPU that are all trained. `python -m benchmarks.gpu_fit --write` puts the tables into `docs/first-settings.md`.
"""

from __future__ import annotations

from rlboost.jobs.memory import ModelSize, TrainedModel, UpdateMemory, kv_token_bytes, update_memory
from rlboost.shared.job.training import TrainerSpec
from tests.support.generated_docs import ROOT, run

PAGE = ROOT / "docs" / "first-settings.md"
BLOCK = "gpus"
TOKENS = 4096
"""Tokens of a micro-batch, and of one sample on a worker."""
_GIB = 2**30
_GPUS = {"24 GB": 22.5, "48 GB": 44.5, "80 GB": 79.2, "141 GB": 139.8}
"""Name -> GiB that CUDA reports."""
_CONTEXT_GIB = 1.5
"""CUDA context and libraries' workspaces."""
_KV_FILL = 0.85
"""Part of vLLM's cache that the manager fills."""
_LORA_FRACTION = 0.01
"""Adapter's parameters of the model's: rank 32 on all linear layers is about that."""


def _qwen3(layers: int, hidden: int, heads: int, mlp: int, *, tied: bool) -> ModelSize:
    return ModelSize(layers, hidden, 128 * heads, 128 * 8, mlp, 151_936, tied, qk_norm=True)


MODELS = {
    "Qwen3-0.6B": _qwen3(28, 1024, 16, 3072, tied=True),
    "Llama-3.2-1B": ModelSize(16, 2048, 64 * 32, 64 * 8, 8192, 128_256, tied=True),
    "Qwen3-1.7B": _qwen3(28, 2048, 16, 6144, tied=True),
    "Qwen3-4B": _qwen3(36, 2560, 32, 9728, tied=True),
    "Llama-3.1-8B": ModelSize(32, 4096, 128 * 32, 128 * 8, 14_336, 128_256),
    "Qwen3-8B": _qwen3(36, 4096, 32, 12_288, tied=False),
    "Qwen3-14B": _qwen3(40, 5120, 40, 17_408, tied=False),
    "Qwen3-32B": _qwen3(64, 5120, 64, 25_600, tied=False),
}


def full_gib(size: ModelSize, gpus: int = 1) -> float:
    """Return the trainer's peak on each GPU: float32 weights, gradients and moments, sharded by FSDP2."""
    return _update(size, TrainedModel(size.total), gpus).total / _GIB + _CONTEXT_GIB


def lora_gib(size: ModelSize) -> float:
    """Return the trainer's peak with a bfloat16 base, which is not cast for matmuls, and a float32 adapter."""
    update = _update(size, TrainedModel(size.total, frozen=True))
    layer_inputs = 2 * TOKENS * size.hidden * size.layers
    update = update._replace(working_weights=0, activations=update.activations - layer_inputs)
    return (update.total + 16 * _LORA_FRACTION * size.total) / _GIB + _CONTEXT_GIB


def _update(size: ModelSize, model: TrainedModel, gpus: int = 1) -> UpdateMemory:
    spec = TrainerSpec(dtype="bfloat16", data_parallel=gpus, activation_checkpointing=True)
    return update_memory(size, model, spec, TOKENS)


def samples(size: ModelSize, gib: float) -> int:
    """Return how many samples of `TOKENS` tokens a worker's KV cache holds after bfloat16 weights."""
    free = gib * 0.9 - _CONTEXT_GIB - 2 * size.total / _GIB
    # `size.key` is the size of all key heads.
    return max(int(free * _KV_FILL * _GIB / (kv_token_bytes(size.layers, 1, size.key) * TOKENS)), 0)


def smallest(gib: float) -> str:
    """Return the smallest GPU with that memory, with the memory."""
    name = next((name for name, size in _GPUS.items() if gib <= size), "none")
    return f"{name} ({gib:.0f} GiB)"


def tables() -> str:
    """Return the trainer's and the workers' tables."""
    lines = [
        "| model | parameters | all weights, one GPU | all weights, 8 GPUs (FSDP2), each | LoRA, one GPU |",
        "|---|---|---|---|---|",
    ]
    for name, size in MODELS.items():
        cells = (smallest(full_gib(size)), smallest(full_gib(size, 8)), smallest(lora_gib(size)))
        lines.append(f"| {name} | {size.total / 1e9:.1f} B | {' | '.join(cells)} |")
    lines += ["", f"| worker with vLLM | {' | '.join(_GPUS)} |", "|---" * (len(_GPUS) + 1) + "|"]
    for name, size in MODELS.items():
        counts = [samples(size, gib) for gib in _GPUS.values()]
        lines.append(f"| {name} | {' | '.join(str(count) if count else '-' for count in counts)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    run(PAGE, BLOCK, tables)
