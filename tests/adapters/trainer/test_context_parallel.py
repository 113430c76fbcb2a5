"""Context parallelism, with FSDP2 and megatron: ranks that divide a micro-batch's tokens train as one process does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import LlamaConfig

from rlboost.services.trainer.adapters.torch.policy import TorchPolicy
from rlboost.services.trainer.domain.loss.function import EXPERT_LOAD, ROUTED_TOKENS, ROUTING_LOSS
from rlboost.services.trainer.ports.engine import PolicyEngine, PolicySettings
from rlboost.shared.errors import ConfigError
from rlboost.shared.job.training import OptimizerSpec
from rlboost.shared.wire import F32, unpack
from tests.support import rank_policies
from tests.support.losses import clipped_loss
from tests.support.packed_models import CONVOLUTION, write
from tests.support.training_rows import rows, training_row, with_loss_mask

RATE = 1e-3
OPTIMIZER = OptimizerSpec(lr=RATE, weight_decay=0.1, grad_clip=0.7)
LOSS = clipped_loss(0.2, 0.28)
# Only one rank has trained tokens of the last micro-batch.
ONE_TOKEN = training_row(range(3, 14), [15], [-4.0])
BATCHES = [rows(5), with_loss_mask(rows(4, seed=1), seed=1), [ONE_TOKEN]]
MEGATRON = {"backend": "megatron", "context_parallel": 2}


def logprobs(policy: PolicyEngine) -> Any:
    return np.concatenate([unpack(column, F32) for column in policy.logprobs(BATCHES)])


def values(policy: PolicyEngine) -> dict[str, Any]:
    return {shard.name: np.frombuffer(bytes(shard.data), F32) for shard in policy.export_shards()}


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        pytest.param("qwen3", {"context_parallel": 2, "data_parallel": 2}, marks=pytest.mark.long),
        ("qwen3-moe", {"context_parallel": 2, "activation_checkpointing": True}),
        # Logits in chunks of 7 tokens.
        ("qwen3", {"data_parallel": 2, "max_logits": 7 * 96}),
        ("qwen3", {"context_parallel": 2, "max_logits": 7 * 96, "activation_checkpointing": True}),
        # Two key heads for four ranks.
        pytest.param("qwen2", {"context_parallel": 4, "activation_checkpointing": True}, marks=pytest.mark.long),
        ("qwen3-moe", {**MEGATRON, "activation_checkpointing": True}),
        pytest.param("qwen2", {**MEGATRON, "context_parallel": 4}, marks=pytest.mark.long),
        pytest.param("llama", {**MEGATRON, "tensor_parallel": 2, "sequence_parallel": True}, marks=pytest.mark.long),
        pytest.param("qwen3", {**MEGATRON, "pipeline_parallel": 2}, marks=pytest.mark.long),
        pytest.param("qwen3-moe", {**MEGATRON, "data_parallel": 2, "expert_parallel": 2}, marks=pytest.mark.long),
    ],
    ids=[
        *("cp2-dp2", "cp2-experts", "dp2-chunks", "cp2-chunks", "cp4", "megatron-cp2-experts"),
        *("megatron-cp4", "megatron-cp2-tp2", "megatron-cp2-pp2", "megatron-cp2-ep2"),
    ],
)
def test_ranks_that_divide_tokens_match_one_process(tmp_path: Path, model: str, layout: dict[str, Any]) -> None:
    source = rank_policies.write(tmp_path / model, model)
    one = TorchPolicy(PolicySettings(optimizer=OPTIMIZER, temperature=0.8), device="cpu")
    one.load_hf(source)
    with rank_policies.policy(OPTIMIZER, temperature=0.8, **{"backend": "torch", **layout}) as many:
        many.load_hf(source)
        np.testing.assert_allclose(logprobs(many), logprobs(one), rtol=0, atol=1e-5)
        for _ in range(2):
            expected = one.accumulate(BATCHES, LOSS)
            found = many.accumulate(BATCHES, LOSS)
            for name in (ROUTED_TOKENS, ROUTING_LOSS, EXPERT_LOAD):
                expected.pop(name, None)  # of each rank's tokens
            assert {name: found[name] for name in expected} == pytest.approx(expected, rel=1e-4, abs=1e-3)
            assert many.step(RATE) == pytest.approx(one.step(RATE), rel=1e-5)
        trained = values(one)
        for name, value in values(many).items():
            np.testing.assert_allclose(value, trained[name], rtol=0, atol=RATE / 10, err_msg=name)


def test_balance_of_experts_counts_each_token_once(tmp_path: Path) -> None:
    """With this coefficient, the gradient is that of the load-balancing loss."""
    source, coefficient = rank_policies.write(tmp_path / "model", "qwen3-moe"), 1e4
    one = TorchPolicy(PolicySettings(optimizer=OPTIMIZER, router_aux_loss_coef=coefficient), device="cpu")
    one.load_hf(source)
    settings: dict[str, Any] = {"context_parallel": 2, "router_aux_loss_coef": coefficient}
    with rank_policies.policy(OPTIMIZER, backend="torch", **settings) as many:
        many.load_hf(source)
        for policy in (one, many):
            policy.accumulate(BATCHES, LOSS)
        # Each rank has the loss of its own tokens, whose distribution differs a little from that of all.
        assert many.step(RATE) == pytest.approx(one.step(RATE), rel=0.3)


def test_heads_that_ranks_do_not_divide_are_refused(tmp_path: Path) -> None:
    with (
        rank_policies.policy(OPTIMIZER, backend="torch", context_parallel=3) as policy,
        pytest.raises(ConfigError, match="context_parallel is 3, which does not divide the model's 4 attention heads"),
    ):
        policy.load_hf(write(LlamaConfig(num_attention_heads=4, hidden_size=32, num_hidden_layers=1), tmp_path))


def test_convolutions_along_the_tokens_are_refused(tmp_path: Path) -> None:
    with (
        rank_policies.policy(OPTIMIZER, backend="torch", context_parallel=2) as policy,
        pytest.raises(ConfigError, match="lfm2 has layers that compute more than causal attention"),
    ):
        policy.load_hf(write(CONVOLUTION, tmp_path))
