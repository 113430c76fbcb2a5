"""Policies trained by several rank processes of this machine, and the small models that they train."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig

from rlboost.services.trainer.adapters.megatron.policy import MegatronPolicy
from rlboost.services.trainer.adapters.torch.policy import RanksPolicy, TorchPolicy
from rlboost.services.trainer.adapters.torch.ranks import Layout
from rlboost.services.trainer.adapters.weights import RankShards
from rlboost.services.trainer.ports.engine import PolicySettings
from rlboost.shared.job.training import OptimizerSpec, TrainerSpec
from tests.support.megatron_cpu import python_path

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
    # 97 is prime: no number of ranks divides the vocabulary.
    "llama": LlamaConfig(**_SIZES, vocab_size=97, tie_word_embeddings=False),
    "qwen3-moe": Qwen3MoeConfig(
        **_SIZES,
        vocab_size=96,
        head_dim=16,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        norm_topk_prob=True,
        tie_word_embeddings=False,
    ),
}
_STEEP = {**_SIZES, "initializer_range": 0.2}
"""With attention that depends more on positions."""
SCALED_ROPE: dict[str, Any] = {
    "linear": Qwen2Config(**_STEEP, vocab_size=96, rope_parameters={"rope_type": "linear", "factor": 4.0}),
    # Of the four frequencies one stays, one is interpolated and two are divided.
    "llama3": LlamaConfig(
        **_STEEP,
        vocab_size=97,
        rope_parameters={
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ),
    "yarn": Qwen3Config(
        **_STEEP,
        vocab_size=96,
        head_dim=16,
        rope_parameters={"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 40},
    ),
}
"""Models with scaled rotary positions."""


def write(directory: Path, family: str) -> Path:
    """Write a random model, with random biases and norms, unless it exists."""
    if not directory.exists():
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model: Any = AutoModelForCausalLM.from_config((MODELS | SCALED_ROPE)[family])
            for name, parameter in model.named_parameters():
                if parameter.ndim == 1:
                    torch.nn.init.normal_(parameter, mean=0.0 if name.endswith("bias") else 1.0, std=0.2)
        model.save_pretrained(directory)
    return directory


def pids_of(policy: RanksPolicy) -> Sequence[int]:
    """Return the process ids of its ranks, rank 0 first."""
    assert policy._ranks is not None
    return policy._ranks.pids


def digests(policy: RanksPolicy) -> dict[Any, str]:
    """Return the digests of all shards of the model, which the ranks compute."""
    shards = policy.export_shards("base")
    assert isinstance(shards, RankShards)
    return shards.digests()


@contextmanager
def policy(
    optimizer: OptimizerSpec, *, device: str = "cpu", folder: Path | None = None, **settings: Any
) -> Iterator[RanksPolicy]:
    """Yield a policy and close it; settings are those of `PolicySettings` and `TrainerSpec`.

    On CPUs megatron-core needs `tests.support.megatron_cpu`, which the ranks get by their environment.
    """
    own = {name: settings.pop(name) for name in PolicySettings.model_fields if name in settings}
    spec = TrainerSpec(**{"backend": "megatron", **settings})
    kind = MegatronPolicy if spec.backend == "megatron" else TorchPolicy
    made = kind(PolicySettings(optimizer=optimizer, **own), Layout.of(spec), device=device, folder=folder)
    with pytest.MonkeyPatch.context() as patch:
        if device == "cpu":
            patch.setenv("PYTHONPATH", python_path())
        try:
            yield made
        finally:
            made.close()
