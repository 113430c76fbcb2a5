"""Pairs on the torch engine: what an update does is what DPO's loss, written in one graph, would have done."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForCausalLM

from rlboost.services.trainer.adapters.torch.policy import TorchPolicy
from rlboost.services.trainer.domain.loss.policy import job_loss
from rlboost.services.trainer.domain.loss.preference import weighted
from rlboost.services.trainer.domain.plan import TrainingRow
from rlboost.services.trainer.ports.engine import PolicySettings
from rlboost.shared.job.algorithm import PreferenceSpec
from rlboost.shared.job.training import LoraSpec, OptimizerSpec
from rlboost.shared.wire import ints
from tests.support.jobs import parse_rl
from tests.support.model_folder import write_model
from tests.support.tiny_models import CONFIGS, split_experts
from tests.support.training_rows import rows

SPEC = PreferenceSpec(beta=0.2)
RATE, TEMPERATURE = 1e-2, 0.8
LOSS = job_loss(
    parse_rl(
        {"model": "m", "data": {"train": "t"}, "reward": {"function": "m:f"}, "algorithm": {"name": "dpo"}, "steps": 1}
    )
)


def engine(folder: Path, lora: LoraSpec | None = None) -> TorchPolicy:
    optimizer = OptimizerSpec(lr=RATE, grad_clip=1e6)
    made = TorchPolicy(
        PolicySettings(optimizer=optimizer, temperature=TEMPERATURE, lora=lora, reference=True), device="cpu"
    )
    made.load_hf(folder)
    return made


def pairs(n: int = 4, seed: int = 0) -> list[tuple[TrainingRow, TrainingRow]]:
    return list(zip(rows(n, seed), rows(n, seed + 100), strict=True))


def update(made: TorchPolicy, given: list[tuple[TrainingRow, TrainingRow]], cut: int) -> tuple[float, float]:
    """Update as a step does; return the gradient's norm and the mean loss of pairs."""
    flat = [row for pair in given for row in pair]
    weighed, sums = weighted(flat, made.logprobs([flat]), made.reference_logprobs([flat]), SPEC)
    by_length = sorted(weighed, key=lambda row: -row.n_tokens)
    for i in range(0, len(by_length), cut):
        made.accumulate([by_length[i : i + cut]], LOSS)
    return made.step(RATE), sums["loss"] / len(flat)


def written(model: Any, start: Any, given: list[tuple[TrainingRow, TrainingRow]]) -> Tensor:
    def gone(row: TrainingRow) -> Tensor:
        prompt, tokens = ints(row.prompt), ints(row.completion)
        found = []
        for one in (model, start):
            logits = one(input_ids=torch.tensor([[*prompt, *tokens]])).logits[0] / TEMPERATURE
            picked = torch.log_softmax(logits, -1)[len(prompt) - 1 : -1].gather(1, torch.tensor(tokens)[:, None])
            found.append(picked.sum())
        return found[0] - found[1].detach()

    return torch.stack([-functional.logsigmoid(SPEC.beta * (gone(best) - gone(worst))) for best, worst in given])


@pytest.mark.parametrize("cut", [1, 3, 100])
@pytest.mark.parametrize("family", sorted(CONFIGS))
def test_preference_update_with_split_pairs_matches_the_formula(tmp_path: Path, family: str, cut: int) -> None:
    made = engine(write_model(tmp_path, family))
    update(made, pairs(seed=1), cut)  # away from the starting weights
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    start: Any = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    shards = {shard.name: shard for shard in made.export_shards()}
    with torch.no_grad():
        for name, tensor in split_experts(model.state_dict()).items():
            if name in shards:
                tensor.copy_(torch.frombuffer(bytearray(shards[name].data), dtype=torch.float32).view(tensor.shape))
    losses = written(model, start, pairs())
    losses.mean().backward()
    expected = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]).item()
    norm, ours = update(made, pairs(), cut)
    assert ours == pytest.approx(losses.mean().item(), rel=1e-3)
    assert norm == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("lora", [None, LoraSpec()], ids=["model", "adapter"])
def test_preference_updates_prefer_the_best(tmp_path: Path, lora: LoraSpec | None) -> None:
    made = engine(write_model(tmp_path), lora)
    losses = [update(made, pairs(), 3)[1] for _ in range(8)]
    assert losses[0] == pytest.approx(np.log(2), abs=1e-5), "nothing has moved yet"
    assert losses[-1] < losses[0] / 2


def test_rows_reference_equals_the_engines(tmp_path: Path) -> None:
    made = engine(write_model(tmp_path))
    update(made, pairs(seed=1), 3)
    batch = rows()
    known = [replace(row, reference=one) for row, one in zip(batch, made.reference_logprobs([batch]), strict=True)]
    numbers = made.accumulate([known], LOSS)
    assert numbers == made.accumulate([batch], LOSS)
    assert numbers["reference_kl"] > 0
