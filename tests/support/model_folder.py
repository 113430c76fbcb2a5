"""Hugging Face directories of small random models with a tokenizer whose words are `t3 t4 ... t95`."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import AutoModelForCausalLM, CTRLConfig, PreTrainedTokenizerFast

from tests.support.tiny_models import CONFIGS, MIXTURES, VOCABULARY

PAD, BOS, EOS = "<pad>", "<bos>", "<eos>"
TURNS = (
    "{% for m in messages %}{{ 't90 ' if m['role'] == 'user' else 't91 ' }}{{ m['content'] }} <eos> t92 {% endfor %}"
)
CHAT_TEMPLATE = TURNS + "{% if add_generation_prompt %}t91 {% endif %}"
"""Words 90 and 91 begin the turns of the user and of the model."""


def write_model(directory: Path, family: str = "qwen3-tied", seed: int = 0) -> Path:
    """Write config and weights, and return the directory."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: Any = AutoModelForCausalLM.from_config(copy.deepcopy((CONFIGS | MIXTURES)[family]))
    model.save_pretrained(directory)
    return directory


def write_unmarked_model(directory: Path) -> Path:
    """Write one whose layers transformers does not mark for activation checkpointing, and return the directory."""
    config = CTRLConfig(vocab_size=VOCABULARY, n_positions=160, n_embd=32, dff=48, n_layer=2, n_head=4)
    model: Any = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(directory)
    return directory


def write_character_tokenizer(directory: Path) -> Path:
    """Write a tokenizer of `VOCABULARY` tokens, one for nearly each printable character, and return the directory."""
    characters = [chr(code) for code in range(32, 127) if chr(code) not in "`~"]
    vocabulary = [PAD, BOS, EOS, *characters]
    assert len(vocabulary) == VOCABULARY
    tokenizer = Tokenizer(models.WordLevel({text: i for i, text in enumerate(vocabulary)}, unk_token=PAD))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    special = {"bos_token": BOS, "pad_token": PAD, "eos_token": EOS}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(directory)
    return directory


def with_chat_template(directory: Path, template: str) -> Path:
    """Give a tokenizer that was written a chat template, and return its directory."""
    file = directory / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "chat_template": template}))
    return directory


def write_tokenizer(
    directory: Path, words: int = VOCABULARY, *, eos: bool = True, texts: Mapping[int, str] | None = None
) -> Path:
    """Write a tokenizer of so many words, some of them with other `texts`, and return the directory."""
    vocabulary = [PAD, BOS, EOS, *((texts or {}).get(i, f"t{i}") for i in range(3, words))]
    tokenizer = Tokenizer(models.WordLevel({text: i for i, text in enumerate(vocabulary)}, unk_token=PAD))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, 1)])
    special = {"bos_token": BOS, "pad_token": PAD, **({"eos_token": EOS} if eos else {})}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(directory)
    return directory


def saved(policy: Any, source: Path, folder: Path) -> Path:
    """Save what a policy publishes as a model folder."""
    folder.mkdir()
    (folder / "config.json").write_text((source / "config.json").read_text())
    tensors = {
        shard.name: torch.frombuffer(bytearray(shard.data), dtype=getattr(torch, shard.dtype)).reshape(
            shard.local_shape
        )
        for shard in policy.export_shards()
    }
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder
