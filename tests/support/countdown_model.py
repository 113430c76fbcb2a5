"""What a model of Countdown does by transformers alone: nothing of the project computes here. Imports torch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlboost.examples.countdown.reward import score
from tests.support import tiny_models
from tests.support.black_box import ROOT

EXAMPLE = ROOT / "examples/countdown"
CLEAR = 1e-3
"""Between the logits of the first and the second choice: far more than the rounding of another engine."""


class Decoded(NamedTuple):
    """A problem, and what greedy decoding makes of it."""

    row: dict[str, Any]
    prompt: list[int]
    tokens: list[int]
    passes: bool


class CountdownModel:
    """A Hugging Face folder of such a model."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        self._model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def clear_problems(self, max_tokens: int) -> list[Decoded]:
        """Decode the held-out problems greedily; return those that no rounding leads another way."""
        rows = [json.loads(line) for line in (EXAMPLE / "eval.jsonl").read_text().splitlines()]
        prompts = [self.tokenizer(row["prompt"])["input_ids"] for row in rows]
        # They are of one length, so none is padded.
        made = self._model.generate(
            torch.tensor(prompts),
            do_sample=False,
            max_new_tokens=max_tokens,
            output_logits=True,
            return_dict_in_generate=True,
        )
        first, second = torch.stack(made.logits, dim=1).topk(2).values.unbind(-1)
        decoded = []
        for row, prompt, whole, margins in zip(rows, prompts, made.sequences.tolist(), first - second, strict=True):
            tokens = self._until_end(whole[len(prompt) :])
            if margins[: len(tokens)].min() > CLEAR:
                decoded.append(Decoded(row, prompt, tokens, self.passes(row, tokens)))
        return decoded

    def passes(self, row: dict[str, Any], tokens: Sequence[int]) -> bool:
        """Return True if a completion solves its problem."""
        text = self.tokenizer.decode(tokens)
        return score([], [], [], completions_raw=[text], numbers=[row["numbers"]], target=[row["target"]]) == [1.0]

    def logprobs(self, prompt: Sequence[int], tokens: Sequence[int]) -> list[float]:
        """Return how likely each token of a completion is."""
        with torch.no_grad():
            return tiny_models.logprobs(self._model, prompt, tokens)

    def _until_end(self, tokens: list[int]) -> list[int]:
        end = self.tokenizer.eos_token_id
        return tokens[: tokens.index(end) + 1] if end in tokens else tokens
