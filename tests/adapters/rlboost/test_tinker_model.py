"""The model of `rlboost tinker`: its losses, steps and checkpoints against direct computations with torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from rlboost.shared.errors import ConfigError
from rlboost.shared.weights.lora import adapter_of
from rlboost.tinker.model import LoraModel, saved_weights
from rlboost.tinker.wire import Adam, Datum, LoraOptions
from tests.support.model_folder import write_model

TOKENS, TARGETS = [5, 6, 7, 8, 9], [6, 7, 8, 9, 10]
ADAM = Adam(learning_rate=0.05)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def model(folder: Path) -> LoraModel:
    made = LoraModel(str(folder), "cpu")
    made.create("m1", LoraOptions(rank=4, seed=1))
    return made


def datum(n: int = 5, **columns: list[float]) -> Datum:
    inputs: dict[str, Any] = {name: np.asarray(values[:n], np.float32) for name, values in columns.items()}
    return Datum(np.asarray(TOKENS[:n]), {"target_tokens": np.asarray(TARGETS[:n]), **inputs})


SUPERVISED = datum(weights=[0.0, 1.0, 1.0, 0.5, 2.0])
SAMPLED = datum(logprobs=[-4.0, -5.5, -4.2, -6.0, -3.0], advantages=[0.0, 1.0, -1.0, 0.5, -2.0])


def direct(folder: Path, tokens: list[int], targets: list[int]) -> torch.Tensor:
    reference: Any = AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        logits = reference(input_ids=torch.tensor([tokens])).logits[0]
    found: torch.Tensor = logits.log_softmax(-1)[torch.arange(len(tokens)), torch.tensor(targets)]
    return found


def trained(model: LoraModel, name: str = "m1", steps: int = 3) -> None:
    for _ in range(steps):
        model.forward_backward(name, [SUPERVISED], "cross_entropy", {}, backward=True)
        model.step(name, ADAM)


@pytest.mark.parametrize(
    ("loss_fn", "config", "low", "high"),
    [
        ("importance_sampling", {}, 0, 0),
        ("ppo", {}, 0.8, 1.2),
        ("ppo", {"clip_low_threshold": 0.5, "clip_high_threshold": 1.01}, 0.5, 1.01),
        ("cispo", {}, 0.8, 1.2),
    ],
)
def test_loss_is_the_sum_over_tokens_that_tinker_defines(
    model: LoraModel, folder: Path, loss_fn: str, config: Mapping[str, float], low: float, high: float
) -> None:
    logprobs = direct(folder, TOKENS, TARGETS)
    advantages, sampled = (torch.from_numpy(SAMPLED.inputs[name]) for name in ("advantages", "logprobs"))
    ratio = (logprobs - sampled).exp()
    expected = {
        "importance_sampling": -(ratio * advantages).sum(),
        "ppo": -torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages).sum(),
        "cispo": -(ratio.clamp(low, high) * logprobs * advantages).sum(),
    }[loss_fn]
    found, loss = model.forward_backward("m1", [SAMPLED], loss_fn, config, backward=False)
    np.testing.assert_allclose(found[0], logprobs.numpy(), atol=1e-5)
    assert loss == pytest.approx(expected.item(), abs=1e-4)


def test_gradients_of_calls_add_up_whatever_is_padded(folder: Path) -> None:
    short = datum(3, weights=[1.0, 1.0, 1.0])
    norms = []
    for calls in ([[SUPERVISED, short]], [[SUPERVISED], [short]]):
        model = LoraModel(str(folder), "cpu")
        model.create("m1", LoraOptions(rank=4, seed=1))
        for data in calls:
            found, _ = model.forward_backward("m1", data, "cross_entropy", {}, backward=True)
        norms.append(model.step("m1", ADAM)["grad_norm"])
    np.testing.assert_allclose(found[0], direct(folder, TOKENS[:3], TARGETS[:3]).numpy(), atol=1e-5)
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)


def test_cispo_weighs_the_gradient_of_the_log_probability(model: LoraModel) -> None:
    """Its gradient is that of cross entropy with clipped ratios as weights."""
    found, _ = model.forward_backward("m1", [SAMPLED], "cispo", {}, backward=True)
    first = model.step("m1", Adam(learning_rate=0.0))["grad_norm"]
    ratio = np.exp(found[0] - SAMPLED.inputs["logprobs"]).clip(0.8, 1.2)
    same = datum(weights=list(ratio * SAMPLED.inputs["advantages"]))
    model.forward_backward("m1", [same], "cross_entropy", {}, backward=True)
    assert model.step("m1", Adam(learning_rate=0.0))["grad_norm"] == pytest.approx(first, rel=1e-4)


def test_several_targets_of_a_position_have_log_probabilities_each(model: LoraModel, folder: Path) -> None:
    targets = np.asarray([[target, 3] for target in TARGETS])
    several = Datum(np.asarray(TOKENS), {"target_tokens": targets, "weights": np.full((5, 2), 0.5, np.float32)})
    (found,), loss = model.forward_backward("m1", [several], "cross_entropy", {}, backward=False)
    np.testing.assert_allclose(found[:, 0], direct(folder, TOKENS, TARGETS).numpy(), atol=1e-5)
    np.testing.assert_allclose(found[:, 1], direct(folder, TOKENS, [3] * 5).numpy(), atol=1e-5)
    assert loss == pytest.approx(-0.5 * found.sum(), abs=1e-4)


def test_step_is_that_of_adamw(model: LoraModel) -> None:
    """The first step of Adam moves each parameter with a gradient by the learning rate."""
    model.forward_backward("m1", [SUPERVISED], "cross_entropy", {}, backward=True)
    gradients = {key: p.grad.clone() for key, p in model._adapters["m1"].parameters.items() if p.grad is not None}
    before = {key: p.detach().clone() for key, p in model._adapters["m1"].parameters.items()}
    model.step("m1", Adam(learning_rate=0.01))
    for key, gradient in gradients.items():
        moved = model._adapters["m1"].parameters[key].detach() - before[key]
        large = gradient.abs() > 1e-6
        torch.testing.assert_close(moved[large], -0.01 * gradient[large].sign(), atol=1e-5, rtol=1e-3)


def test_what_workers_merge_is_what_is_trained(model: LoraModel, folder: Path, tmp_path: Path) -> None:
    """The output layer, which the base model ties to its embedding, has an adapter of its own."""
    trained(model)
    model.save("m1", tmp_path / "saved", {}, optimizer=False)
    tensors, config_json = saved_weights(tmp_path / "saved")
    base = {name: tensor.clone() for name, tensor in model.base.model.items()}
    shapes = {name: tuple(tensor.shape) for name, tensor in base.items()}
    adapter = adapter_of(config_json, {name: tuple(t.shape) for name, t in tensors.items()}, shapes)
    assert "lm_head.weight" in adapter.factors
    for name, (a, b) in adapter.factors.items():
        base[name] += adapter.scaling * tensors[b] @ tensors[a]
    merged: Any = AutoModelForCausalLM.from_config(Qwen3Config(**json.loads(model.base.config_json)))
    merged.load_state_dict(base)
    with torch.no_grad():
        logits = merged.eval()(input_ids=torch.tensor([TOKENS])).logits[0].log_softmax(-1)
    expected = [logits[i, token].item() for i, token in enumerate(TOKENS[1:])]
    own, _ = model.score(tmp_path / "saved", TOKENS)
    np.testing.assert_allclose(own[1:], expected, atol=1e-4)
    untrained, _ = model.score(None, TOKENS)
    np.testing.assert_allclose(untrained[1:], direct(folder, TOKENS[:-1], TOKENS[1:]).numpy(), atol=1e-5)
    assert np.abs(own[1:] - untrained[1:]).max() > 0.1


def test_loaded_checkpoint_trains_on_as_the_model_that_saved_it(model: LoraModel, tmp_path: Path) -> None:
    trained(model)
    model.save("m1", tmp_path / "state", {}, optimizer=True)
    model.create("m2", LoraOptions(rank=4, seed=9))
    model.load("m2", tmp_path / "state", optimizer=True)
    losses = []
    for name in ("m1", "m2"):
        trained(model, name)
        losses.append(model.forward_backward(name, [SUPERVISED], "cross_entropy", {}, backward=False)[1])
    assert losses[0] == pytest.approx(losses[1], abs=1e-6)


def test_base_model_is_scored_after_the_last_adapter_is_gone(model: LoraModel) -> None:
    trained(model)
    before, _ = model.score(None, TOKENS)
    model.remove("m1")
    np.testing.assert_array_equal(model.score(None, TOKENS)[0], before)
    model.create("m2", LoraOptions(rank=4))
    model.forward_backward("m2", [SUPERVISED], "cross_entropy", {}, backward=True)
    assert model.step("m2", ADAM)["grad_norm"] > 0


def test_checkpoint_of_another_rank_is_rejected(model: LoraModel, tmp_path: Path) -> None:
    model.save("m1", tmp_path / "sampler", {}, optimizer=False)
    model.create("m2", LoraOptions(rank=8))
    with pytest.raises(ConfigError, match="create a model from the checkpoint"):
        model.load("m2", tmp_path / "sampler", optimizer=False)
    with pytest.raises(ConfigError, match="no optimizer"):
        model.load("m1", tmp_path / "sampler", optimizer=True)


@pytest.mark.parametrize(
    ("data", "loss_fn", "config", "error"),
    [
        (SUPERVISED, "dro", {}, "'dro' is not supported: use cross_entropy"),
        (SAMPLED, "ppo", {"beta": 0.1}, "ppo has no 'beta': it takes clip_high_threshold"),
        (SAMPLED, "ppo", {"clip_low_threshold": "0.1"}, "give a number"),
        (SAMPLED, "cross_entropy", {}, "takes target_tokens, weights, and advantages, logprobs"),
        (datum(weights=[1.0, 1.0]), "cross_entropy", {}, r"weights has the shape \(2,\)"),
        (Datum(np.asarray([99]), datum(1, weights=[1.0]).inputs), "cross_entropy", {}, "99 is no token"),
        (Datum(np.asarray([5, 6]), datum(1, weights=[1.0]).inputs), "cross_entropy", {}, "2 tokens, and target_tok"),
        (Datum(np.asarray([5] * 161), SUPERVISED.inputs), "cross_entropy", {}, "reads 1 to 160"),
        (datum(weights=[float("nan")] * 5), "cross_entropy", {}, "not finite"),
    ],
)
def test_wrong_data_is_rejected_and_no_step_follows(
    model: LoraModel, data: Datum, loss_fn: str, config: Mapping[str, Any], error: str
) -> None:
    model.forward_backward("m1", [SUPERVISED], "cross_entropy", {}, backward=True)
    with pytest.raises(ConfigError, match=error):
        model.forward_backward("m1", [data], loss_fn, config, backward=True)
    with pytest.raises(ConfigError, match="no step was made, as a forward_backward"):
        model.step("m1", ADAM)
    with pytest.raises(ConfigError, match="there are no gradients"):
        model.step("m1", ADAM)


def test_parts_of_the_model_are_chosen(model: LoraModel) -> None:
    model.create("m2", LoraOptions(rank=2, train_mlp=False, train_unembed=False))
    assert all("self_attn" in key for key in model._adapters["m2"].parameters)
    with pytest.raises(ConfigError, match="nothing is trained"):
        model.create("m3", LoraOptions(train_mlp=False, train_unembed=False, train_attn=False))


def test_experts_in_one_tensor_are_rejected(tmp_path: Path) -> None:
    model = LoraModel(str(write_model(tmp_path, "qwen3-moe")), "cpu")
    with pytest.raises(ConfigError, match="train_mlp=False"):
        model.create("m1", LoraOptions())
    model.create("m1", LoraOptions(train_mlp=False))
