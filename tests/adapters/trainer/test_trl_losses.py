"""Losses and their gradients, against those of TRL on the same tensors."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlboost.services.trainer.adapters.torch.passes import token_batch
from rlboost.services.trainer.domain.groups import ScoredGroup
from rlboost.services.trainer.domain.loss.policy import job_loss
from rlboost.services.trainer.domain.metrics import StepTally
from rlboost.services.trainer.domain.plan import TrainingRow
from rlboost.services.trainer.step.run import TrainingRows
from rlboost.shared.job.spec import RlJob
from rlboost.shared.messages import SampleFinished
from rlboost.shared.wire import F32, I32, pack
from tests.support.jobs import parse_rl
from tests.support.trl_losses import MAX_TOKENS, trl_loss

LENGTHS = (3, 8, 5, 8)
REWARDS = (1.0, 0.0, 0.25, 0.5)
IS_CUT = (False, True, False, True)


def job(**algorithm: Any) -> RlJob:
    return parse_rl(
        {
            "model": "m",
            "data": {"train": "t", "prompts_per_step": 2},
            "reward": {"function": "m:f"},
            "algorithm": {"group_size": len(LENGTHS), **algorithm},
            "sampling": {"max_tokens": MAX_TOKENS},
            "steps": 1,
        }
    )


def columns(seed: int, scale: float = 0.3) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [-1.0 + scale * torch.randn(n, generator=generator) for n in LENGTHS]


def rows_of(
    spec: RlJob, sampled: list[torch.Tensor], tally: StepTally, start: Sequence[torch.Tensor] = ()
) -> list[TrainingRow]:
    """Return the rows of one group, some of them cut; `start` are the engine's log-probabilities."""
    samples = tuple(
        SampleFinished(
            sample=number,
            tokens=pack([3] * len(column), I32),
            logprobs=pack(column.tolist(), F32),
            finish="length" if is_cut else "stop",
            spans=[],
            attempts=1,
            group_done=False,
        )
        for number, (column, is_cut) in enumerate(zip(sampled, IS_CUT, strict=True))
    )

    async def run(call: Callable[[], list[bytes]]) -> list[bytes]:
        return call()

    started = {
        pack(column.tolist(), F32): pack(then.tolist(), F32) for column, then in zip(sampled, start, strict=False)
    }
    engine = SimpleNamespace(logprobs=lambda batches: [started[row.sampled] for rows in batches for row in rows])
    claimed: Any = SimpleNamespace(
        spec=spec, generating_spec=spec, resources=SimpleNamespace(engine=engine, critic=None)
    )
    group = ScoredGroup(1, samples, REWARDS, prompt=pack([1], I32))
    (rows,) = asyncio.run(TrainingRows.of(claimed, tally, run).build([group]))
    return rows


@pytest.mark.parametrize("is_masked", [False, True])
def test_masked_completions_are_out_of_the_loss_and_in_the_baseline_as_in_trl(is_masked: bool) -> None:
    spec, tally = job(mask_truncated=is_masked), StepTally()
    old, new = columns(1), [column.requires_grad_() for column in columns(2)]
    rewards = torch.tensor(REWARDS)
    advantages = ((rewards - rewards.mean()) / (rewards.std() + 1e-4)).tolist()
    expected = trl_loss(new, old, advantages, is_masked=[is_masked and cut for cut in IS_CUT], loss_type="dapo")
    gradients = torch.autograd.grad(expected, new)

    rows = rows_of(spec, old, tally)
    trained = [column for column, cut in zip(new, IS_CUT, strict=True) if not (is_masked and cut)]
    total, sums = job_loss(spec)(token_batch(rows, torch.cat(trained), None))
    loss = total / sums["divisor"]
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    for found, right in zip(torch.autograd.grad(loss, new, materialize_grads=True), gradients, strict=True):
        torch.testing.assert_close(found, right)
    assert tally.metrics().get("completions/masked_ratio") == (0.5 if is_masked else None)


def test_entropy_bonus_is_that_of_trl() -> None:
    spec = job(entropy_coef=0.05)
    old, new, entropies = columns(1), *([one.requires_grad_() for one in columns(seed)] for seed in (2, 3))
    rewards = torch.tensor(REWARDS)
    advantages = ((rewards - rewards.mean()) / (rewards.std() + 1e-4)).tolist()
    expected = trl_loss(new, old, advantages, entropies=entropies, loss_type="dapo", entropy_coef=0.05)
    gradients = torch.autograd.grad(expected, [*new, *entropies])

    batch = token_batch(rows_of(spec, old, StepTally()), torch.cat(new), None, torch.cat(entropies))
    total, sums = job_loss(spec)(batch)
    loss = total / sums["divisor"]
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    assert sums["policy_entropy"] == pytest.approx(sum(column.sum().item() for column in entropies))
    for found, right in zip(torch.autograd.grad(loss, [*new, *entropies]), gradients, strict=True):
        torch.testing.assert_close(found, right)


def test_ratio_of_a_later_epoch_is_to_the_start_of_the_step_as_in_trl() -> None:
    """TRL takes the log-probabilities of the step's start as the old policy of all `num_iterations`."""
    spec = job(epochs=2, old_logprobs="recomputed", tis_cap="off")
    sampled, start, new = columns(1), columns(4), [column.requires_grad_() for column in columns(2)]
    rewards = torch.tensor(REWARDS)
    advantages = ((rewards - rewards.mean()) / (rewards.std() + 1e-4)).tolist()
    expected = trl_loss(new, start, advantages, loss_type="dapo")
    gradients = torch.autograd.grad(expected, new)

    rows = rows_of(spec, sampled, StepTally(), start)
    total, sums = job_loss(spec)(token_batch(rows, torch.cat(new), None))
    loss = total / sums["divisor"]
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    for found, right in zip(torch.autograd.grad(loss, new), gradients, strict=True):
        torch.testing.assert_close(found, right)
