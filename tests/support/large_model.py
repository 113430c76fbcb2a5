"""A model so large that what it leaves behind on a GPU shows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Qwen3Config


def write(folder: Path) -> Path:
    """Write some 80 M parameters."""
    config = Qwen3Config(
        vocab_size=8192,
        hidden_size=768,
        intermediate_size=2304,
        num_hidden_layers=10,
        num_attention_heads=12,
        num_key_value_heads=4,
        head_dim=64,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    made: Any = AutoModelForCausalLM.from_config(config)
    made.save_pretrained(folder)
    return folder
