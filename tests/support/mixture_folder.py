"""A folder with a small mixture of experts."""

from __future__ import annotations

import shutil
from pathlib import Path

from transformers import AutoConfig, AutoModelForCausalLM, Qwen3MoeConfig

from tests.support.black_box import ROOT


def mixture(folder: Path) -> Path:
    """Write a random mixture of experts with the tokenizer of the example."""
    base = ROOT / "examples/countdown/base"
    shutil.copytree(base, folder)
    known = AutoConfig.from_pretrained(base)
    config = Qwen3MoeConfig(
        vocab_size=known.vocab_size,
        hidden_size=32,
        intermediate_size=32,
        moe_intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=8,
        num_experts_per_tok=2,
        max_position_embeddings=known.max_position_embeddings,
        bos_token_id=known.bos_token_id,
        eos_token_id=known.eos_token_id,
        pad_token_id=known.pad_token_id,
        tie_word_embeddings=False,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder
