"""Say how good a Countdown model is: `python -m rlboost.examples.countdown.measure DIR` (a minute on one CPU core).

It answers each held-out problem eight times at temperature 1.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3ForCausalLM

from rlboost.examples.countdown import reward
from rlboost.examples.countdown.make_data import eval_problems
from rlboost.examples.countdown.task import HIT, PAD, Problem, answer_of
from rlboost.examples.countdown.tokenizer import pretrained

SAMPLES = 8
"""Completions for each problem."""
MAX_NEW_TOKENS = 256
_SEED = 0


class Measured(NamedTuple):
    """Shares of all completions, and of some."""

    accuracy: float
    well_formed: float
    claimed: int
    """Completions whose thought has a hit."""
    claimed_right: float
    """The share of these whose answer is right: a verdict that cannot be trusted teaches little."""


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description="Say how good a Countdown model is.")
    parser.add_argument("model", type=Path, help="its directory")
    model: Qwen3ForCausalLM = AutoModelForCausalLM.from_pretrained(parser.parse_args().model, dtype=torch.float32)
    torch.manual_seed(_SEED)
    torch.set_num_threads(1)  # more threads are no faster at this size
    problems = eval_problems() * SAMPLES
    found = measured(problems, completions(model.eval(), pretrained(), problems))
    print(f"held-out accuracy at temperature 1: {found.accuracy:.3f}, of {len(problems)} completions")
    print(f"well formed: {found.well_formed:.1%}")
    print(f"of the {found.claimed} that claim a hit, right: {found.claimed_right:.1%}")


def measured(problems: Sequence[Problem], texts: list[str]) -> Measured:
    """Return the figures of one completion a problem, special tokens kept."""
    rewards = reward.score(
        [problem.prompt for problem in problems],
        texts,
        [[]] * len(texts),
        completions_raw=texts,
        numbers=[problem.numbers for problem in problems],
        target=[problem.target for problem in problems],
    )
    right = [bool(value) for value in rewards]
    claimed = [is_right for is_right, text in zip(right, texts, strict=True) if HIT in text]
    well_formed = sum(answer_of(text) is not None for text in texts)
    n = len(texts)
    return Measured(sum(right) / n, well_formed / n, len(claimed), sum(claimed) / max(1, len(claimed)))


@torch.inference_mode()
def completions(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, problems: Sequence[Problem]) -> list[str]:
    """Draw one completion a problem at temperature 1, special tokens kept."""
    inputs = tokenizer([problem.prompt for problem in problems], return_tensors="pt")  # all of 8 tokens: no padding
    drawn = model.generate(**inputs, do_sample=True, temperature=1.0, top_k=0, max_new_tokens=MAX_NEW_TOKENS)
    return [text.replace(PAD, "") for text in tokenizer.batch_decode(drawn[:, inputs["input_ids"].shape[1] :])]


if __name__ == "__main__":
    main()
