"""FSDP2 with several copies of the model (HSDP), compared with one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlboost.jobs.memory import TrainedModel, state_bytes
from rlboost.services.trainer.adapters.torch.policy import TorchPolicy
from rlboost.services.trainer.ports.engine import PolicyEngine, PolicySettings
from rlboost.shared.errors import ConfigError
from rlboost.shared.job.training import OptimizerSpec, TrainerSpec
from rlboost.shared.wire import F32, unpack
from tests.support import rank_policies
from tests.support.jobs import job
from tests.support.losses import clipped_loss
from tests.support.policy_comparison import assert_close, values
from tests.support.training_rows import rows, with_loss_mask

pytestmark = pytest.mark.timeout(600)

RATE = 1e-3
OPTIMIZER = OptimizerSpec(lr=RATE, weight_decay=0.1, grad_clip=0.7)
LOSS = clipped_loss(0.2, 0.28)
BATCHES = [rows(6, seed=1), with_loss_mask(rows(3, seed=2)), rows(1, seed=3)]
"""The last has a row for one rank only."""
LAYOUTS: dict[str, dict[str, Any]] = {
    "data4": {"data_parallel": 4, "fsdp_size": 2, "reference": True},
    "context2": {"context_parallel": 2, "fsdp_size": 1},
}


def step(policy: PolicyEngine) -> list[float]:
    """Return loss and gradient norm of a step, and the log-probabilities after it."""
    found = [policy.accumulate(BATCHES, LOSS)["loss"], policy.step(RATE)]
    return [*found, *np.concatenate([unpack(column, F32) for column in policy.logprobs(BATCHES)]).tolist()]


@pytest.mark.parametrize("layout", [pytest.param("data4", marks=pytest.mark.long), "context2"])
def test_copies_of_the_model_train_as_one_process(layout: str, tmp_path: Path) -> None:
    """Its checkpoint has each shard once, and is resumed by one process, whose own is resumed by one copy."""
    model, checkpoint = rank_policies.write(tmp_path / "model", "qwen3"), tmp_path / "checkpoint"
    of_one = tmp_path / "of-one"
    one = TorchPolicy(PolicySettings(optimizer=OPTIMIZER), device="cpu")
    one.load_hf(model)
    checkpoint.mkdir()
    of_one.mkdir()
    with rank_policies.policy(OPTIMIZER, backend="torch", **LAYOUTS[layout]) as many:
        many.load_hf(model)
        for _ in range(2):
            assert step(many) == pytest.approx(step(one), rel=1e-4, abs=1e-4)
        assert_close(values(many), values(one), 1e-4)
        many.snapshot()(checkpoint)
    assert len([*checkpoint.glob("weight-*")]) == LAYOUTS[layout]["fsdp_size"]
    one.load(checkpoint)
    one.snapshot()(of_one)
    with rank_policies.policy(OPTIMIZER, backend="torch", data_parallel=2) as resumed:
        resumed.load_hf(model)
        resumed.load(of_one)
        assert step(resumed) == pytest.approx(step(one), rel=1e-4, abs=1e-4)


def test_memory_is_divided_by_the_shards_of_one_copy() -> None:
    model, whole = TrainedModel(1600), TrainerSpec(data_parallel=16)
    assert state_bytes(model, whole) == 1600
    assert state_bytes(model, whole.model_copy(update={"fsdp_size": 4})) == 4 * 1600


@pytest.mark.parametrize(
    ("trainer", "message"),
    [
        ({"data_parallel": 4, "fsdp_size": 3}, r"fsdp_size is 3, which does not divide the 4 processes"),
        ({"backend": "megatron", "fsdp_size": 2}, r"fsdp_size needs trainer\.backend: torch"),
        ({"data_parallel": 8, "nodes": 2, "min_nodes": 1, "fsdp_size": 8}, r"fsdp_size is 8 and a machine has 4"),
    ],
)
def test_impossible_sizes_are_rejected(trainer: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        job(trainer=trainer)
