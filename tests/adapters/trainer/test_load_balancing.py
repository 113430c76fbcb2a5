"""The load-balancing loss of a mixture of experts, compared with that of transformers."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AfmoeConfig, AutoModelForCausalLM
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter, load_balancing_loss_func

from rlboost.services.trainer.adapters.torch.policy import TorchPolicy
from rlboost.services.trainer.adapters.torch.routing import Routers
from rlboost.services.trainer.domain.loss.function import routing_metrics
from rlboost.services.trainer.domain.loss.policy import PolicyLoss
from rlboost.services.trainer.domain.plan import select
from rlboost.services.trainer.ports.engine import PolicySettings
from rlboost.shared.errors import ConfigError
from rlboost.shared.job.training import OptimizerSpec
from tests.support import rank_policies
from tests.support.model_folder import write_model
from tests.support.one_rank import trained_by
from tests.support.policy_comparison import gradients
from tests.support.training_rows import rows, with_loss_mask

pytestmark = pytest.mark.timeout(600)

COEFFICIENT = 0.3
OPTIMIZER = OptimizerSpec(lr=1e-3)
LOSS = PolicyLoss(aggregation="sequence_mean")
# An even number of tokens each: with sequence parallelism a token of padding would be routed too.
# The last has a row for one rank only; another that shares a collective with it computes a dummy.
BATCHES = [rows(5, seed=3), with_loss_mask(rows(3, seed=2)), rows(1, seed=0)]
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2": {"tensor_parallel": 2, "sequence_parallel": True},
    "pp2": {"pipeline_parallel": 2, "activation_checkpointing": True},
    "ep2": {"data_parallel": 2, "expert_parallel": 2, "activation_checkpointing": True},
    "fsdp2": {"backend": "torch", "data_parallel": 2},
}
# Its routers have another name.
AFMOE = AfmoeConfig(
    vocab_size=96,
    hidden_size=32,
    intermediate_size=48,
    moe_intermediate_size=24,
    num_hidden_layers=2,
    num_dense_layers=1,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    num_experts=8,
    num_experts_per_tok=2,
)


def torch_policy(model: Path, coefficient: float = COEFFICIENT, **settings: Any) -> TorchPolicy:
    policy = TorchPolicy(
        PolicySettings(optimizer=OPTIMIZER, router_aux_loss_coef=coefficient, aggregation="sequence_mean", **settings),
        device="cpu",
    )
    policy.load_hf(model)
    return policy


@pytest.mark.parametrize("checkpointing", [False, True])
def test_loss_is_that_of_transformers_per_layer(tmp_path: Path, checkpointing: bool) -> None:
    write_model(tmp_path, "qwen3-moe")
    with_loss = torch_policy(tmp_path, activation_checkpointing=checkpointing)
    without = torch_policy(tmp_path, 0.0)
    found, plain = with_loss.accumulate(BATCHES, LOSS), without.accumulate(BATCHES, LOSS)
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    losses, loads = [], []
    for batch in BATCHES:
        logits = [model(**_inputs(row), output_router_logits=True).router_logits for row in batch]
        layers = [torch.cat(layer) for layer in zip(*logits, strict=True)]
        each = [load_balancing_loss_func((layer,), 8, 2) for layer in layers]
        loss = torch.stack([torch.as_tensor(one) for one in each]).mean()
        (COEFFICIENT * len(batch) * loss).backward()
        losses.append((loss.item(), sum(row.n_tokens for row in batch)))
        loads += [torch.bincount(layer.topk(2).indices.flatten()).max() * 8 / (2 * len(layer)) for layer in layers]
    expected, before = dict(model.named_parameters()), gradients(without)
    for name, gradient in gradients(with_loss).items():
        added = expected[name].grad if expected[name].grad is not None else torch.zeros_like(gradient)
        torch.testing.assert_close(gradient, before[name] + added, atol=1e-5, rtol=1e-4)
    assert found["loss"] == pytest.approx(plain["loss"], abs=1e-5)
    assert routing_metrics(found) == pytest.approx(
        {
            "moe/load_balancing_loss": sum(loss * n for loss, n in losses) / sum(n for _, n in losses),
            "moe/max_load": float(max(loads)),
        },
        rel=1e-5,
    )
    assert routing_metrics(plain) == pytest.approx(routing_metrics(found))


def _inputs(row: Any) -> dict[str, torch.Tensor]:
    return {"input_ids": torch.from_numpy(np.frombuffer(row.prompt + row.completion, np.int32).astype(np.int64))[None]}


@pytest.mark.parametrize("layout", sorted(LAYOUTS))
def test_loss_in_ranks_matches_one_process(tmp_path: Path, layout: str) -> None:
    model = rank_policies.write(tmp_path / "model", "qwen3-moe")
    one = torch_policy(model)
    settings = {"router_aux_loss_coef": COEFFICIENT, "aggregation": "sequence_mean", **LAYOUTS[layout]}
    with rank_policies.policy(OPTIMIZER, **settings) as many:
        many.load_hf(model)
        # Each micro-batch of a rank has its own load-balancing loss.
        batches = select(list(itertools.chain(*BATCHES)), list(itertools.chain(*many._split(BATCHES))))
        sums, expected = many.accumulate(BATCHES, LOSS), one.accumulate(batches, LOSS)
        assert routing_metrics(sums) == pytest.approx(routing_metrics(expected), rel=1e-4)
        assert many.step(1e-3) == pytest.approx(one.step(1e-3), rel=1e-4)
        found = {shard.name: np.frombuffer(bytes(shard.data), np.float32) for shard in many.export_shards()}
    for shard in one.export_shards():
        np.testing.assert_allclose(found[shard.name], np.frombuffer(shard.data, np.float32), rtol=0, atol=1e-4)


def test_dense_model_with_the_loss_is_rejected(tmp_path: Path) -> None:
    write_model(tmp_path, "qwen3-tied")
    with pytest.raises(ConfigError, match=r"trainer\.router_aux_loss_coef is for mixtures of experts, but .* has none"):
        torch_policy(tmp_path)


def other_routers() -> tuple[torch.nn.Module, torch.nn.Module]:
    """Return a model and its router, of a form that is not known."""
    mixture = torch.nn.Module()
    mixture.gate, mixture.experts = torch.nn.Linear(4, 2), torch.nn.Module()
    layers = torch.nn.ModuleList([torch.nn.ModuleDict({"mlp": mixture})])
    return torch.nn.ModuleDict({"layers": layers}), mixture.gate


def test_routers_of_another_form_are_left_alone() -> None:
    """Those of some families of transformers return other values, or the same in another order."""
    model, gate = other_routers()
    routers = Routers(model)
    routers.begin(3)
    assert gate(torch.ones(3, 4)).shape == (3, 2)
    assert routers.end() is None


def test_required_routers_of_another_form_are_rejected() -> None:
    model, gate = other_routers()
    Routers(model, required=True)
    with pytest.raises(ConfigError, match=r"routers return no logits, weights and indices of experts"):
        gate(torch.ones(3, 4))
    with pytest.raises(ConfigError, match=r"Linear has no routers that are known"):
        Routers(gate, required=True)


def test_weights_of_experts_computed_in_another_way_are_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = Qwen3MoeTopKRouter.forward

    def doubled(self: Any, hidden: torch.Tensor) -> Any:
        logits, weights, indices = original(self, hidden)
        return logits, 2 * weights, indices

    monkeypatch.setattr(Qwen3MoeTopKRouter, "forward", doubled)
    with pytest.raises(ConfigError, match=r"Qwen3MoeTopKRouter gives to experts are not computed in a way"):
        torch_policy(write_model(tmp_path, "qwen3-moe"))


def test_loss_without_known_routers_is_rejected_at_load(tmp_path: Path) -> None:
    """Else the coefficient would have no effect."""
    AutoModelForCausalLM.from_config(AFMOE).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"AfmoeForCausalLM has no routers that are known"):
        torch_policy(tmp_path)
    with (
        rank_policies.policy(OPTIMIZER, backend="torch", router_aux_loss_coef=0.1, data_parallel=2) as many,
        pytest.raises(ConfigError, match=r"AfmoeForCausalLM has no routers that are known"),
    ):
        many.load_hf(tmp_path)


def test_coefficient_of_zero_builds_no_graph(tmp_path: Path) -> None:
    write_model(tmp_path, "qwen3-moe")
    for coefficient in (0.0, COEFFICIENT):
        policy = torch_policy(tmp_path, coefficient)
        forward = trained_by(policy).forward
        forward(rows(2))
        assert forward.balance is not None
        assert forward.balance.loss.requires_grad == bool(coefficient)
        policy.logprobs([rows(2)])
        assert forward.balance is None
