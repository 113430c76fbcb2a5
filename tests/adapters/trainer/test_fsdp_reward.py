"""A reward model trained with FSDP2 in several processes, compared with one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlboost.services.trainer.adapters.torch.policy import TorchPolicy
from rlboost.services.trainer.domain.loss.policy import PAIR_LOSS
from rlboost.services.trainer.domain.loss.preference import weighted_scores
from rlboost.services.trainer.domain.plan import TrainingRow, constant
from rlboost.services.trainer.ports.engine import PolicyEngine, PolicySettings
from rlboost.shared.job.training import LoraSpec, OptimizerSpec
from rlboost.shared.wire import F32, I32, pack, unpack
from tests.support import rank_policies
from tests.support.policy_comparison import bits

pytestmark = pytest.mark.timeout(300)

OPTIMIZER = OptimizerSpec(lr=1e-2, grad_clip=0.7)
FSDP: dict[str, Any] = {"backend": "torch", "data_parallel": 2}
CONTEXT: dict[str, Any] = {"backend": "torch", "context_parallel": 2}


def pairs(n: int) -> list[TrainingRow]:
    rows = []
    for i in range(2 * n):
        ids = [1, *range(5 + i, 9 + 2 * i), 2]
        row = TrainingRow(pack(ids[:-1], I32), pack(ids[-1:], I32), bytes(4), advantages=b"")
        rows.append(TrainingRow.of(row, constant(1.0, row)))
    return rows


def step(policy: PolicyEngine) -> list[float]:
    """Return loss and gradient norm of a step, and then all scores."""
    rows = pairs(5)
    trained, sums = weighted_scores(rows, policy.logprobs([rows]), [0.0] * 5, 0.01)
    policy.accumulate([trained[:3], trained[3:]], PAIR_LOSS)
    norm = policy.step(1e-2)
    return [sums["loss"], norm, *np.concatenate([unpack(one, F32) for one in policy.logprobs([rows])]).tolist()]


@pytest.mark.parametrize("lora", [None, LoraSpec(rank=3)], ids=["full", "lora"])
def test_reward_model_in_ranks_trains_as_in_one_process(lora: LoraSpec | None, tmp_path: Path) -> None:
    """Ranks that divide the tokens of each row resume it."""
    model, checkpoint = rank_policies.write(tmp_path / "model", "qwen3"), tmp_path / "checkpoint"
    settings: dict[str, Any] = {"scores": True, "seed": 7, "lora": lora}
    one = TorchPolicy(PolicySettings(optimizer=OPTIMIZER, **settings), device="cpu")
    one.load_hf(model)
    checkpoint.mkdir()
    with rank_policies.policy(OPTIMIZER, **FSDP, **settings) as many:
        many.load_hf(model)
        assert bits(many, "model") == bits(one, "model")
        for _ in range(3):
            assert step(many) == pytest.approx(step(one), rel=1e-4, abs=1e-4)
        many.snapshot()(checkpoint)
        assert {name for name, _ in bits(many, "model")} == {name for name, _ in bits(one, "model")}
    with rank_policies.policy(OPTIMIZER, **CONTEXT, **settings) as resumed:
        resumed.load_hf(model)
        resumed.load(checkpoint)
        assert step(resumed) == pytest.approx(step(one), rel=1e-4, abs=1e-4)
