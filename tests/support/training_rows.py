"""Random rows that tests train policies on."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from rlboost.services.trainer.domain.plan import SequenceRow, TrainingRow, constant
from rlboost.shared.wire import F32, I32, U8, floats, ints, pack, unpack


def training_row(
    prompt: Sequence[int],
    completion: Sequence[int],
    logprobs: Sequence[float],
    advantage: float = 1.0,
    **columns: bytes,
) -> TrainingRow:
    """Return a row whose loss tokens have the same advantage."""
    row = SequenceRow(pack(prompt, I32), pack(completion, I32), pack(logprobs, F32))
    return TrainingRow.of(row, constant(advantage, row), **columns)


def advantage_of(row: TrainingRow) -> float:
    """Return the advantage that all loss tokens of a row have."""
    (advantage,) = set(floats(row.advantages))
    return advantage


def rows(n: int = 6, seed: int = 0) -> list[TrainingRow]:
    """Return `n` random rows of a vocabulary of 96 tokens, the same for the same seed."""
    rng = random.Random(seed)
    made = []
    for _ in range(n):
        prompt = [rng.randrange(3, 96) for _ in range(rng.randint(1, 5))]
        tokens = [rng.randrange(3, 96) for _ in range(rng.randint(1, 20))]
        logprobs = [-4.5 + 0.3 * rng.random() for _ in tokens]
        made.append(training_row(prompt, tokens, logprobs, rng.uniform(-2, 2)))
    return made


def with_loss_mask(batch: list[TrainingRow], seed: int = 0) -> list[TrainingRow]:
    """Let some tokens of each completion be an environment's, but not all."""
    rng = random.Random(seed)
    return [_masked(row, [rng.random() < 0.6 for _ in ints(row.completion)[1:]]) for row in batch]


def _masked(row: TrainingRow, trained: list[bool]) -> TrainingRow:
    mask = np.array([*trained, True])
    sampled, advantages = (unpack(column, F32)[mask].tobytes() for column in (row.sampled, row.advantages))
    return replace(row, sampled=sampled, advantages=advantages, loss_mask=pack(mask, U8))


def taught(n: int = 6, seed: int = 0) -> list[TrainingRow]:
    """Rows with something for a critic to learn: the share of large tokens so far, roughly."""
    rng, made = np.random.default_rng(seed), []
    for row in rows(n, seed):
        large = np.array(ints(row.completion)) > 48
        returns = np.cumsum(large) / np.arange(1, len(large) + 1)
        values = returns + 0.3 * rng.standard_normal(len(large))
        advantages = rng.standard_normal(len(large))
        columns = [pack(column.tolist(), F32) for column in (advantages, values, returns)]
        made.append(replace(row, advantages=columns[0], values=columns[1], returns=columns[2]))
    return made
