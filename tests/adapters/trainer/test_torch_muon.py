"""Muon in the torch engine: its definition in numpy, with AdamW, offloaded, in checkpoints, and in a job."""

from __future__ import annotations

import threading
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM

from rlboost.services.trainer.adapters.torch.fsdp import hidden_matrices, optimizers
from rlboost.services.trainer.adapters.torch.policy import TorchPolicy
from rlboost.services.trainer.domain.loss.function import sft_loss
from rlboost.services.trainer.domain.plan import constant
from rlboost.services.trainer.ports.engine import PolicySettings
from rlboost.services.trainer.ports.samples import Prompt
from rlboost.services.trainer.ports.storage import JobResources
from rlboost.shared.errors import ConfigError
from rlboost.shared.job.algorithm import CriticSpec
from rlboost.shared.job.spec import JobSpec, parse
from rlboost.shared.job.training import Offload, OptimizerSpec
from rlboost.shared.wire import I32, pack
from tests.support.eventually import eventually
from tests.support.losses import clipped_loss
from tests.support.model_folder import write_model
from tests.support.policy_comparison import bits
from tests.support.small_job import small_job
from tests.support.trainer_rig import Rig
from tests.support.training_rows import advantage_of, rows, taught

LR, DECAY, CLIP = 1e-2, 0.1, 0.5
LOSS = clipped_loss(0.2, 0.28)
BY_ADAMW = ("embed_tokens", "lm_head", "norm")
Matrix = NDArray[np.float32]


def engine(folder: Path, *, offload: Offload = "none", **optimizer: Any) -> TorchPolicy:
    spec = OptimizerSpec(**{"name": "muon", "lr": LR, "weight_decay": DECAY, "grad_clip": CLIP, **optimizer})
    made = TorchPolicy(PolicySettings(optimizer=spec, offload=offload), device="cpu")
    made.load_hf(folder)
    return made


def train(policy: TorchPolicy, seed: int, rate: float = LR) -> None:
    policy.accumulate([rows(seed=seed)], LOSS)
    policy.step(rate)


# --- what it computes ---


def rounded(matrix: NDArray[Any]) -> Matrix:
    """Round to bfloat16, to the nearest and ties to even."""
    as_ints = np.ascontiguousarray(matrix, np.float32).view(np.uint32)
    kept: Matrix = (as_ints + 0x7FFF + (as_ints >> 16 & 1) & np.uint32(0xFFFF0000)).view(np.float32)
    return kept


def orthogonalized(matrix: Matrix) -> Matrix:
    """Return five Newton-Schulz steps, as the source prints them; each product is rounded to bfloat16."""
    if matrix.shape[0] > matrix.shape[1]:
        return orthogonalized(matrix.T).T
    x = rounded(matrix)
    x = rounded(x / rounded(np.asarray(np.linalg.norm(x))))
    for _ in range(5):
        a = rounded(x @ x.T)
        b = rounded(-4.7750 * a + 2.0315 * (a @ a))
        x = rounded(3.4445 * x + b @ x)
    return x


class ReferenceMuon:
    """One matrix: momentum by a running mean, Nesterov's, made orthogonal, as large as an update of AdamW."""

    def __init__(self, weight: Matrix) -> None:
        self.weight, self._momentum = weight.astype(np.float32), np.zeros_like(weight)

    def step(self, gradient: Matrix, rate: float) -> None:
        self._momentum = 0.95 * self._momentum + 0.05 * gradient
        update = orthogonalized(0.05 * gradient + 0.95 * self._momentum)
        scale = 0.2 * max(update.shape) ** 0.5
        self.weight = self.weight * (1 - rate * DECAY) - rate * scale * update


@pytest.mark.parametrize("family", ["qwen3-tied", "llama-untied"])
def test_muon_updates_matrices_and_adamw_the_others(tmp_path: Path, family: str) -> None:
    write_model(tmp_path, family)
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path)
    spec = OptimizerSpec(name="muon", lr=LR, weight_decay=DECAY)
    muon, adamw = optimizers(model, list(model.parameters()), spec)
    names = [name for name, _ in model.named_parameters() if not any(part in name for part in BY_ADAMW)]
    matrices = {name: ReferenceMuon(model.get_parameter(name).detach().numpy().copy()) for name in names}
    rest = {name: p.detach().clone() for name, p in model.named_parameters() if name not in matrices}
    plain = torch.optim.AdamW(rest.values(), lr=LR, betas=(0.9, 0.95), weight_decay=DECAY)
    dice = torch.Generator().manual_seed(0)
    for _ in range(4):
        for name, parameter in model.named_parameters():
            parameter.grad = torch.randn(parameter.shape, generator=dice)
            if name in matrices:
                matrices[name].step(parameter.grad.numpy(), LR)
            else:
                rest[name].grad = parameter.grad.clone()
        for optimizer in (muon, adamw, plain):
            optimizer.step()
    assert len(matrices) == 7 * model.config.num_hidden_layers
    for name, reference in matrices.items():
        # A product of another order of sums is rounded to another bfloat16 now and then: a hundredth of the way here.
        np.testing.assert_allclose(
            model.get_parameter(name).detach().numpy(), reference.weight, atol=2e-4, err_msg=name
        )
    for name, weight in rest.items():
        torch.testing.assert_close(model.get_parameter(name).detach(), weight)


@pytest.mark.parametrize(("family", "n_matrices"), [("qwen3-tied", 21), ("llama-untied", 21), ("gpt2", 8)])
def test_hidden_matrices_exclude_embeddings_and_head(tmp_path: Path, family: str, n_matrices: int) -> None:
    write_model(tmp_path, family)
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path)
    found = hidden_matrices(model, list(model.parameters()))
    assert len(found) == n_matrices
    outer = {id(model.get_input_embeddings().weight), id(model.get_output_embeddings().weight)}
    assert not outer & {id(matrix) for matrix in found}
    assert all((96 not in matrix.shape and 160 not in matrix.shape) or family == "gpt2" for matrix in found)


def test_muon_and_adamw_share_learning_rate_and_clip(tmp_path: Path) -> None:
    write_model(tmp_path)
    still = engine(tmp_path)
    before = bits(still)
    train(still, 0, rate=0.0)
    assert bits(still) == before
    # Muon and AdamW undo a gradient's size, so only a clip that differs from step to step shows.
    loose, tight = engine(tmp_path, grad_clip=1e9), engine(tmp_path, grad_clip=1e-3)
    for policy in (loose, tight):
        train(policy, 0)
        steeper = [replace(row, advantages=constant(9 * advantage_of(row), row)) for row in rows(seed=1)]
        policy.accumulate([steeper], LOSS)
        policy.step(LR)
    same = [name for (name, left), (_, right) in zip(bits(loose), bits(tight), strict=True) if left == right]
    assert same == []


# --- offload and checkpoints ---


def test_muon_state_is_offloaded_and_onloaded(tmp_path: Path) -> None:
    write_model(tmp_path)
    steady, resting = engine(tmp_path), engine(tmp_path, offload="all")
    for seed in range(3):
        for policy in (steady, resting):
            policy.offload()
            train(policy, seed)
    assert bits(resting) == bits(steady)


def test_muon_checkpoint_with_adamw_critic_resumes_exactly(tmp_path: Path) -> None:
    write_model(tmp_path / "model")

    def made() -> TorchPolicy:
        spec = OptimizerSpec(name="muon", lr=LR)
        policy = TorchPolicy(PolicySettings(optimizer=spec, critic=CriticSpec(lr=5e-3)), device="cpu")
        policy.load_hf(tmp_path / "model")
        return policy

    def learn(policy: TorchPolicy, seed: int) -> None:
        policy.accumulate([taught(seed=seed)], LOSS)
        policy.step(LR)

    first, second = made(), made()
    for seed in range(2):
        learn(first, seed)
    first.snapshot()(tmp_path)
    second.load(tmp_path)
    for policy in (first, second):
        learn(policy, 2)
    assert bits(first) == bits(second)
    assert first.values([rows()]) == second.values([rows()])


@pytest.mark.parametrize(("written", "read"), [("adamw", "muon"), ("muon", "adamw")])
def test_checkpoint_of_another_optimizer_is_rejected(tmp_path: Path, written: str, read: str) -> None:
    write_model(tmp_path / "model")
    writer, reader = (engine(tmp_path / "model", name=name) for name in (written, read))
    train(writer, 0)
    writer.snapshot()(tmp_path)
    with pytest.raises(ConfigError, match=r"another optimizer: set optimizer\.name"):
        reader.load(tmp_path)


# --- in a job ---


class ImitatingRig(Rig):
    """Rows of a prompt and what follows from it, on the real engine."""

    def __init__(self, folder: Path, job: JobSpec) -> None:
        super().__init__(folder, job)
        self._base = write_model(folder / "model")
        self.engines: list[Hanging] = []
        self.hangs_in: int | None = None

    def build(self, job: JobSpec, job_id: str, created: datetime) -> JobResources:
        examples = [
            Prompt(f"p{i}", pack([1, 3 + i], I32), {}, pack([40 + i, 50 + i % 3, 60 + i], I32)) for i in range(8)
        ]
        built = super().build(job, job_id, created)
        policy = Hanging(self.hangs_in, PolicySettings(optimizer=job.optimizer))
        self.engines.append(policy)
        data = replace(built.data, train=examples, evaluation=())
        return replace(built, engine=policy, model=self._base, loss=sft_loss, data=data)


class Hanging(TorchPolicy):
    """Hangs in one of its updates until it is let go."""

    def __init__(self, hangs_in: int | None, settings: PolicySettings) -> None:
        super().__init__(settings, device="cpu")
        self._left = hangs_in
        self.hangs = False
        self.goes_on = threading.Event()

    def step(self, learning_rate: float) -> float:
        if self._left is not None:
            if not self._left:
                self.hangs = True
                self.goes_on.wait(10.0)
            self._left -= 1
        return super().step(learning_rate)


def imitation() -> JobSpec:
    return parse(
        {
            "kind": "sft",
            "model": "m",
            "data": {"train": "t.jsonl", "prompts_per_step": 4},
            "optimizer": {"name": "muon", "lr": 2e-2, "warmup_steps": 2, "decay": 1.0},
            "trainer": {"checkpoint_every": 3, "micro_batch_tokens": 16},
            "steps": 24,
        }
    )


async def run(rig: ImitatingRig) -> dict[int, float]:
    """Run the job; return its losses by step."""
    async with rig.trainer():
        await rig.command("create")
        assert (await rig.ended(within_s=60)).state == "completed"
    return {report.step: report.metrics["loss"] for report in await rig.steps()}


async def test_muon_job_learns_and_resumes_exactly(tmp_path: Path) -> None:
    steady = ImitatingRig(tmp_path / "steady", imitation())
    losses = await run(steady)
    assert losses[0] > 4.0
    assert losses[max(losses)] < 1.0
    rig = ImitatingRig(tmp_path / "killed", imitation())
    rig.hangs_in = 8
    async with rig.trainer(killed=True):
        await rig.command("create")
        await eventually(lambda: bool(rig.engines) and rig.engines[0].hangs, within_s=60)
    rig.engines[0].goes_on.set()
    rig.lease_runs_out()
    rig.hangs_in = None
    assert await run(rig) == losses
    assert rig.folder.model == steady.folder.model


# --- where it is refused ---


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"trainer": {"data_parallel": 2}}, "muon needs trainer.backend: torch in one process.*set adamw"),
        ({"trainer": {"backend": "megatron"}}, "muon needs trainer.backend: torch in one process.*set adamw"),
        ({"elastic": {"weights": "lora"}}, "muon is for whole matrices.*set adamw, or elastic.weights: full"),
    ],
)
def test_unsupported_optimizer_is_rejected(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=f"^optimizer.name: {text}"):
        parse({**small_job(steps=1), "optimizer": {"name": "muon"}, **changes})
