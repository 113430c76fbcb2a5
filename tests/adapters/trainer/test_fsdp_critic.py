"""A critic trained with FSDP2 in several processes, compared with one process."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlboost.services.trainer.adapters.torch.policy import TorchPolicy
from rlboost.services.trainer.domain.loss.policy import PolicyLoss
from rlboost.services.trainer.domain.plan import TrainingRow
from rlboost.services.trainer.ports.engine import NotFinite, PolicySettings
from rlboost.shared.errors import Corrupt, Retryable
from rlboost.shared.job.algorithm import CriticSpec
from rlboost.shared.job.training import LoraSpec, OptimizerSpec
from rlboost.shared.wire import F32, length, pack, unpack
from tests.support import rank_policies
from tests.support.policy_comparison import bits
from tests.support.training_rows import taught

pytestmark = pytest.mark.timeout(300)

RATE = 1e-2
OPTIMIZER = OptimizerSpec(lr=RATE, weight_decay=0.1, grad_clip=0.7)
CRITIC = CriticSpec(lr=5e-3, weight_decay=0.1, grad_clip=0.5, value_clip=0.2)
LOSS = PolicyLoss(kl_coef=0.1)
SETTINGS: dict[str, Any] = {"critic": CRITIC, "reference": True}
FSDP: dict[str, Any] = {"backend": "torch", "data_parallel": 2}
BATCHES = [taught(6, seed=1), taught(3, seed=2), taught(1, seed=3)]
"""The last has a row for one rank only."""


def one_process(model: Path, **settings: Any) -> TorchPolicy:
    policy = TorchPolicy(PolicySettings(optimizer=OPTIMIZER, **SETTINGS, **settings), device="cpu")
    policy.load_hf(model)
    return policy


def step(policy: Any, batches: Sequence[Sequence[TrainingRow]] = BATCHES) -> list[float]:
    """Return both losses and the gradient norm of a step at half the learning rate, and all values after it.

    It offloads between the calls what the policy was told to offload.
    """
    found = policy.accumulate(batches, LOSS)
    policy.offload()
    numbers = [found["loss"], found["value_loss"], found["value_clipped"], policy.step(RATE / 2)]
    policy.offload()
    return [*numbers, *np.concatenate([unpack(column, F32) for column in policy.values(BATCHES)]).tolist()]


def close(numbers: list[float]) -> Any:
    return pytest.approx(numbers, rel=1e-4, abs=1e-4)


@pytest.mark.parametrize(
    ("family", "lora"), [("qwen3-moe", None), ("qwen3", LoraSpec(rank=3))], ids=["experts", "adapter"]
)
@pytest.mark.long
def test_critic_in_ranks_trains_as_in_one_process(family: str, lora: LoraSpec | None, tmp_path: Path) -> None:
    """Ranks that are sharded in another way resume it. What is published does not contain it."""
    model, checkpoint = rank_policies.write(tmp_path / "model", family), tmp_path / "checkpoint"
    one = one_process(model, lora=lora)
    checkpoint.mkdir()
    with rank_policies.policy(OPTIMIZER, **FSDP, **SETTINGS, lora=lora) as many:
        many.load_hf(model)
        assert not any(unpack(column, F32).any() for column in many.values(BATCHES))
        for _ in range(3):
            assert step(many) == close(step(one))
        many.snapshot()(checkpoint)
        assert {name for name, _ in bits(many)} == {name for name, _ in bits(one)}
        assert {shard[0] for shard in rank_policies.digests(many)} == {name for name, _ in bits(one, "base")}
    context: dict[str, Any] = {"backend": "torch", "context_parallel": 2, "fsdp_size": 1}
    with rank_policies.policy(OPTIMIZER, **context, **SETTINGS, lora=lora) as resumed:
        resumed.load_hf(model)
        resumed.load(checkpoint)
        for _ in range(2):
            assert step(resumed) == close(step(one))


def test_step_of_a_lost_rank_is_repeated_with_the_same_result(tmp_path: Path) -> None:
    """Both processes were in the middle of an update when one was killed."""
    model, checkpoint = rank_policies.write(tmp_path / "model", "qwen3"), tmp_path / "checkpoint"
    checkpoint.mkdir()
    one = one_process(model)
    step(one)
    with rank_policies.policy(OPTIMIZER, **FSDP, **SETTINGS) as lost:
        lost.load_hf(model)
        step(lost)
        lost.snapshot()(checkpoint)
        lost.accumulate(BATCHES[:1], LOSS)
        os.kill(rank_policies.pids_of(lost)[1], signal.SIGKILL)
        with pytest.raises(Retryable, match="rank 1 of the trainer ended with code -9"):
            lost.accumulate(BATCHES[1:], LOSS)
    with rank_policies.policy(OPTIMIZER, **FSDP, **SETTINGS, offload="all") as successor:
        successor.load_hf(model)
        successor.load(checkpoint)
        assert step(successor) == close(step(one))
        # The same ranks refuse what is not finite, and a checkpoint without a critic; both leave them as they were.
        before = bits(successor), successor.values(BATCHES)
        [row] = taught(1)
        bad = replace(row, returns=pack([float("nan")] * length(row.completion, F32), F32))
        successor.accumulate([[bad]], LOSS)
        with pytest.raises(NotFinite, match=r"the gradient's norm is .*, the critic's nan"):
            successor.step(RATE)
        assert (bits(successor), successor.values(BATCHES)) == before
        for file in checkpoint.glob("critic-*"):
            file.unlink()
        with pytest.raises(Corrupt, match="the critic in checkpoint"):
            successor.load(checkpoint)
