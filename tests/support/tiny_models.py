"""Small randomly initialised Hugging Face models, and what an independent forward pass of one says. Imports torch."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Glm4MoeConfig,
    GPT2Config,
    LlamaConfig,
    OlmoeConfig,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from rlboost.shared.model.file_names import by_file_name

VOCABULARY = 96
MAX_LEN = 160

_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": MAX_LEN,
}
_TOKENS: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}

CONFIGS: dict[str, Any] = {
    "qwen3-tied": Qwen3Config(**_SIZES, **_TOKENS, num_key_value_heads=2, head_dim=16, tie_word_embeddings=True),
    "llama-untied": LlamaConfig(**_SIZES, **_TOKENS, num_key_value_heads=1, tie_word_embeddings=False),
    # The first layer is dense.
    "qwen3-moe": Qwen3MoeConfig(
        **_SIZES,
        **_TOKENS,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        norm_topk_prob=True,
        mlp_only_layers=[0],
        tie_word_embeddings=False,
    ),
    "gpt2": GPT2Config(
        vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=MAX_LEN, **_TOKENS, tie_word_embeddings=True
    ),
}

_MIXTURE: dict[str, Any] = {**_SIZES, **_TOKENS, "num_experts_per_tok": 2, "tie_word_embeddings": False}
# The first layer of some is dense, as in the published models.
MIXTURES: dict[str, Any] = {
    "qwen3_moe": CONFIGS["qwen3-moe"],
    "qwen2_moe": Qwen2MoeConfig(
        **_MIXTURE,
        num_key_value_heads=2,
        num_experts=8,
        moe_intermediate_size=24,
        shared_expert_intermediate_size=40,
        norm_topk_prob=False,
    ),
    "olmoe": OlmoeConfig(**{**_MIXTURE, "intermediate_size": 24}, num_key_value_heads=2, num_experts=8),
    "glm4_moe": Glm4MoeConfig(
        **_MIXTURE,
        num_key_value_heads=2,
        head_dim=16,
        use_qk_norm=True,
        n_routed_experts=8,
        n_shared_experts=1,
        moe_intermediate_size=24,
        first_k_dense_replace=1,
        routed_scaling_factor=1.5,
    ),
    "deepseek_v3": DeepseekV3Config(
        **_MIXTURE,
        num_key_value_heads=4,
        n_routed_experts=8,
        n_shared_experts=1,
        n_group=2,
        topk_group=1,
        moe_intermediate_size=24,
        first_k_dense_replace=1,
        q_lora_rank=24,
        kv_lora_rank=16,
        qk_nope_head_dim=16,
        qk_rope_head_dim=16,
        v_head_dim=16,
    ),
}
"""Mixtures of experts, by model type."""


def make(config: Any, seed: int = 0) -> Any:
    """Return a float32 model whose distributions are neither flat nor peaked."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation="eager").eval()
        for parameter in model.parameters():
            if parameter.ndim > 1:
                torch.nn.init.normal_(parameter, std=1.5 * parameter.shape[-1] ** -0.5)
    return model.requires_grad_(requires_grad=False)


def save_config(config: Any, directory: Path) -> Path:
    """Write `config.json` only, and return the directory."""
    copy.deepcopy(config).save_pretrained(directory)
    return directory


def split_experts(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors of these models by their names in files; those of experts are views."""
    parts = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
    names = {
        name: [f"{layer}.{expert}.{part}.weight" for expert in range(len(tensor)) for part in parts[last]]
        for name, tensor in tensors.items()
        for layer, _, last in [name.rpartition(".")]
        if layer.endswith(".experts") and last in parts
    }
    return by_file_name(tensors, names)


def weights(model: Any) -> list[tuple[str, torch.Tensor]]:
    """Return what a checkpoint holds: each tensor once, tied ones under their first name."""
    seen: set[int] = set()
    kept = []
    for name, tensor in split_experts(model.state_dict()).items():
        if tensor.data_ptr() not in seen:
            seen.add(tensor.data_ptr())
            kept.append((name, tensor))
    return kept


def logprobs(model: Any, prompt: Sequence[int], tokens: Sequence[int], temperature: float = 1.0) -> list[float]:
    """Return each completion token's log-probability by one plain forward pass without any cache."""
    ids = torch.tensor([[*prompt, *tokens]])
    logits = model(input_ids=ids, use_cache=False).logits[0].double() / temperature
    rows = torch.log_softmax(logits, dim=-1)[len(prompt) - 1 : -1]
    found: list[float] = rows.gather(1, torch.tensor(tokens)[:, None])[:, 0].tolist()
    return found
