"""The reference of a KL penalty: what the weights of the job's beginning say, whatever has been trained since."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest
import torch

from rlboost.services.trainer.adapters.torch.policy import TorchPolicy
from rlboost.services.trainer.domain.loss.function import TokenBatch
from rlboost.services.trainer.domain.loss.policy import PolicyLoss
from rlboost.services.trainer.ports.engine import PolicySettings
from rlboost.shared.job.training import LoraSpec, OptimizerSpec
from rlboost.shared.wire import floats
from tests.support.model_folder import write_model
from tests.support.training_rows import rows

LOSS = PolicyLoss(clip="ppo", clip_low=0.2, clip_high=0.28, kl_coef=0.1)
RATE = 1e-2


def engine(folder: Path, lora: LoraSpec | None, *, reference: bool = True, dtype: str = "float32") -> TorchPolicy:
    made = TorchPolicy(
        PolicySettings(optimizer=OptimizerSpec(lr=RATE), temperature=0.9, dtype=dtype, lora=lora, reference=reference),
        device="cpu",
    )
    made.load_hf(folder)
    return made


@pytest.fixture(params=[None, LoraSpec()], ids=["model", "adapter"])
def lora(request: pytest.FixtureRequest) -> LoraSpec | None:
    spec: LoraSpec | None = request.param
    return spec


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_initial_kl_is_zero(tmp_path: Path, lora: LoraSpec | None, dtype: str) -> None:
    write_model(tmp_path)
    assert engine(tmp_path, lora, dtype=dtype).accumulate([rows()], LOSS)["reference_kl"] == 0.0


def test_reference_is_constant_during_training(tmp_path: Path, lora: LoraSpec | None) -> None:
    write_model(tmp_path)
    ours, untouched = engine(tmp_path, lora), engine(tmp_path, lora, reference=False)
    seen: list[torch.Tensor] = []

    def noted(batch: TokenBatch) -> tuple[torch.Tensor, dict[str, float]]:
        assert batch.reference is not None
        seen.append(batch.reference)
        return LOSS(batch)

    for seed in range(3):
        numbers = ours.accumulate([rows(seed=seed)], noted)
        assert ours.step(RATE) > 0
    assert numbers["reference_kl"] > 0
    expected = [floats(column) for column in untouched.logprobs([rows(seed=2)])]
    assert seen[-1].tolist() == [value for column in expected for value in column]
    moved = [floats(column) for column in ours.logprobs([rows(seed=2)])]
    assert moved != expected


def test_kl_penalty_pulls_towards_the_reference(tmp_path: Path, lora: LoraSpec | None) -> None:
    """The same updates, once with a penalty that outweighs the advantages."""
    write_model(tmp_path)
    distances = []
    for coefficient in (0.0, 100.0):
        ours = engine(tmp_path, lora)
        loss = PolicyLoss(clip="ppo", clip_low=0.2, clip_high=0.28, kl_coef=coefficient)
        for _ in range(6):
            distance = ours.accumulate([rows()], loss)["reference_kl"]
            ours.step(RATE)
        distances.append(distance)
    assert distances[1] < distances[0] / 2


def test_reference_pass_keeps_accumulated_gradients(tmp_path: Path, lora: LoraSpec | None) -> None:
    write_model(tmp_path)
    with_it, without = engine(tmp_path, lora), engine(tmp_path, lora, reference=False)
    loss = PolicyLoss(clip="ppo", clip_low=0.2, clip_high=0.28)
    for made in (with_it, without):
        for row in rows(4):
            made.accumulate([[row]], loss)
    assert with_it.step(RATE) == without.step(RATE)
    what: Literal["adapter", "base"] = "adapter" if lora else "base"
    for one, other in zip(with_it.export_shards(what), without.export_shards(what), strict=True):
        assert bytes(one.data) == bytes(other.data)
