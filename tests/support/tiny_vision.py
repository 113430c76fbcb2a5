"""A small random model that sees images, with its processor's files, and pictures of squares to name the color of."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForImageTextToText, PreTrainedTokenizerFast, Qwen3VLConfig

SPECIAL = ("<pad>", "<|im_end|>", "<|im_start|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>")
COLORS = {"red": (220, 30, 30), "green": (30, 200, 40), "blue": (40, 60, 220), "white": (235, 235, 235)}
WORDS = (*SPECIAL, "user", "assistant", "which", "color", "and", *COLORS)
IMAGE = WORDS.index("<|image_pad|>")
SIDE = 16
"""Pixels of a picture, which has four tokens."""
TEMPLATE = (
    "{% for m in messages %}<|im_start|> {{ m['role'] }} {{ m['content'] }} <|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|> assistant {% endif %}"
)
PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "size": {"shortest_edge": SIDE * SIDE, "longest_edge": 4096},
    "patch_size": 4,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}


def config(head_dim: int = 16) -> Any:
    """Return the configuration of a model with mixed positions and features of two layers of its tower.

    vLLM needs heads of 32 on a CPU.
    """
    text = {
        "vocab_size": len(WORDS),
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": head_dim,
        "max_position_embeddings": 96,
        "rope_parameters": {
            "rope_type": "default",
            "mrope_section": [head_dim // 4, head_dim // 8, head_dim // 8],
            "mrope_interleaved": True,
        },
        "eos_token_id": 1,
        "pad_token_id": 0,
    }
    tower = {
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_heads": 2,
        "patch_size": 4,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "out_hidden_size": 32,
        "num_position_embeddings": 16,
        "deepstack_visual_indexes": [0],
    }
    ids = {"image_token_id": IMAGE, "video_token_id": 0, "vision_start_token_id": 3, "vision_end_token_id": 4}
    return Qwen3VLConfig(text_config=text, vision_config=tower, tie_word_embeddings=True, **ids)


def make(seed: int = 0, steepness: float = 1.5, head_dim: int = 16) -> Any:
    """Return a float32 model whose distributions are neither flat nor peaked."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: Any = AutoModelForImageTextToText.from_config(config(head_dim), attn_implementation="sdpa").eval()
        for parameter in model.parameters():
            if parameter.ndim > 1:
                torch.nn.init.normal_(parameter, std=steepness * parameter[0].numel() ** -0.5)
    return model.requires_grad_(requires_grad=False)


def write(directory: Path, seed: int = 0, steepness: float = 1.5, head_dim: int = 16) -> Path:
    """Write a model with its processor's files, and return the directory."""
    make(seed, steepness, head_dim).save_pretrained(directory)
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    whole = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<|im_end|>",
        additional_special_tokens=list(SPECIAL[2:]),
    )
    whole.chat_template = TEMPLATE
    whole.save_pretrained(directory)
    (directory / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    return directory


def picture(color: str, seed: int = 0, size: tuple[int, int] = (SIDE, SIDE)) -> Image.Image:
    """Return a noisy picture of one color, (width, height)."""
    noise = np.random.default_rng(seed).integers(-15, 16, (size[1], size[0], 3))
    return Image.fromarray((np.array(COLORS[color]) + noise).clip(0, 255).astype(np.uint8))


def square(color: str, seed: int) -> Image.Image:
    """Return a picture of a square of one color, at any place before a gray background."""
    random = np.random.default_rng(seed)
    pixels = random.integers(90, 130, (24, 24, 3))
    row, column = random.integers(0, 12, 2)
    pixels[row : row + 12, column : column + 12] = np.array(COLORS[color]) + random.integers(-15, 16, (12, 12, 3))
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8))


def png(image: Image.Image) -> bytes:
    """Return an image as a file."""
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()
