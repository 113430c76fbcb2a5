"""Which model fits which GPU: memory of the trainer and of a worker, computed, not measured.

The bytes are those of `rlboost memory`: bfloat16, AdamW, activation checkpointing, micro-batches of 4,096 tokens on
each GPU that are all trained. `python -m benchmarks.gpu_fit --write` puts the tables into `docs/first-settings.md`.
"""

from __future__ import annotations

from rlboost.jobs.memory import GPUS, ModelSize, full_gib, lora_gib, n_samples, smallest
from rlboost.shared.job.training import LoraSpec
from tests.support.generated_docs import ROOT, run

PAGE = ROOT / "docs" / "first-settings.md"
BLOCK = "gpus"
TOKENS = 4096
"""Tokens of a micro-batch, and of one sample on a worker."""
_LORA = LoraSpec(rank=32, alpha=64)


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


def _cell(gib: float) -> str:
    return f"{smallest(gib)} ({gib:.0f} GiB)"


def tables() -> str:
    """Return the trainer's and the workers' tables."""
    lines = [
        "| model | parameters | all weights, one GPU | all weights, 8 GPUs (FSDP2), each | LoRA, one GPU |",
        "|---|---|---|---|---|",
    ]
    for name, size in MODELS.items():
        cells = map(_cell, (full_gib(size, TOKENS), full_gib(size, TOKENS, 8), lora_gib(size, TOKENS, _LORA)))
        lines.append(f"| {name} | {size.total / 1e9:.1f} B | {' | '.join(cells)} |")
    lines += ["", f"| worker with vLLM | {' | '.join(GPUS)} |", "|---" * (len(GPUS) + 1) + "|"]
    for name, size in MODELS.items():
        counts = [n_samples(size, TOKENS, gib) for gib in GPUS.values()]
        lines.append(f"| {name} | {' | '.join(str(count) if count else '-' for count in counts)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    run(PAGE, BLOCK, tables)
