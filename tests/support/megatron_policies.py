"""Policies trained by megatron-core in a few processes of this machine, and the small models that they train."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

from services.trainer.adapters.fsdp.policy import FsdpPolicy
from services.trainer.adapters.megatron.policy import MegatronPolicy
from services.trainer.adapters.ranks.policy import RanksPolicy
from shared.training import OptimizerSpec, TrainerSpec

_SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 160,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
MODELS: dict[str, Any] = {
    "qwen2": Qwen2Config(**_SIZES, vocab_size=96, tie_word_embeddings=False),
    "qwen3": Qwen3Config(**_SIZES, vocab_size=96, head_dim=16, tie_word_embeddings=True),
    # No two ranks can share 97 rows evenly.
    "llama": LlamaConfig(**_SIZES, vocab_size=97, tie_word_embeddings=False),
}


def write(directory: Path, family: str) -> Path:
    """Write a random model whose biases and norms are not the usual ones and noughts, unless it is there."""
    if not directory.exists():
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model: Any = AutoModelForCausalLM.from_config(MODELS[family])
            for name, parameter in model.named_parameters():
                if parameter.ndim == 1:
                    torch.nn.init.normal_(parameter, mean=0.0 if name.endswith("bias") else 1.0, std=0.2)
        model.save_pretrained(directory)
    return directory


@contextmanager
def policy(
    optimizer: OptimizerSpec, *, dtype: str = "float32", temperature: float = 1.0, device: str = "cpu", **settings: Any
) -> Iterator[RanksPolicy]:
    """A policy whose ranks are gone at the end; settings are `TrainerSpec`'s, and `reference`."""
    reference = settings.pop("reference", False)
    spec = TrainerSpec(**{"backend": "megatron", "dtype": dtype, **settings})
    kind = MegatronPolicy if spec.backend == "megatron" else FsdpPolicy
    made = kind(spec, optimizer, temperature=temperature, device=device, reference=reference)
    try:
        yield made
    finally:
        made.close()
