"""Write the model before any training, with its tokenizer: `python -m rlboost.examples.countdown.model --out DIR`.

A Qwen3 of 0.2 M parameters with random weights; or, with `--rounded MODEL`, with those of a trained one in bfloat16.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from rlboost.examples.countdown.task import BOS, EOS, PAD, VOCABULARY
from rlboost.examples.countdown.tokenizer import MAX_LENGTH, pretrained

_SEED = 0


def build_model() -> Qwen3ForCausalLM:
    """Return the model with random weights, float32."""
    special = {
        "bos_token_id": VOCABULARY.index(BOS),
        "eos_token_id": VOCABULARY.index(EOS),
        "pad_token_id": VOCABULARY.index(PAD),
    }
    config = Qwen3Config(
        vocab_size=len(VOCABULARY),
        hidden_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        intermediate_size=192,
        max_position_embeddings=MAX_LENGTH,
        rope_theta=10000.0,
        tie_word_embeddings=True,
        **special,
    )
    model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig(do_sample=True, temperature=1.0, top_k=0, **special)
    return model


def write(out: Path, tokenizer: PreTrainedTokenizerFast, rounded: Path | None) -> None:
    """Write a model's folder: with random weights, or with those of the model in `rounded` in bfloat16."""
    torch.manual_seed(_SEED)
    model = build_model()
    if rounded is not None:
        trained = Qwen3ForCausalLM.from_pretrained(rounded, dtype=torch.bfloat16)
        model = model.bfloat16()
        model.load_state_dict(trained.state_dict())
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


def main(vocabulary: Sequence[str] = VOCABULARY, chat_template: str | None = None) -> None:
    """Write the folder that the command line names; `vocabulary` has the text of each token, by token id."""
    parser = argparse.ArgumentParser(description="Write a model of 0.2 M parameters.")
    parser.add_argument("--out", type=Path, required=True, help="the directory to write")
    parser.add_argument("--rounded", type=Path, help="a trained model, whose weights are taken in bfloat16")
    asked = parser.parse_args()
    tokenizer = pretrained(vocabulary)
    if chat_template is not None:
        tokenizer.chat_template = chat_template
    write(asked.out, tokenizer, asked.rounded)


if __name__ == "__main__":
    main()
