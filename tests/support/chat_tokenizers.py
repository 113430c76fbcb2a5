"""Tokenizers of the kinds that chat models have, with any chat template, and texts whose loss is seen."""

from __future__ import annotations

import re
from importlib import resources
from types import SimpleNamespace
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from rlboost.services.trainer.adapters.tokens import PromptTokenizer

BEGIN, END = "<s>", "</s>"
TEMPLATES = {
    file.name.removesuffix(".jinja"): file.read_text(encoding="utf-8")
    for file in (resources.files("trl") / "chat_templates").iterdir()
    if file.name.endswith(".jinja") and not file.name.endswith("_training.jinja")
}
"""The chat templates of model families, which TRL's package has as data."""
LLAMA_2 = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}[INST] {{ m['content'] }} [/INST]"
    "{% elif m['role'] == 'assistant' %} {{ m['content'] }}{{ eos_token }}{% else %}{{ m['content'] }}{% endif %}"
    "{% endfor %}"
)
NONCE = re.compile(r"w\d{4}x")
"""Words that occur in no template."""


def byte_tokenizer(template: str | None = None, end: str = "<|im_end|>") -> Any:
    """Return a tokenizer of bytes, as GPT-2 and Qwen have it."""
    alphabet = {text: i for i, text in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    made = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    wrapped: Any = PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token=BEGIN, eos_token=end, clean_up_tokenization_spaces=False
    )
    wrapped.chat_template = template
    return wrapped


def llama_tokenizer(template: str | None = LLAMA_2, *, adds_end: bool = False) -> Any:
    """Return a tokenizer that puts a space before a text and begins it with a token, as Llama 2 has it."""
    tokens = ["<unk>", BEGIN, END, *(f"<0x{i:02X}>" for i in range(256)), "▁", *"0123456789+=[]INST/", "46", "▁46"]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    made = Tokenizer(
        models.BPE(vocab=vocabulary, merges=[("4", "6"), ("▁", "46")], byte_fallback=True, unk_token="<unk>")
    )
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    made.add_special_tokens([AddedToken(BEGIN), AddedToken(END)])
    frame = f"{BEGIN} $A {END}" if adds_end else f"{BEGIN} $A"
    made.post_processor = processors.TemplateProcessing(single=frame, special_tokens=[(BEGIN, 1), (END, 2)])
    wrapped: Any = PreTrainedTokenizerFast(
        tokenizer_object=made,
        bos_token=BEGIN,
        eos_token=END,
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
    )
    wrapped.chat_template = template
    return wrapped


def prompt_tokenizer(tokenizer: Any) -> PromptTokenizer:
    """Return the trainer's use of a tokenizer."""
    config = SimpleNamespace(vocab_size=len(tokenizer), max_position_embeddings=1 << 20)
    return PromptTokenizer(tokenizer, config, [tokenizer.eos_token_id])


TOKENIZERS = {name: prompt_tokenizer(byte_tokenizer(text)) for name, text in TEMPLATES.items()}
CHAT = [
    {"role": "user", "content": "w0001x?"},
    {"role": "assistant", "content": "w0002x"},
    {"role": "user", "content": "w0003x \"'\\\n<b>é日</b>"},
]


def seen(tokens: PromptTokenizer, *given: Any) -> str:
    return tokens.decode(tokens.prompt(*given))
