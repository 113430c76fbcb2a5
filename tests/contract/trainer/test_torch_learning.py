"""Whole jobs on the real torch engine, with completions drawn from what it published: rewards rise, bits repeat."""

from __future__ import annotations

import math
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from rlboost.services.trainer.adapters.torch.policy import TorchPolicy
from rlboost.services.trainer.domain.loss.policy import job_loss
from rlboost.services.trainer.ports.engine import PolicySettings
from rlboost.services.trainer.ports.samples import RewardBatch, Scores
from rlboost.services.trainer.ports.storage import JobResources
from rlboost.shared.job.spec import JobSpec, RlJob
from rlboost.shared.messages import GroupRequested, SampleFinished
from rlboost.shared.wire import F32, I32, ints, pack
from tests.support.eventually import eventually
from tests.support.model_folder import write_model
from tests.support.tiny_models import VOCABULARY
from tests.support.trainer_fakes import MemoryWeights
from tests.support.trainer_rig import Rig, spec

LENGTH = 4


class Drawer:
    """Draws groups from the committed weights, the same ones for the same seed."""

    def __init__(self, folder: Path, weights: MemoryWeights) -> None:
        self._model: Any = AutoModelForCausalLM.from_pretrained(folder).eval().requires_grad_(requires_grad=False)
        self._weights = weights
        self._version = -1
        self._drawn: dict[int, list[tuple[list[int], list[float]]]] = {}

    def __call__(self, request: GroupRequested, sample: int) -> SampleFinished:
        if request.group not in self._drawn:
            self._drawn[request.group] = self._draw(request)
        tokens, logprobs = self._drawn[request.group][sample - request.group]
        return SampleFinished(
            sample=sample,
            tokens=pack(tokens, I32),
            logprobs=pack(logprobs, F32),
            finish="length",
            spans=[("w-1", request.version, len(tokens))],
            attempts=1,
            group_done=False,
        )

    def _draw(self, request: GroupRequested) -> list[tuple[list[int], list[float]]]:
        if self._version != request.version:
            state = self._model.state_dict()
            for shard in self._weights.versions[request.version]:
                value = torch.frombuffer(bytearray(shard.data), dtype=torch.float32)
                state[shard.name].copy_(value.view(shard.local_shape))
            self._version = request.version
        dice = torch.Generator().manual_seed(request.seed)
        ids = torch.tensor([ints(request.prompt)] * request.n)
        told = []
        for _ in range(LENGTH):
            logprobs = self._model(input_ids=ids).logits[:, -1].log_softmax(-1)
            picked = torch.multinomial(logprobs.exp(), 1, generator=dice)
            ids = torch.cat([ids, picked], 1)
            told.append(logprobs.gather(1, picked))
        return list(zip(ids[:, -LENGTH:].tolist(), torch.cat(told, 1).tolist(), strict=True))


class LearningRig(Rig):
    """A trainer with the torch engine, and a bandit of a job: large tokens are good."""

    def __init__(self, folder: Path, job: RlJob) -> None:
        super().__init__(folder, job)
        self._model = write_model(folder / "model")
        self.reward = share_of_large
        self.manager.script = Drawer(self._model, self.weights)

    def build(self, spec: JobSpec, job_id: str, created: datetime) -> JobResources:
        job = self.rl_job
        policy = TorchPolicy(
            PolicySettings(
                optimizer=job.optimizer,
                lora=job.adapter,
                reference=job.algorithm.needs_reference,
                critic=job.algorithm.critic,
            ),
            device="cpu",
        )
        resources = super().build(job, job_id, created)
        return replace(resources, engine=policy, critic=policy, model=self._model, loss=job_loss(job))


def share_of_large(batch: RewardBatch) -> Scores:
    return Scores(tuple(sum(token >= VOCABULARY // 2 for token in ids) / LENGTH for ids in batch.completion_ids))


def job(algorithm: dict[str, Any], **changes: Any) -> RlJob:
    raw: dict[str, Any] = {
        "algorithm": {"group_size": 8, "updates_per_step": 2, **algorithm},
        "sampling": {"max_tokens": LENGTH},
        "optimizer": {"lr": 2e-2},
        "trainer": {"checkpoint_every": 100, "micro_batch_tokens": 200, "seed": 2},
        "steps": 6,
    }
    return spec(**{**raw, **changes})


ALGORITHMS: dict[str, dict[str, Any]] = {
    "ppo": {"name": "ppo", "kl_coef": 0.01, "critic": {"lr": 1e-2}},
    "dpo": {"name": "dpo"},
}


async def run(rig: Rig) -> list[dict[str, float]]:
    """Run the job; return its metrics, step by step."""
    async with rig.trainer():
        await rig.command("create")
        report = await rig.ended(within_s=60)
        assert (report.state, report.error) == ("completed", "")
    return [report.metrics for report in await rig.steps()]


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
async def test_rewards_increase(tmp_path: Path, name: str) -> None:
    metrics = await run(LearningRig(tmp_path, job(ALGORITHMS[name])))
    rewards = [row["reward/mean"] for row in metrics]
    assert sum(rewards[:2]) / 2 < 0.55
    assert sum(rewards[-2:]) / 2 > 0.75
    if name == "ppo":
        told = {"value/loss", "value/clip_ratio", "value/explained_variance", "advantage/mean", "advantage/std", "kl"}
        assert all(told <= set(row) for row in metrics)
        assert metrics[0]["value/explained_variance"] == pytest.approx(0.0), "all values were 0"
    else:
        assert all({"rewards/accuracies", "rewards/margins", "logps/chosen", "kl"} <= set(row) for row in metrics)
        assert metrics[0]["loss"] == pytest.approx(math.log(2), abs=0.05), "little has moved yet"
        assert metrics[-1]["rewards/margins"] > metrics[0]["rewards/margins"]


async def test_killed_job_with_critic_ends_with_the_same_bits(tmp_path: Path) -> None:
    trainer = {"checkpoint_every": 1, "micro_batch_tokens": 60}
    steady = LearningRig(tmp_path / "steady", job(ALGORITHMS["ppo"], steps=3, trainer=trainer))
    expected = await run(steady)
    rig = LearningRig(tmp_path / "killed", steady.rl_job)
    rig.manager.held = {2}
    async with rig.trainer(killed=True):
        await rig.command("create")
        await eventually(lambda: 2 in rig.weights.versions, within_s=60)
        await rig.waits_for("samples of step 3")
    rig.lease_runs_out()
    rig.manager.held = set()
    assert (await run(rig))[-1]["value/loss"] == expected[-1]["value/loss"]
    assert rig.folder.model == steady.folder.model
