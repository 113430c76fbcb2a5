"""Several processes on GPUs: what gloo cannot show. Run `pytest -m gpu tests/gpu` after `pip install -e '.[dev]'`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from rlboost.services.trainer.adapters.torch.policy import TorchPolicy  # noqa: E402 - only where torch is
from rlboost.services.trainer.ports.engine import PolicyEngine, PolicySettings  # noqa: E402 - its like
from rlboost.shared.job.training import OptimizerSpec  # noqa: E402 - its like
from rlboost.shared.wire import F32, unpack  # noqa: E402 - its like
from tests.support import rank_policies  # noqa: E402 - its like
from tests.support.losses import clipped_loss  # noqa: E402 - its like
from tests.support.training_rows import rows  # noqa: E402 - its like

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

RATE = 1e-3
OPTIMIZER = OptimizerSpec(lr=RATE, weight_decay=0.1, grad_clip=0.7)
LOSS = clipped_loss(0.2, 0.28)
BATCHES = [rows(12, seed=1), rows(9, seed=2)]
LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {},
    "tp2": {"tensor_parallel": 2, "sequence_parallel": True},
    "pp2": {"pipeline_parallel": 2},
    "dp2": {"data_parallel": 2, "distributed_optimizer": True},
    "tp2 x pp2": {"tensor_parallel": 2, "pipeline_parallel": 2},
    "ep2": {"data_parallel": 2, "expert_parallel": 2, "distributed_optimizer": True},
    "tp2 x ep2": {"tensor_parallel": 2, "sequence_parallel": True, "data_parallel": 2, "expert_parallel": 2},
    "fsdp2": {"backend": "torch", "data_parallel": 2},
}


def logprobs(policy: PolicyEngine) -> Any:
    return np.concatenate([unpack(column, F32) for column in policy.logprobs(BATCHES)])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("model", rank_policies.MODELS)
def test_ranks_over_nccl_match_torch_backend(tmp_path: Path, model: str, layout: str, dtype: str) -> None:
    n_ranks = 1
    for name in ("tensor_parallel", "pipeline_parallel", "data_parallel"):
        n_ranks *= LAYOUTS[layout].get(name, 1)
    if "ep2" in layout and model != "qwen3-moe":
        pytest.skip(f"{model} has no experts")
    if torch.cuda.device_count() < n_ranks:
        pytest.skip(f"{n_ranks} GPUs are needed")
    folder = rank_policies.write(tmp_path / "model", model)
    one = TorchPolicy(PolicySettings(optimizer=OPTIMIZER, dtype=dtype), device="cuda")
    one.load_hf(folder)
    near = 1e-4 if dtype == "float32" else 0.1
    with rank_policies.policy(OPTIMIZER, dtype=dtype, device="cuda", **LAYOUTS[layout]) as many:
        many.load_hf(folder)
        before = {shard.name: bytes(shard.data) for shard in one.export_shards()}
        assert {shard.name: bytes(shard.data) for shard in many.export_shards()} == before
        np.testing.assert_allclose(logprobs(many), logprobs(one), rtol=0, atol=near)
        for _ in range(3):
            one.accumulate(BATCHES, LOSS)
            many.accumulate(BATCHES, LOSS)
            assert many.step(RATE) == pytest.approx(one.step(RATE), rel=1e-3 if dtype == "float32" else 0.1)
        np.testing.assert_allclose(logprobs(many), logprobs(one), rtol=0, atol=10 * near)
        checkpoint = tmp_path / "checkpoint"
        checkpoint.mkdir()
        many.snapshot()(checkpoint)
        after = {shard.name: bytes(shard.data) for shard in many.export_shards()}
        many.load_hf(folder)
        many.load(checkpoint)
        assert {shard.name: bytes(shard.data) for shard in many.export_shards()} == after
