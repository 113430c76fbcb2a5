"""Small random models of families whose files differ from transformers' models, or that have towers. Imports torch."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    Ernie4_5_MoeConfig,
    Gemma3Config,
    Gemma4Config,
    GptOssConfig,
    GraniteMoeConfig,
    MiniMaxM2Config,
    Mistral3Config,
    MixtralConfig,
    Qwen3_5Config,
    Qwen3_5MoeConfig,
    Qwen3NextConfig,
)

_TEXT: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 160,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
_WINDOWED: dict[str, Any] = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}
# vLLM's kernels for CPUs support no smaller heads.
_RECURRENT: dict[str, Any] = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "layer_types": ["linear_attention", "full_attention"],
}
_EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
}
_TOWER: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
_QWEN_TOWER: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "depth": 1,
    "num_heads": 2,
    "out_hidden_size": 64,
    "patch_size": 14,
}
_QWEN_TOKENS: dict[str, Any] = {
    "image_token_id": 90,
    "video_token_id": 91,
    "vision_start_token_id": 92,
    "vision_end_token_id": 93,
}
CONFIGS: dict[str, Any] = {
    "ernie4_5_moe": Ernie4_5_MoeConfig(
        **_TEXT, moe_num_experts=4, moe_k=2, moe_intermediate_size=64, moe_layer_start_index=1
    ),
    "gemma3": Gemma3Config(
        text_config={**_TEXT, **_WINDOWED},
        vision_config={**_TOWER, "image_size": 28, "patch_size": 14},
        mm_tokens_per_image=4,
        image_token_index=90,
        boi_token_index=91,
        eoi_token_index=92,
    ),
    "gemma4": Gemma4Config(
        text_config={
            **_TEXT,
            **_WINDOWED,
            "global_head_dim": 32,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": 96,
        },
    ),
    "gpt_oss": GptOssConfig(**_TEXT, **_WINDOWED, num_local_experts=4, num_experts_per_tok=2),
    "granitemoe": GraniteMoeConfig(**_TEXT, num_local_experts=4, num_experts_per_tok=2),
    "minimax_m2": MiniMaxM2Config(**_TEXT, num_local_experts=4, num_experts_per_tok=2),
    "mistral3": Mistral3Config(
        text_config={**_TEXT, "model_type": "ministral3"},
        vision_config={**_TOWER, "model_type": "pixtral", "head_dim": 16, "image_size": 28, "patch_size": 14},
        image_token_index=90,
    ),
    "mixtral": MixtralConfig(**_TEXT, num_local_experts=4, num_experts_per_tok=2, sliding_window=None),
    "qwen3_5": Qwen3_5Config(text_config={**_TEXT, **_RECURRENT}, vision_config=_QWEN_TOWER, **_QWEN_TOKENS),
    "qwen3_5_moe": Qwen3_5MoeConfig(
        text_config={**_TEXT, **_RECURRENT, **_EXPERTS}, vision_config=_QWEN_TOWER, **_QWEN_TOKENS
    ),
    "qwen3_next": Qwen3NextConfig(**_TEXT, **_RECURRENT, **_EXPERTS),
}
"""By model type."""
WITH_TOWERS = ("gemma3", "gemma4", "mistral3", "qwen3_5", "qwen3_5_moe")


def class_of(family: str) -> Any:
    """Return transformers' class of all parts of a model."""
    return AutoModelForImageTextToText if family in WITH_TOWERS else AutoModelForCausalLM


def make(family: str, seed: int = 0) -> Any:
    """Return a float32 model whose distributions are neither flat nor peaked."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = class_of(family).from_config(copy.deepcopy(CONFIGS[family]), attn_implementation="eager").eval()
        for parameter in model.parameters():
            if parameter.ndim > 1:
                torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    return model.requires_grad_(requires_grad=False)


def write(directory: Path, family: str, seed: int = 0) -> Path:
    """Write config and weights, and return the directory."""
    make(family, seed).save_pretrained(directory)
    return directory


def load(directory: Path, family: str) -> Any:
    """Return the model in a directory, as transformers loads it."""
    return class_of(family).from_pretrained(directory, attn_implementation="eager").eval()
