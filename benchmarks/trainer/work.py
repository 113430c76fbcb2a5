"""The measured work: rows with the length distribution of the Countdown demo after training."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoConfig, AutoModelForCausalLM, Qwen2Config, Qwen3Config

from rlboost.services.trainer.domain.plan import TrainingRow
from tests.support.training_rows import training_row

GROUP_SIZE = 8
QUANTILES = ((0.0, 12), (0.1, 22), (0.5, 62), (0.75, 122), (0.9, 202), (0.95, 256), (1.0, 256))
"""(fraction of completions, maximal tokens of that fraction)."""


class Case(NamedTuple):
    """A model, and how much of it an update takes."""

    name: str
    config: Any
    groups: int
    micro_batch_tokens: int
    prompt_tokens: int = 10
    stretch: int = 1
    """Factor on the demo's completion lengths."""


def cases(device: str) -> list[Case]:
    """Return the demo's model, and one whose time is spent in matrix products: on a GPU that has to be larger."""
    demo = AutoConfig.from_pretrained("examples/countdown/base")
    if device != "cpu":
        half_billion = Qwen2Config(
            vocab_size=151_936,
            hidden_size=896,
            intermediate_size=4864,
            num_hidden_layers=24,
            num_attention_heads=14,
            num_key_value_heads=2,
            max_position_embeddings=32_768,
            tie_word_embeddings=True,
        )
        return [Case("demo", demo, 32, 16_384), Case("0.5b", half_billion, 8, 8192, prompt_tokens=128, stretch=8)]
    larger = Qwen3Config(
        vocab_size=8192,
        hidden_size=384,
        intermediate_size=1024,
        num_hidden_layers=6,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
    )
    return [Case("demo", demo, 16, 2048), Case("larger", larger, 2, 1024)]


def write_model(case: Case, folder: Path) -> Path:
    """Write a model of the case with random weights."""
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(case.config)
    model.save_pretrained(folder)
    return folder


def groups(case: Case, seed: int = 0) -> list[list[TrainingRow]]:
    """Return the groups of one update, in the order in which they are complete: that of their longest row."""
    draw = random.Random(seed)

    def row(prompt: Sequence[int]) -> TrainingRow:
        n = _length(draw.random()) * case.stretch
        tokens = [draw.randrange(3, case.config.vocab_size) for _ in range(n)]
        logprobs = [-4.5 + draw.random() for _ in tokens]
        return training_row(prompt, tokens, logprobs, draw.gauss(0, 1))

    made = []
    for _ in range(case.groups):
        prompt = [draw.randrange(3, case.config.vocab_size) for _ in range(case.prompt_tokens)]
        made.append([row(prompt) for _ in range(GROUP_SIZE)])
    return sorted(made, key=lambda group: max(row.n_tokens for row in group))


def _length(at: float) -> int:
    for (low, shorter), (high, longer) in pairwise(QUANTILES):
        if at <= high:
            return round(shorter + (longer - shorter) * (at - low) / (high - low))
    return QUANTILES[-1][1]
