"""The torch engine, compared with independent computations in plain transformers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from rlboost.services.trainer import build
from rlboost.services.trainer.adapters.torch.layers import EXPERTS
from rlboost.services.trainer.adapters.torch.policy import TorchPolicy
from rlboost.services.trainer.domain.loss.function import TokenBatch
from rlboost.services.trainer.domain.plan import TrainingRow
from rlboost.services.trainer.ports.engine import NotFinite, PolicySettings
from rlboost.services.trainer.settings import Settings
from rlboost.shared.errors import ConfigError
from rlboost.shared.job.spec import parse
from rlboost.shared.job.training import OptimizerSpec
from rlboost.shared.weights.manifest import Shard
from rlboost.shared.wire import F32, U8, floats, ints
from tests.support.losses import clipped_loss, decoupled_loss
from tests.support.model_folder import write_model
from tests.support.small_job import small_job
from tests.support.tiny_models import CONFIGS, logprobs
from tests.support.training_rows import rows, training_row, with_loss_mask

LOW, HIGH = 0.2, 0.28


def engine(folder: Path, temperature: float = 1.0, **optimizer: Any) -> TorchPolicy:
    made = TorchPolicy(PolicySettings(optimizer=OptimizerSpec(**optimizer), temperature=temperature), device="cpu")
    made.load_hf(folder)
    return made


@pytest.mark.parametrize("family", sorted(CONFIGS))
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_match_a_plain_forward_pass(tmp_path: Path, family: str, temperature: float) -> None:
    write_model(tmp_path, family)
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    batch = rows(7)
    columns = engine(tmp_path, temperature).logprobs([batch[:3], batch[3:]])
    for row, column in zip(batch, columns, strict=True):
        expected = logprobs(model, ints(row.prompt), ints(row.completion), temperature)
        assert floats(column) == pytest.approx(expected, abs=2e-5)


def naive_step(model: Any, batch: list[TrainingRow], optimizer: torch.optim.Optimizer, clip: float) -> float:
    """One update, sample by sample: the mean over all trained tokens of -min(ratio A, clip(ratio) A)."""
    n_tokens = sum(row.n_loss_tokens for row in batch)
    optimizer.zero_grad()
    for row in batch:
        prompt, tokens = ints(row.prompt), ints(row.completion)
        logits = model(input_ids=torch.tensor([[*prompt, *tokens]])).logits[0]
        new = torch.log_softmax(logits, -1)[len(prompt) - 1 : -1].gather(1, torch.tensor(tokens)[:, None])[:, 0]
        if row.loss_mask:
            new = new[torch.tensor(ints(row.loss_mask, U8), dtype=torch.bool)]
        ratio = (new - torch.tensor(floats(row.sampled))).exp()
        advantages = torch.tensor(floats(row.advantages))
        value = torch.min(ratio * advantages, ratio.clamp(1 - LOW, 1 + HIGH) * advantages)
        (-value.sum() / n_tokens).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
    optimizer.step()
    return float(norm)


@pytest.mark.parametrize("family", ["qwen3-tied", "llama-untied", "qwen3-moe"])
def test_steps_match_a_naive_implementation(tmp_path: Path, family: str) -> None:
    write_model(tmp_path, family)
    ours = engine(tmp_path, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, grad_clip=0.5)
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
    for seed in range(3):
        batch = [*rows(5, seed), *with_loss_mask(rows(4, seed + 10))]
        expected = naive_step(model, batch, optimizer, 0.5)
        for part in (batch[:4], batch[4:5], batch[5:]):
            ours.accumulate([part], clipped_loss(LOW, HIGH))
        assert ours.step(1e-3) == pytest.approx(expected, rel=1e-4)
    model.save_pretrained(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    shards = {shard.name: np.frombuffer(shard.data, F32) for shard in ours.export_shards()}
    assert set(shards) == set(state)
    for name, tensor in state.items():
        np.testing.assert_allclose(shards[name], tensor.numpy().ravel(), atol=6e-6, err_msg=name)


def test_stale_updates_match_a_naive_decoupled_objective(tmp_path: Path) -> None:
    cap, updates = 1.1, [rows(5, seed=1), rows(4, seed=2)]
    write_model(tmp_path)
    ours = engine(tmp_path, lr=1e-3)
    columns = iter(ours.logprobs(updates))
    aged = [[replace(row, proximal=next(columns)) for row in batch] for batch in updates]
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0)
    first = [[torch.tensor(logprobs(model, ints(r.prompt), ints(r.completion))) for r in batch] for batch in updates]
    n_capped = 0
    for batch, proximal, old in zip(updates, first, aged, strict=True):
        optimizer.zero_grad()
        for row, then in zip(batch, proximal, strict=True):
            prompt, tokens = ints(row.prompt), ints(row.completion)
            logits = model(input_ids=torch.tensor([[*prompt, *tokens]])).logits[0]
            new = torch.log_softmax(logits, -1)[len(prompt) - 1 : -1].gather(1, torch.tensor(tokens)[:, None])[:, 0]
            ratio, age = (new - then).exp(), (then - torch.tensor(floats(row.sampled))).exp()
            advantages = torch.tensor(floats(row.advantages))
            value = torch.min(ratio * advantages, ratio.clamp(1 - LOW, 1 + HIGH) * advantages)
            (-(age.clamp(max=cap) * value).sum() / sum(len(ints(r.completion)) for r in batch)).backward()
            n_capped += int((age > cap).sum())
        norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
        optimizer.step()
        sums = [ours.accumulate([part], decoupled_loss(LOW, HIGH, cap)) for part in (old[:2], old[2:])]
        n_capped -= int(sum(part["tis_capped"] for part in sums))
        assert ours.step(1e-3) == pytest.approx(norm, rel=1e-4)
    assert n_capped == 0
    state = model.state_dict()
    for shard in ours.export_shards():
        np.testing.assert_allclose(
            np.frombuffer(shard.data, F32), state[shard.name].numpy().ravel(), atol=1e-4, err_msg=shard.name
        )


def test_accumulate_makes_one_forward_pass_per_micro_batch(tmp_path: Path) -> None:
    write_model(tmp_path)
    ours = engine(tmp_path)
    shapes: list[tuple[int, ...]] = []
    ours.rank.module.register_forward_pre_hook(
        lambda _model, _args, given: shapes.append(tuple(given["input_ids"].shape)), with_kwargs=True
    )
    batch = sorted(rows(6), key=lambda row: row.n_tokens)
    ours.accumulate([batch[:4], batch[4:]], clipped_loss(LOW, HIGH))
    ours.step(1e-3)
    assert shapes == [(1, sum(row.n_tokens for row in part)) for part in (batch[:4], batch[4:])]


def test_tied_tensors_are_exported_once(tmp_path: Path) -> None:
    write_model(tmp_path, "qwen3-tied")
    names = [shard.name for shard in engine(tmp_path).export_shards()]
    assert sorted(names) == sorted(load_file(tmp_path / "model.safetensors"))
    assert "model.embed_tokens.weight" in names
    assert "lm_head.weight" not in names


@pytest.mark.parametrize("family", ["llama-untied", "qwen3-moe"])
def test_export_has_every_tensor_of_the_model_files(tmp_path: Path, family: str) -> None:
    write_model(tmp_path, family)
    shards = {shard.name: bytes(shard.data) for shard in engine(tmp_path).export_shards()}
    saved = load_file(tmp_path / "model.safetensors")
    assert shards == {name: tensor.numpy().tobytes() for name, tensor in saved.items()}


def test_load_shards_restores_exported_experts(tmp_path: Path) -> None:
    write_model(tmp_path, "qwen3-moe")
    ours = engine(tmp_path)
    before = [replace_data(shard) for shard in ours.export_shards()]
    ours.accumulate([rows()], clipped_loss(LOW, HIGH))
    ours.step(1e-2)
    ours.load_shards(before)
    assert [replace_data(shard) for shard in ours.export_shards()] == before


def replace_data(shard: Shard) -> Shard:
    """Return the shard with a copy of its data, which stays valid."""
    return shard._replace(data=bytes(shard.data))


def test_experts_under_autocast_compute_in_bfloat16(tmp_path: Path) -> None:
    """The same values as experts with weights of bfloat16, bit for bit, and gradients in float32."""
    model: Any = AutoModelForCausalLM.from_pretrained(
        write_model(tmp_path, "qwen3-moe"), experts_implementation=EXPERTS, dtype=torch.float32
    )
    experts = model.model.layers[1].mlp.experts
    hidden, indices, weights = torch.randn(5, 32), torch.randint(8, (5, 2)), torch.rand(5, 2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = experts(hidden, indices, weights)
    found.sum().backward()
    assert experts.down_proj.grad.dtype is torch.float32
    torch.testing.assert_close(found, experts.bfloat16()(hidden.bfloat16(), indices, weights), rtol=0, atol=0)


def test_step_uses_the_given_learning_rate(tmp_path: Path) -> None:
    write_model(tmp_path)
    still = engine(tmp_path)
    before = [bytes(shard.data) for shard in still.export_shards()]
    still.accumulate([rows()], clipped_loss(LOW, HIGH))
    still.step(0.0)
    assert [bytes(shard.data) for shard in still.export_shards()] == before


def test_gradients_not_finite_leave_weights_unchanged(tmp_path: Path) -> None:
    write_model(tmp_path)
    broken = engine(tmp_path)
    before = [bytes(shard.data) for shard in broken.export_shards()]
    broken.accumulate([[training_row([3], [4], [-4.5])]], _without_a_gradient)
    with pytest.raises(NotFinite, match="the gradient's norm is nan"):
        broken.step(1e-3)
    assert [bytes(shard.data) for shard in broken.export_shards()] == before


def _without_a_gradient(batch: TokenBatch) -> tuple[torch.Tensor, dict[str, float]]:
    """Return 0, and 0 / 0 as its gradient."""
    return (batch.logprobs - batch.logprobs).square().sqrt().sum(), {"divisor": 1.0}


@pytest.mark.parametrize(("logprob", "loss"), [(float("nan"), "nan"), (-1e4, "inf")])
def test_loss_not_finite_is_raised_before_backward(tmp_path: Path, logprob: float, loss: str) -> None:
    write_model(tmp_path)
    ours = engine(tmp_path)
    bad = training_row([3], [4], [logprob], -1.0)
    with pytest.raises(NotFinite, match=f"the loss is {loss}"):
        ours.accumulate([[bad]], clipped_loss(LOW, HIGH))
    assert ours.step(1e-3) == 0.0, "nothing was accumulated"


def test_offload_on_a_cpu_trainer_is_rejected(tmp_path: Path) -> None:
    for ranks in ({"data_parallel": 2}, {"backend": "megatron"}, {}):
        spec = parse({**small_job(steps=1), "trainer": {"offload": "all", **ranks}})
        settings = PolicySettings.of(spec, "token_mean", None)
        with pytest.raises(ConfigError, match=r"trainer\.offload: all needs a GPU.*leave it out"):
            build._engine(Settings(device="cpu"), spec.trainer, tmp_path, None, settings)
    assert isinstance(build._engine(Settings(device="meta"), spec.trainer, tmp_path, None, settings), TorchPolicy)


def test_folder_without_a_model_is_rejected_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=str(tmp_path)):
        engine(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    (tmp_path / "model.safetensors").write_bytes(b"not tensors")
    with pytest.raises(ConfigError, match=str(tmp_path)):
        engine(tmp_path)
