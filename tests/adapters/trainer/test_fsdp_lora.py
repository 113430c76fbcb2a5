"""An adapter trained with FSDP2 in several processes, compared with one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlboost.services.trainer.adapters.torch.policy import TorchPolicy
from rlboost.services.trainer.domain.loss.policy import PolicyLoss
from rlboost.services.trainer.ports.engine import Exported, PolicyEngine, PolicySettings
from rlboost.shared.errors import ConfigError
from rlboost.shared.job.training import LoraSpec, OptimizerSpec
from rlboost.shared.wire import F32, unpack
from tests.support import rank_policies
from tests.support.policy_comparison import bits
from tests.support.training_rows import rows, with_loss_mask

pytestmark = pytest.mark.timeout(300)

RATE = 1e-2
OPTIMIZER = OptimizerSpec(lr=RATE, weight_decay=0.1, grad_clip=0.7)
LOSS = PolicyLoss(kl_coef=0.1)
LORA = LoraSpec(rank=3)
"""Two ranks have two rows and one row of each A."""
FSDP: dict[str, Any] = {"backend": "torch", "data_parallel": 2}
BATCHES = [rows(6, seed=1), with_loss_mask(rows(3, seed=2)), rows(1, seed=3)]
"""The last has a row for one rank only."""
AFTER: tuple[Exported, ...] = ("adapter", "model")


def step(policy: PolicyEngine) -> list[float]:
    """Return loss and gradient norm of a step, and then all log-probabilities, also those of the starting weights."""
    found = [policy.accumulate(BATCHES, LOSS)["loss"], policy.step(RATE)]
    columns = [*policy.logprobs(BATCHES), *policy.reference_logprobs(BATCHES)]
    return [*found, *np.concatenate([unpack(column, F32) for column in columns]).tolist()]


def values(policy: PolicyEngine, what: Exported) -> dict[str, Any]:
    return {name: np.frombuffer(raw, F32) for name, raw in bits(policy, what)}


def test_adapter_in_ranks_trains_as_in_one_process(tmp_path: Path) -> None:
    """Its checkpoint has the adapter alone, and is resumed by ranks that are sharded in another way."""
    model, checkpoint = rank_policies.write(tmp_path / "model", "qwen3"), tmp_path / "checkpoint"
    settings: dict[str, Any] = {"lora": LORA, "seed": 7, "reference": True}
    one = TorchPolicy(PolicySettings(optimizer=OPTIMIZER, **settings), device="cpu")
    one.load_hf(model)
    checkpoint.mkdir()
    with rank_policies.policy(OPTIMIZER, **FSDP, **settings) as many:
        many.load_hf(model)
        for what in ("base", *AFTER):
            assert bits(many, what) == bits(one, what)
        assert many.adapter_json == one.adapter_json
        for _ in range(2):
            assert step(many) == pytest.approx(step(one), rel=1e-4, abs=1e-4)
        for what in AFTER:
            expected = values(one, what)
            for name, value in values(many, what).items():
                np.testing.assert_allclose(value, expected[name], atol=1e-4)
        many.snapshot()(checkpoint)
    size = sum(file.stat().st_size for file in checkpoint.glob("weight-*"))
    assert size < (model / "model.safetensors").stat().st_size / 2
    with rank_policies.policy(OPTIMIZER, backend="torch", context_parallel=2, fsdp_size=1, **settings) as resumed:
        resumed.load_hf(model)
        resumed.load(checkpoint)
        assert step(resumed) == pytest.approx(step(one), rel=1e-4, abs=1e-4)


def learn(policy: PolicyEngine, n_calls: int = 1) -> float:
    """Take a step on the same rows, so that the gradient's norm depends on dropout and weights alone."""
    for _ in range(n_calls):
        policy.accumulate([rows(seed=1)], LOSS)
    return policy.step(RATE)


def test_adapter_dropout_in_ranks_is_repeated_after_a_resume(tmp_path: Path) -> None:
    model = rank_policies.write(tmp_path / "model", "qwen3")
    with rank_policies.policy(OPTIMIZER, **FSDP, lora=LoraSpec(rank=3, dropout=0.5)) as policy:
        policy.load_hf(model)
        learn(policy)
        policy.snapshot()(tmp_path)
        columns = policy.logprobs(BATCHES)
        norms = [learn(policy), learn(policy)]
        after = bits(policy, "adapter")
        policy.load(tmp_path)
        assert policy.logprobs(BATCHES) == columns, "dropout is for gradients only"
        assert [learn(policy), learn(policy)] == norms
        assert bits(policy, "adapter") == after
        policy.load(tmp_path)
        assert learn(policy, n_calls=2) != norms[0], "each call has its own dropout"


def test_layer_without_adapter_support_is_rejected_by_ranks(tmp_path: Path) -> None:
    model = rank_policies.write(tmp_path / "model", "qwen3")
    with (
        rank_policies.policy(OPTIMIZER, **FSDP, lora=LoraSpec(targets=("lm_head",))) as policy,
        pytest.raises(ConfigError, match=r"lora\.targets: .*lm_head"),
    ):
        policy.load_hf(model)
