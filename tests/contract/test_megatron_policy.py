"""What megatron-core and FSDP2 compute in several processes, against the torch backend in one."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from services.trainer.adapters.ranks.boxes import BoxReader
from services.trainer.adapters.ranks.piece import Piece
from services.trainer.adapters.ranks.policy import RanksPolicy
from services.trainer.adapters.torch.policy import TorchPolicy
from services.trainer.domain.loss.policy import clipped_loss, decoupled_loss
from services.trainer.domain.tokens import TokenBatch
from services.trainer.ports import NotFinite, PolicyEngine, Row
from shared.columns import F32, I32, pack, unpack
from shared.errors import ConfigError, Retryable
from shared.training import OptimizerSpec
from tests.contract.test_trainer_engine_contract import rows, told
from tests.support import megatron_policies
from tests.support.eventually import eventually
from tests.support.model_folder import write_model
from tests.support.ranks import MODULE, ranks_of

pytestmark = pytest.mark.timeout(180)

RATE, TEMPERATURE = 1e-3, 0.8
OPTIMIZER = OptimizerSpec(lr=RATE, weight_decay=0.1, betas=(0.9, 0.95), grad_clip=0.7)
LOSS = clipped_loss(0.2, 0.28)
BATCHES = [rows(6, seed=1), told(rows(3, seed=2))]
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2": {"tensor_parallel": 2, "sequence_parallel": True, "reference": True},
    "pp2": {"pipeline_parallel": 2},
    "dp2": {"data_parallel": 2, "distributed_optimizer": True},
    "tp2 x pp2": {"tensor_parallel": 2, "pipeline_parallel": 2},
    "fsdp3": {"backend": "torch", "data_parallel": 3, "reference": True},
}
Policies = Callable[[str], RanksPolicy]


@pytest.fixture(scope="module")
def policies() -> Iterator[Policies]:
    """One policy a layout, whose processes start when it is first asked for: they take seconds to import."""
    started: dict[str, RanksPolicy] = {}
    with ExitStack() as stack:

        def get(layout: str) -> RanksPolicy:
            if layout not in started:
                made = megatron_policies.policy(OPTIMIZER, temperature=TEMPERATURE, **LAYOUTS[layout])
                started[layout] = stack.enter_context(made)
            return started[layout]

        yield get


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    folder = tmp_path_factory.mktemp("models")
    return lambda name: megatron_policies.write(folder / name, name)


def in_torch(model: Path) -> TorchPolicy:
    policy = TorchPolicy(OPTIMIZER, temperature=TEMPERATURE, dtype="float32", device="cpu")
    policy.load_hf(model)
    return policy


def values(policy: PolicyEngine) -> dict[str, Any]:
    return {shard.name: np.frombuffer(bytes(shard.data), F32) for shard in policy.export_shards()}


def logprobs(policy: PolicyEngine) -> Any:
    return np.concatenate([unpack(column, F32) for column in policy.logprobs(BATCHES)])


def moment(policy: RanksPolicy, folder: Path, kind: str) -> dict[str, Any]:
    """Return what the optimizer remembers, read from a checkpoint."""
    folder.mkdir()
    policy.snapshot()(folder)
    with BoxReader(sorted(folder.glob(f"{kind}-*"))) as reader:
        return {
            name: reader.read(Piece(name, shape, (0,) * len(shape), shape)).numpy().ravel()
            for name, shape in reader.shapes.items()
        }


def assert_close(found: dict[str, Any], expected: dict[str, Any], atol: float) -> None:
    assert set(found) == set(expected)
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=0, atol=atol, err_msg=name)


def assert_trained_alike(found: dict[str, Any], expected: dict[str, Any]) -> None:
    # Adam divides by the gradient's own size: where that is next to nothing, its rounding is a part of a whole step.
    assert_close(found, expected, RATE / 10)
    assert np.mean(np.concatenate([np.abs(found[name] - expected[name]) for name in expected])) < RATE / 10_000


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("model", megatron_policies.MODELS)
def test_three_steps_are_those_of_the_torch_backend(
    policies: Policies, models: Callable[[str], Path], model: str, layout: str, tmp_path: Path
) -> None:
    one, many = in_torch(models(model)), policies(layout)
    many.load_hf(models(model))
    assert_close(values(many), values(one), 0)
    np.testing.assert_allclose(logprobs(many), logprobs(one), rtol=0, atol=1e-5)
    for step in range(3):
        sums = one.accumulate(BATCHES, LOSS)
        sums.pop("padded_tokens")  # told of one process only
        gradients = {name: tensor.grad.numpy() / sums["divisor"] for name, tensor in one._trained.items()}
        found = many.accumulate(BATCHES, LOSS)
        assert {name: found[name] for name in sums} == pytest.approx(sums, rel=1e-4, abs=1e-3)
        norm = one.step(RATE)
        assert many.step(RATE) == pytest.approx(norm, rel=1e-5)
        if not step:
            # After the first step Adam's moment is a tenth of the clipped gradient.
            clipped = {name: value.ravel() * min(1, 0.7 / norm) for name, value in gradients.items()}
            moments = moment(many, tmp_path / "one", "exp_avg")
            assert_close({name: 10 * value for name, value in moments.items()}, clipped, 1e-6)
    assert_trained_alike(values(many), values(one))
    np.testing.assert_allclose(logprobs(many), logprobs(one), rtol=0, atol=1e-5)


def test_a_checkpoint_of_one_layout_goes_on_in_another(
    policies: Policies, models: Callable[[str], Path], tmp_path: Path
) -> None:
    after: list[dict[str, Any]] = []
    layouts = [*LAYOUTS]
    for writer, reader in zip(layouts, [*layouts[1:], layouts[0]], strict=True):
        first, second = policies(writer), policies(reader)
        first.load_hf(models("qwen3"))
        first.accumulate(BATCHES, LOSS)
        first.step(RATE)
        (tmp_path / writer).mkdir()
        first.snapshot()(tmp_path / writer)
        second.load_hf(models("qwen3"))
        second.load(tmp_path / writer)
        assert_close(values(second), values(first), 0)
        for policy in (first, second):
            policy.accumulate(BATCHES[:1], LOSS)
            policy.step(RATE)
            after.append(values(policy))
    for found in after:
        assert_trained_alike(found, after[0])


@pytest.mark.parametrize("layout", ["tp2", "fsdp3"])
def test_losses_get_every_column(policies: Policies, models: Callable[[str], Path], layout: str) -> None:
    policy, one = policies(layout), in_torch(models("qwen3"))
    policy.load_hf(models("qwen3"))
    before = iter(policy.logprobs(BATCHES))
    policy.accumulate(BATCHES, LOSS)
    policy.step(RATE)
    aged = [[replace(row, proximal=next(before)) for row in batch] for batch in BATCHES]
    expected = {row.completion: row for batch in aged for row in batch}
    seen = 0

    def loss(batch: TokenBatch) -> tuple[torch.Tensor, dict[str, float]]:
        nonlocal seen
        assert batch.proximal is not None
        assert batch.reference is not None
        torch.testing.assert_close(batch.reference, batch.proximal, rtol=0, atol=0)
        assert not torch.allclose(batch.logprobs, batch.reference, atol=1e-4)
        seen += len(batch.lengths)
        return decoupled_loss(0.2, 0.28, 1.5)(batch)

    starting = [row.proximal for batch in aged for row in batch]
    assert policy.reference_logprobs(BATCHES) == starting
    policy.accumulate(aged, loss)
    assert seen == len(expected)
    one.accumulate(BATCHES, LOSS)
    one.step(RATE)
    one.accumulate(aged, decoupled_loss(0.2, 0.28, 1.5))
    assert policy.step(RATE) == pytest.approx(one.step(RATE), rel=1e-4)

    def noted(batch: TokenBatch) -> tuple[torch.Tensor, dict[str, float]]:
        assert batch.reference is not None
        assert (batch.reference == -1.5).all()
        return LOSS(batch)

    known = [replace(row, reference=pack([-1.5] * row.n_trained, F32)) for row in BATCHES[0]]
    policy.accumulate([known], noted)


@pytest.mark.parametrize("layout", ["dp2", "fsdp3"])
def test_a_loss_that_is_no_number_leaves_the_weights_and_the_ranks_alone(
    policies: Policies, models: Callable[[str], Path], layout: str
) -> None:
    policy = policies(layout)
    policy.load_hf(models("qwen2"))
    before = values(policy)
    bad = Row(pack([3], I32), pack([4], I32), pack([float("nan")], F32), 1.0)
    with pytest.raises(NotFinite):
        policy.accumulate([[bad]], LOSS)
    assert policy.step(RATE) == 0.0
    assert_close(values(policy), before, 0)

    def too_steep(batch: TokenBatch) -> tuple[torch.Tensor, dict[str, float]]:
        return (batch.logprobs * 1e30).sum(), {"divisor": 1.0}

    policy.accumulate(BATCHES, too_steep)
    with pytest.raises(NotFinite):
        policy.step(RATE)
    assert_close(values(policy), before, 0)
    policy.accumulate(BATCHES, LOSS)
    assert policy.step(RATE) > 0


def test_what_must_be_rewritten_without_cuda_was(policies: Policies, models: Callable[[str], Path]) -> None:
    policy = policies("pp2")
    policy.load_hf(models("qwen2"))
    wanted = {
        "distributed.param_and_grad_buffer",
        "models.common.embeddings.rotary_pos_embedding",
        "optimizer.clip_grads",
        "optimizer.distrib_optimizer",
        "optimizer.optimizer",
        "pipeline_parallel.p2p_communication",
        "pipeline_parallel.schedules",
        "tensor_parallel.layers",
        "tensor_parallel.mappings",
        "tensor_parallel.random",
        "transformer.transformer_layer",
    }
    assert {f"megatron.core.{name}" for name in wanted} <= set(policy.rewritten)


def test_models_that_cannot_be_cut_so_are_refused_by_name(policies: Policies, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="gpt2"):
        policies("tp2").load_hf(write_model(tmp_path / "gpt2", "gpt2"))
    with pytest.raises(ConfigError, match="key and value heads"):
        policies("tp2").load_hf(write_model(tmp_path / "llama", "llama-untied"))
    with pytest.raises(ConfigError, match=r"pipeline_parallel is 2, but the model's 3 layers"):
        policies("pp2").load_hf(write_model(tmp_path / "qwen3", "qwen3-tied"))
    with pytest.raises(ConfigError, match=str(tmp_path)):
        policies("tp2").load_hf(tmp_path)
    model = megatron_policies.write(tmp_path / "model", "qwen2")
    (model / "model.safetensors").write_bytes(b"not tensors")
    with pytest.raises(ConfigError, match=str(model)):
        policies("tp2").load_hf(model)


def test_a_rank_ends_when_the_trainer_is_gone() -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        descriptor = theirs.fileno()
        process = subprocess.Popen([sys.executable, "-m", MODULE, str(descriptor), "megatron"], pass_fds=[descriptor])
    ours.close()
    assert process.wait(60) == 1


async def test_a_rank_that_is_killed_ends_all_and_is_named(policies: Policies, models: Callable[[str], Path]) -> None:
    policy = policies("tp2 x pp2")
    policy.load_hf(models("qwen3"))
    pids = policy._ranks.pids
    os.kill(pids[3], signal.SIGKILL)
    with pytest.raises(Retryable, match=r"rank 3 of the trainer ended with code -9 during"):
        policy.accumulate(BATCHES, LOSS)
    await eventually(lambda: not set(pids) & set(ranks_of(os.getpid())))
    with pytest.raises(Retryable, match="have ended"):
        policy.logprobs(BATCHES)
