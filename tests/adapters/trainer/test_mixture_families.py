"""Mixtures of experts of several families: trained and exported by the torch backend, loaded again by transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from rlboost.services.rollout_worker.adapters.torch.engine import TorchEngine
from rlboost.services.trainer.adapters.torch.policy import TorchPolicy
from rlboost.services.trainer.adapters.torch.routing import weights_of
from rlboost.services.trainer.domain.loss.function import routing_metrics
from rlboost.services.trainer.ports.engine import PolicySettings
from rlboost.shared.errors import ConfigError, UnsuitableWeights
from rlboost.shared.job.training import OptimizerSpec
from rlboost.shared.model.experts import FAMILIES
from rlboost.shared.wire import F32, floats, ints
from tests.support import rank_policies, tiny_models
from tests.support.engines import request, run
from tests.support.losses import clipped_loss
from tests.support.model_folder import saved, write_model
from tests.support.staged_weights import Staged
from tests.support.tiny_models import MIXTURES
from tests.support.training_rows import rows

pytestmark = pytest.mark.timeout(600)

OPTIMIZER = OptimizerSpec(lr=1e-3)
LOSS = clipped_loss(0.2, 0.28)


def model(folder: Path, family: str) -> Path:
    """Write a model whose biases of expert selection matter and are no numbers of bfloat16."""
    write_model(folder, family)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    for name, tensor in tensors.items():
        if name.endswith("e_score_correction_bias"):
            tensor.copy_(torch.linspace(-0.2, 0.3, len(tensor)))
    save_file(tensors, file, {"format": "pt"})
    return folder


def trained(folder: Path, **settings: Any) -> TorchPolicy:
    policy = TorchPolicy(PolicySettings(optimizer=OPTIMIZER, **{"dtype": "float32", **settings}), device="cpu")
    policy.load_hf(folder)
    return policy


def names_in(folder: Path) -> set[str]:
    with safe_open(folder / "model.safetensors", "pt") as file:
        return set(file.keys())


def test_supported_families_are_tested() -> None:
    assert set(FAMILIES) == set(MIXTURES)


@pytest.mark.parametrize("family", sorted(MIXTURES))
def test_published_weights_load_under_their_names(tmp_path: Path, family: str) -> None:
    source = model(tmp_path / "source", family)
    policy = trained(source, router_aux_loss_coef=0.1)
    sums = policy.accumulate([rows(4)], LOSS)
    assert routing_metrics(sums)["moe/max_load"] >= 1
    policy.step(1e-3)
    published = saved(policy, source, tmp_path / "published")
    assert names_in(published) == names_in(source)
    loaded: Any = AutoModelForCausalLM.from_pretrained(published).eval()
    for row, column in zip(rows(4, 7), policy.logprobs([rows(4, 7)]), strict=True):
        expected = tiny_models.logprobs(loaded, ints(row.prompt), ints(row.completion))
        assert floats(column) == pytest.approx(expected, abs=2e-5)


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe"])
def test_biases_of_expert_selection_are_published_unrounded(tmp_path: Path, family: str) -> None:
    source = model(tmp_path, family)
    biases = [
        s for s in trained(source, dtype="bfloat16").export_shards() if s.name.endswith("e_score_correction_bias")
    ]
    assert biases
    for bias in biases:
        np.testing.assert_allclose(np.frombuffer(bias.data, F32), np.linspace(-0.2, 0.3, 8), rtol=1e-5)


@pytest.mark.parametrize("family", sorted(MIXTURES))
async def test_torch_engine_loads_published_weights(tmp_path: Path, family: str) -> None:
    source = model(tmp_path / "source", family)
    published = saved(trained(source, dtype="bfloat16"), source, tmp_path / "published")
    tensors = load_file(published / "model.safetensors")
    engine = TorchEngine(published, slots=4, dtype="bfloat16")
    assert await engine.load_weights(0, Staged(tensors.items())) == []
    loaded: Any = AutoModelForCausalLM.from_pretrained(published, dtype=torch.bfloat16).eval()
    for asked, made in zip(requests := [request(n) for n in range(4)], await run(engine, requests), strict=True):
        expected = tiny_models.logprobs(loaded, asked.prompt, made.tokens)
        assert made.logprobs == pytest.approx(expected, abs=0.05)
    await engine.close()


async def test_torch_engine_loads_the_names_of_the_model(tmp_path: Path) -> None:
    network: Any = AutoModelForCausalLM.from_pretrained(write_model(tmp_path, "qwen3_moe")).eval()
    engine = TorchEngine(tmp_path, slots=1, dtype="float32")
    assert await engine.load_weights(0, Staged(network.state_dict().items())) == []
    (made,) = await run(engine, [asked := request(0)])
    assert made.logprobs == pytest.approx(tiny_models.logprobs(network, asked.prompt, made.tokens), abs=1e-4)
    lacking = [item for item in network.state_dict().items() if not item[0].endswith("1.mlp.experts.down_proj")]
    with pytest.raises(UnsuitableWeights, match=r"missing, the first is .*experts"):
        await TorchEngine(tmp_path, slots=1, dtype="float32").load_weights(0, Staged(lacking))
    await engine.close()


@pytest.mark.parametrize("family", ["deepseek_v3"])
def test_fsdp_trains_a_model_with_biases_of_expert_selection(tmp_path: Path, family: str) -> None:
    source = model(tmp_path / "source", family)
    one = trained(source)
    with rank_policies.policy(OPTIMIZER, backend="torch", data_parallel=2) as many:
        many.load_hf(source)
        one.accumulate([rows(4)], LOSS)
        many.accumulate([rows(4)], LOSS)
        assert many.step(1e-3) == pytest.approx(one.step(1e-3), rel=1e-4)
        (tmp_path / "checkpoint").mkdir()
        many.snapshot()(tmp_path / "checkpoint")
        many.load(tmp_path / "checkpoint")
        found, expected = saved(many, source, tmp_path / "many"), saved(one, source, tmp_path / "one")
    assert names_in(found) == names_in(expected)
    for name, tensor in load_file(expected / "model.safetensors").items():
        torch.testing.assert_close(load_file(found / "model.safetensors")[name], tensor, atol=1e-4, rtol=0, msg=name)


@pytest.mark.parametrize("family", sorted(MIXTURES))
def test_weights_of_selected_experts_are_those_of_the_router(family: str) -> None:
    network = tiny_models.make(MIXTURES[family])
    gates = [layer.gate for layer in network.modules() if hasattr(layer, "gate") and hasattr(layer, "experts")]
    logits, weights, indices = gates[-1](torch.randn(50, 32))
    torch.testing.assert_close(weights_of(gates[-1], logits, indices).to(weights.dtype), weights)


def test_ranks_reject_what_one_process_rejects(tmp_path: Path) -> None:
    write_model(tmp_path, "qwen3_moe")
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": {"quant_method": "fp8"}}))
    with (
        rank_policies.policy(OPTIMIZER, backend="torch", data_parallel=2) as many,
        pytest.raises(ConfigError, match=r"weights are quantized \(fp8\)"),
    ):
        many.load_hf(tmp_path)
