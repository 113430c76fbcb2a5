"""Make the base model: `python -m examples.countdown.warmup --out examples/countdown/base` (minutes on one CPU core).

A Qwen3 of 0.2 M parameters imitates traces that have the right form and no skill at searching, so that reinforcement
learning has something to start from and everything to learn. Matrices are trained with Muon, which learns the
arithmetic several times faster here than AdamW alone; `torch.optim.Muon` came with torch 2.9.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from random import Random
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from torch.optim.lr_scheduler import LambdaLR
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from examples.countdown import reward
from examples.countdown.make_data import eval_problems
from examples.countdown.model import build_model
from examples.countdown.task import ALL_OPERATORS, HIT, MISS, PAD, VOCABULARY, noisy_trace, training_problems
from examples.countdown.tokenizer import pretrained


class Cycle(NamedTuple):
    """One rise and fall of the learning rate."""

    steps: int
    verdict_weight: float
    """How much more a verdict's token weighs in the loss than another."""


CYCLES = (Cycle(1000, 1.0), Cycle(600, 3.0))
"""First the form and the arithmetic, then sure verdicts: they are few, hits fewer, and without them reinforcement
learning takes off slowly, since it can only reward an answer that the model knows to be one."""
BATCH_SIZE = 64
WARMUP_STEPS = 30
DECAY_SHARE = 0.4
"""The learning rate falls linearly to 0 over this share of a cycle."""
MICRO_BATCH_TOKENS = 2048
MAX_NEW_TOKENS = 256
EVAL_SAMPLES = 8
"""Completions for each held-out problem."""

_SEED = 0
_IGNORED = -100
_LOG_EVERY = 50


def main() -> None:
    """Train, report the held-out accuracy, save."""
    parser = argparse.ArgumentParser(description="Make Countdown's base model.")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "base", help="the directory to write")
    out: Path = parser.parse_args().out
    torch.manual_seed(_SEED)
    torch.set_num_threads(1)  # more threads are no faster at this size
    tokenizer = pretrained()
    model = build_model()
    rng = Random(_SEED)  # noqa: S311 - data, not secrets
    for cycle in CYCLES:
        train(model, tokenizer, cycle, rng)
    model = model.bfloat16()
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    print(f"held-out accuracy at temperature 1: {accuracy(model.float(), tokenizer):.3f}; saved to {out}")


def train(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, cycle: Cycle, rng: Random) -> None:
    """Train on fresh problems at each step; the loss is a weighted mean over the completions' tokens."""
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed_tokens" not in name]
    others = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed_tokens" in name]
    optimizers = [
        torch.optim.Muon(matrices, lr=0.02, weight_decay=0.01),
        torch.optim.AdamW(others, lr=4e-3, betas=(0.9, 0.98), weight_decay=0.01),
    ]
    schedules = [LambdaLR(optimizer, partial(lr_factor, steps=cycle.steps)) for optimizer in optimizers]
    verdicts = torch.tensor([VOCABULARY.index(HIT), VOCABULARY.index(MISS)])
    for step in range(cycle.steps):
        batch = draw_batch(tokenizer, rng)
        n_targets = sum(n for _, n in batch)
        total = 0.0
        for token_ids, labels in micro_batches(batch):
            logits = model(token_ids).logits[:, :-1].flatten(0, 1)
            targets = labels[:, 1:].flatten()
            losses = functional.cross_entropy(logits, targets, ignore_index=_IGNORED, reduction="none")
            loss = (losses * torch.where(torch.isin(targets, verdicts), cycle.verdict_weight, 1.0)).sum() / n_targets
            loss.backward()  # type: ignore[no-untyped-call]  # torch has no annotation there
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        if (step + 1) % _LOG_EVERY == 0:
            print(f"step {step + 1}/{cycle.steps} loss {total:.3f}", flush=True)


def lr_factor(step: int, steps: int) -> float:
    """Return what the peak learning rates are multiplied with: up, flat, down to 0."""
    return min(1.0, (step + 1) / WARMUP_STEPS, (steps - step) / (DECAY_SHARE * steps))


def draw_batch(tokenizer: PreTrainedTokenizerFast, rng: Random) -> list[tuple[list[int], int]]:
    """Return token ids of prompt and completion together, and how many at their end are the completion's."""
    batch = []
    for problem in islice(training_problems(rng, ALL_OPERATORS), BATCH_SIZE):
        prompt_ids = tokenizer(problem.prompt)["input_ids"]
        completion_ids = tokenizer(noisy_trace(problem, rng), add_special_tokens=False)["input_ids"]
        batch.append((prompt_ids + completion_ids, len(completion_ids)))
    return batch


def micro_batches(batch: list[tuple[list[int], int]]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield token ids and labels, [rows, longest], right-padded; rows of like length together to pad little."""
    longest_first = sorted(batch, key=lambda row: len(row[0]), reverse=True)
    while longest_first:
        width = len(longest_first[0][0])
        n_rows = max(1, MICRO_BATCH_TOKENS // width)
        rows, longest_first = longest_first[:n_rows], longest_first[n_rows:]
        token_ids = torch.full((len(rows), width), VOCABULARY.index(PAD))
        labels = torch.full_like(token_ids, _IGNORED)
        for i, (row, n_targets) in enumerate(rows):
            token_ids[i, : len(row)] = torch.tensor(row)
            labels[i, len(row) - n_targets : len(row)] = torch.tensor(row[-n_targets:])
        yield token_ids, labels


@torch.inference_mode()
def accuracy(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast) -> float:
    """Return the mean reward on all held-out problems at temperature 1."""
    problems = eval_problems() * EVAL_SAMPLES
    prompts = [problem.prompt for problem in problems]
    inputs = tokenizer(prompts, return_tensors="pt")  # every prompt has 8 tokens: no padding
    generated = model.generate(**inputs, max_new_tokens=MAX_NEW_TOKENS)[:, inputs["input_ids"].shape[1] :]
    completions = [text.replace(PAD, "") for text in tokenizer.batch_decode(generated)]
    rewards = reward.score(
        prompts,
        completions,
        generated.tolist(),
        numbers=[problem.numbers for problem in problems],
        target=[problem.target for problem in problems],
    )
    return sum(value or 0.0 for value in rewards) / len(rewards)


if __name__ == "__main__":
    main()
