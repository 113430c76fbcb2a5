"""Which model fits which GPU: memory of the trainer and of a worker, computed, not measured.

The bytes are those of `docs/gpu-memory.md`: bfloat16, AdamW, activation checkpointing, micro-batches of 4,096 tokens
that are all trained. `python -m benchmarks.gpu_fit --write` puts the tables into `docs/first-settings.md`.
"""

from __future__ import annotations

from typing import NamedTuple

from rlboost.jobs.memory import TrainedModel, kv_token_bytes, state_bytes
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


class Model(NamedTuple):
    """The sizes of a model."""

    name: str
    hidden: int
    layers: int
    mlp: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    tied: bool

    @property
    def embeddings(self) -> int:
        """Return the number of weights of the embedding and the output head."""
        return self.vocabulary * self.hidden * (1 if self.tied else 2)

    @property
    def parameters(self) -> int:
        """Return the number of weights, without norms."""
        attention = self.hidden * self.head_dim * 2 * (self.heads + self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.mlp) + self.embeddings

    @property
    def kv_bytes(self) -> int:
        """Return the bytes of one token in a bfloat16 KV cache."""
        return kv_token_bytes(self.layers, self.kv_heads, self.head_dim)


MODELS = (
    Model("Qwen3-0.6B", 1024, 28, 3072, 16, 8, 128, 151936, tied=True),
    Model("Llama-3.2-1B", 2048, 16, 8192, 32, 8, 64, 128256, tied=True),
    Model("Qwen3-1.7B", 2048, 28, 6144, 16, 8, 128, 151936, tied=True),
    Model("Qwen3-4B", 2560, 36, 9728, 32, 8, 128, 151936, tied=True),
    Model("Llama-3.1-8B", 4096, 32, 14336, 32, 8, 128, 128256, tied=False),
    Model("Qwen3-8B", 4096, 36, 12288, 32, 8, 128, 151936, tied=False),
    Model("Qwen3-14B", 5120, 40, 17408, 40, 8, 128, 151936, tied=False),
    Model("Qwen3-32B", 5120, 64, 25600, 64, 8, 128, 151936, tied=False),
)


def micro_batch_bytes(model: Model, *, input_bytes: int = 4) -> float:
    """Return logits with their gradient, the input of each layer, and one layer's activations."""
    logits = 2 * 2 * model.vocabulary * TOKENS + _GIB / 2
    inputs = input_bytes * model.hidden * model.layers * TOKENS
    one_layer = (20 * model.hidden + 8 * model.mlp) * TOKENS
    return logits + inputs + one_layer


def full_gib(model: Model, gpus: int = 1) -> float:
    """Return the trainer's peak on each GPU: float32 weights, gradients and moments, sharded by FSDP2."""
    cast = 2 * (model.embeddings + (model.parameters - model.embeddings) / model.layers)
    state = state_bytes(TrainedModel(model.parameters), TrainerSpec(dtype="bfloat16", data_parallel=gpus))
    return (state + cast + micro_batch_bytes(model)) / _GIB + _CONTEXT_GIB


def lora_gib(model: Model) -> float:
    """Return the trainer's peak with a bfloat16 base and a float32 adapter."""
    adapter = 16 * _LORA_FRACTION * model.parameters
    return (2 * model.parameters + adapter + micro_batch_bytes(model, input_bytes=2)) / _GIB + _CONTEXT_GIB


def samples(model: Model, gib: float) -> int:
    """Return how many samples of `TOKENS` tokens a worker's KV cache holds after bfloat16 weights."""
    free = gib * 0.9 - _CONTEXT_GIB - 2 * model.parameters / _GIB
    return max(int(free * _KV_FILL * _GIB / (model.kv_bytes * TOKENS)), 0)


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
    for model in MODELS:
        cells = (smallest(full_gib(model)), smallest(full_gib(model, 8)), smallest(lora_gib(model)))
        lines.append(f"| {model.name} | {model.parameters / 1e9:.1f} B | {' | '.join(cells)} |")
    lines += ["", f"| worker with vLLM | {' | '.join(_GPUS)} |", "|---" * (len(_GPUS) + 1) + "|"]
    for model in MODELS:
        counts = [samples(model, gib) for gib in _GPUS.values()]
        lines.append(f"| {model.name} | {' | '.join(str(count) if count else '-' for count in counts)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    run(PAGE, BLOCK, tables)
