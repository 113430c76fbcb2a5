"""The critic of the torch engine, against an independent computation with plain transformers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModel

from rlboost.services.trainer.adapters.torch.models import whole_critic
from rlboost.services.trainer.adapters.torch.policy import TorchPolicy
from rlboost.services.trainer.domain.loss.function import add_sums
from rlboost.services.trainer.ports.engine import NotFinite, PolicySettings
from rlboost.shared.errors import ConfigError, Corrupt, Fatal
from rlboost.shared.job.algorithm import CriticSpec
from rlboost.shared.job.training import LoraSpec, OptimizerSpec
from rlboost.shared.wire import F32, I32, floats, ints, length, pack
from tests.support.losses import clipped_loss
from tests.support.model_folder import write_model
from tests.support.one_rank import critic_of
from tests.support.policy_comparison import bits
from tests.support.tiny_models import CONFIGS
from tests.support.training_rows import rows, taught

LOSS = clipped_loss(0.2, 0.2)
RATE = 1e-2
SPEC = CriticSpec(lr=5e-3, value_clip=0.2)


def engine(
    folder: Path, critic: CriticSpec | None = SPEC, *, lora: LoraSpec | None = None, dtype: str = "float32"
) -> TorchPolicy:
    made = TorchPolicy(
        PolicySettings(optimizer=OptimizerSpec(lr=RATE), dtype=dtype, lora=lora, critic=critic), device="cpu"
    )
    made.load_hf(folder)
    return made


def train(made: TorchPolicy, seed: int) -> dict[str, float]:
    numbers = made.accumulate([taught(seed=seed)], LOSS)
    assert made.step(RATE) > 0
    return numbers


def learn(made: TorchPolicy, n: int = 8) -> list[float]:
    """Train on the same rows again and again, from the critic's own values; return the losses."""
    losses = []
    for _ in range(n):
        batch = [replace(row, values=one) for row, one in zip(taught(), made.values([taught()]), strict=True)]
        losses.append(made.accumulate([batch], LOSS)["value_loss"])
        made.step(RATE)
    return losses


def test_load_drops_accumulated_critic_gradients(tmp_path: Path) -> None:
    steady, interrupted = (engine(write_model(tmp_path / "model")) for _ in range(2))
    for made in (steady, interrupted):
        train(made, 0)
    steady.snapshot()(tmp_path)
    interrupted.accumulate([taught(seed=1)], LOSS)
    interrupted.load(tmp_path)
    assert train(interrupted, 2) == train(steady, 2)
    assert interrupted.values([taught()]) == steady.values([taught()])
    assert bits(interrupted) == bits(steady)


def test_new_critic_predicts_zero(tmp_path: Path) -> None:
    columns = engine(write_model(tmp_path)).values([rows(4)[:1], rows(4)[1:]])
    assert [len(column) for column in columns] == [len(row.completion) for row in rows(4)]
    assert not any(any(floats(column)) for column in columns)


@pytest.mark.parametrize("family", sorted(CONFIGS))
def test_critic_values_and_gradients_match_the_formula(tmp_path: Path, family: str) -> None:
    """The same network in plain transformers, sample by sample: no padding, no micro-batches, no columns."""
    made = engine(write_model(tmp_path, family))
    for _ in range(2):  # away from the zeros that the head begins with
        train(made, 0)
    critic = critic_of(made)
    state = {name: tensor.detach().clone() for name, tensor in critic.tensors.items()}
    body: Any = AutoModel.from_pretrained(tmp_path).eval()
    prefix = f"{body.base_model_prefix}."
    body.load_state_dict({name.removeprefix(prefix): v for name, v in state.items() if name.startswith(prefix)})
    head = [state[f"head.{name}"].requires_grad_() for name in ("weight", "bias")]
    batch, columns = taught(seed=3), []
    total = torch.zeros(())
    for row in batch:
        prompt, tokens = ints(row.prompt), ints(row.completion)
        hidden = body(input_ids=torch.tensor([[*prompt, *tokens]])).last_hidden_state[0, len(prompt) - 1 : -1]
        values = hidden @ head[0][0] + head[1]
        columns.append(values.tolist())
        before, returns = torch.tensor(floats(row.values)), torch.tensor(floats(row.returns))
        held = torch.maximum(torch.minimum(values, before + 0.2), before - 0.2)
        total = total + (torch.maximum((values - returns) ** 2, (held - returns) ** 2) / 2).sum()
    total.backward()
    for ours, expected in zip(made.values([batch]), columns, strict=True):
        assert floats(ours) == pytest.approx(expected, abs=2e-5)
    numbers = made.accumulate([batch], LOSS)
    assert numbers["value_loss"] == pytest.approx(total.item(), rel=1e-4)
    assert 0 < numbers["value_clipped"] < sum(len(ints(row.completion)) for row in batch)
    gradients = dict(body.named_parameters())
    for name, tensor in critic.tensors.items():
        part = name.removeprefix(prefix)
        target = head[name == "head.bias"].grad if name.startswith("head.") else gradients[part].grad
        assert tensor.grad is not None
        assert target is not None
        np.testing.assert_allclose(tensor.grad, target, atol=2e-4, rtol=2e-3)


def test_critic_update_is_independent_of_micro_batches(tmp_path: Path) -> None:
    write_model(tmp_path)
    whole, parts = engine(tmp_path), engine(tmp_path)
    for made in (whole, parts):
        train(made, 9)
    sums = whole.accumulate([taught(8)], LOSS)
    norm = whole.step(RATE)
    many: dict[str, float] = {}
    for row in reversed(taught(8)):
        add_sums(many, parts.accumulate([[row]], LOSS))
    assert [many[name] for name in ("loss", "value_loss")] == pytest.approx(
        [sums[name] for name in ("loss", "value_loss")], rel=1e-3
    )
    assert parts.step(RATE) == pytest.approx(norm, rel=1e-4)
    for one, other in zip(whole.values([taught(8)]), parts.values([taught(8)]), strict=True):
        assert floats(other) == pytest.approx(floats(one), abs=2e-3)


@pytest.mark.parametrize("lora", [None, LoraSpec()], ids=["model", "adapter"])
def test_critic_learns_without_changing_the_policy(tmp_path: Path, lora: LoraSpec | None) -> None:
    write_model(tmp_path)
    with_it, without = engine(tmp_path, lora=lora), engine(tmp_path, None, lora=lora)
    losses = learn(with_it)
    for _ in losses:
        assert "value_loss" not in train(without, 0)
    assert losses[-1] < losses[0] / 2
    assert bits(with_it) == bits(without)


@pytest.mark.parametrize("lora", [None, LoraSpec(dropout=0.1)], ids=["model", "adapter"])
def test_checkpoint_with_critic_resumes_exactly(tmp_path: Path, lora: LoraSpec | None) -> None:
    write_model(tmp_path / "model")
    steady, restored = engine(tmp_path / "model", lora=lora), engine(tmp_path / "model", lora=lora)
    train(steady, 0)
    write = steady.snapshot()
    expected = [train(steady, seed) for seed in (1, 2)]
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    write(folder)  # what was captured, whatever was trained since
    restored.load(folder)
    assert [train(restored, seed) for seed in (1, 2)] == expected
    assert restored.values([taught()]) == steady.values([taught()])
    assert bits(restored) == bits(steady)


def test_checkpoint_without_critic_is_rejected(tmp_path: Path) -> None:
    write_model(tmp_path / "model")
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    engine(tmp_path / "model", None).snapshot()(folder)
    with pytest.raises(Corrupt, match="the critic in checkpoint"):
        engine(tmp_path / "model").load(folder)


def test_critic_learning_rate_follows_the_schedule(tmp_path: Path) -> None:
    write_model(tmp_path)
    half, other = engine(tmp_path), engine(tmp_path, replace_lr(SPEC, SPEC.lr / 2))
    for made, rate in ((half, RATE / 2), (other, RATE)):
        made.accumulate([taught()], LOSS)
        made.step(rate)
    assert half.values([taught()]) == other.values([taught()])


def replace_lr(spec: CriticSpec, lr: float) -> CriticSpec:
    return spec.model_copy(update={"lr": lr})


def test_nan_value_changes_neither_critic_nor_policy(tmp_path: Path) -> None:
    write_model(tmp_path)
    made = engine(tmp_path)
    train(made, 0)
    before, values = bits(made), made.values([taught()])
    [row] = taught(1)
    bad = replace(row, returns=pack([float("nan")] * length(row.completion, I32), F32))
    made.accumulate([[bad]], LOSS)
    with pytest.raises(NotFinite, match=r"the gradient's norm is .*, the critic's nan"):
        made.step(RATE)
    assert (bits(made), made.values([taught()])) == (before, values)
    train(made, 1)
    assert np.isfinite(floats(made.values([taught()])[0])).all()


def test_engine_without_critic_or_reference_raises(tmp_path: Path) -> None:
    made = engine(write_model(tmp_path), None)
    with pytest.raises(Fatal, match="no critic"):
        made.values([rows()])
    with pytest.raises(Fatal, match="no reference"):
        made.reference_logprobs([rows()])


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json cannot be read"):
        whole_critic(tmp_path, "eager")


def test_bfloat16_critic_has_float32_weights_and_head(tmp_path: Path) -> None:
    made = engine(write_model(tmp_path), dtype="bfloat16")
    losses = learn(made)
    assert losses[-1] < losses[0]
    values = floats(made.values([taught()])[0])
    assert values != torch.tensor(values).bfloat16().tolist()
