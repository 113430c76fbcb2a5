"""megatron-core and FSDP2 in several processes, compared with the torch backend in one."""

from __future__ import annotations

import itertools
import json
import os
import shutil
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

from rlboost.services.trainer.adapters.megatron.policy import MegatronPolicy
from rlboost.services.trainer.adapters.torch.policy import RanksPolicy, TorchPolicy
from rlboost.services.trainer.adapters.torch.ranks import Layout
from rlboost.services.trainer.domain.loss.function import EXPERT_LOAD, ROUTED_TOKENS, ROUTING_LOSS, TokenBatch
from rlboost.services.trainer.domain.loss.policy import PAIR_LOSS
from rlboost.services.trainer.domain.loss.preference import weighted
from rlboost.services.trainer.ports.engine import NotFinite, PolicyEngine, PolicySettings
from rlboost.shared.errors import ConfigError, Retryable
from rlboost.shared.job.algorithm import PreferenceSpec
from rlboost.shared.job.training import OptimizerSpec, TrainerSpec
from rlboost.shared.wire import F32, pack, unpack
from tests.support import rank_policies
from tests.support.eventually import eventually
from tests.support.losses import clipped_loss, decoupled_loss
from tests.support.megatron_cpu import python_path
from tests.support.model_folder import write_model, write_unmarked_model
from tests.support.one_rank import trained_by
from tests.support.policy_comparison import assert_close, assert_trained_equally, gradient_of, moment, values
from tests.support.ranks import MODULE
from tests.support.tiny_models import split_experts
from tests.support.training_rows import rows, training_row, with_loss_mask

pytestmark = pytest.mark.timeout(600)

ROOT = Path(__file__).parents[3]
RATE, TEMPERATURE = 1e-3, 0.8
OPTIMIZER = OptimizerSpec(lr=RATE, weight_decay=0.1, betas=(0.9, 0.95), grad_clip=0.7)
LOSS = clipped_loss(0.2, 0.28)
BATCHES = [rows(6, seed=1), with_loss_mask(rows(3, seed=2))]
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2": {"tensor_parallel": 2, "sequence_parallel": True, "reference": True},
    "pp2": {"pipeline_parallel": 2},
    "dp2": {"data_parallel": 2, "distributed_optimizer": True},
    "cp2": {"context_parallel": 2, "distributed_optimizer": True, "reference": True},
    "tp2 x pp2": {"tensor_parallel": 2, "pipeline_parallel": 2},
    "fsdp3": {"backend": "torch", "data_parallel": 3, "reference": True},
}
Policies = Callable[[str], RanksPolicy]


@pytest.fixture(scope="module")
def policies() -> Iterator[Policies]:
    """One policy per layout, started when a test first requests it: its processes take seconds to import."""
    started: dict[str, RanksPolicy] = {}
    with ExitStack() as stack:

        def get(layout: str) -> RanksPolicy:
            if layout not in started:
                made = rank_policies.policy(OPTIMIZER, temperature=TEMPERATURE, **LAYOUTS[layout])
                started[layout] = stack.enter_context(made)
            return started[layout]

        yield get


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    folder = tmp_path_factory.mktemp("models")
    return lambda name: rank_policies.write(folder / name, name)


def torch_policy(model: Path) -> TorchPolicy:
    policy = TorchPolicy(PolicySettings(optimizer=OPTIMIZER, temperature=TEMPERATURE), device="cpu")
    policy.load_hf(model)
    return policy


def logprobs(policy: PolicyEngine) -> Any:
    return np.concatenate([unpack(column, F32) for column in policy.logprobs(BATCHES)])


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        # All models in one layout, and one model in all.
        pytest.param(model, layout, marks=() if model == "qwen3" or layout == "tp2" else pytest.mark.long)
        for model, layout in itertools.product(rank_policies.MODELS, LAYOUTS)
        if (model, layout) != ("qwen3-moe", "tp2 x pp2")
    ],
)
def test_ranks_three_steps_match_torch_backend(
    policies: Policies, models: Callable[[str], Path], model: str, layout: str, tmp_path: Path
) -> None:
    one, many = torch_policy(models(model)), policies(layout)
    many.load_hf(models(model))
    assert_close(values(many), values(one), 0)
    np.testing.assert_allclose(logprobs(many), logprobs(one), rtol=0, atol=1e-5)
    for step in range(3):
        sums = one.accumulate(BATCHES, LOSS)
        for name in (ROUTED_TOKENS, ROUTING_LOSS, EXPERT_LOAD):
            sums.pop(name, None)  # for each rank's part: see test_load_balancing
        gradients = {name: gradient_of(tensor) / sums["divisor"] for name, tensor in trained_by(one).tensors.items()}
        found = many.accumulate(BATCHES, LOSS)
        assert {name: found[name] for name in sums} == pytest.approx(sums, rel=1e-4, abs=1e-3)
        norm = one.step(RATE)
        assert many.step(RATE) == pytest.approx(norm, rel=1e-5)
        if not step:
            # After the first step Adam's moment is a tenth of the clipped gradient.
            clip = min(1, 0.7 / norm)
            clipped = {name: value.numpy().ravel() * clip for name, value in split_experts(gradients).items()}
            moments = moment(many, tmp_path / "one", "exp_avg")
            assert_close({name: 10 * value for name, value in moments.items()}, clipped, 1e-6)
    assert_trained_equally(values(many), values(one))
    np.testing.assert_allclose(logprobs(many), logprobs(one), rtol=0, atol=1e-5)


@pytest.mark.parametrize("layout", ["tp2", pytest.param("fsdp3", marks=pytest.mark.long)])
def test_updates_of_pairs_match_torch_backend(policies: Policies, models: Callable[[str], Path], layout: str) -> None:
    settings = PolicySettings(optimizer=OPTIMIZER, temperature=TEMPERATURE, reference=True)
    one, many = TorchPolicy(settings, device="cpu"), policies(layout)
    found: list[list[float]] = []
    for policy in (one, many):
        policy.load_hf(models("qwen3"))
        found.append([])
        for _ in range(2):
            trained, reference = policy.logprobs(BATCHES[:1]), policy.reference_logprobs(BATCHES[:1])
            pairs, sums = weighted(BATCHES[0], trained, reference, PreferenceSpec())
            policy.accumulate([pairs[:4], pairs[4:]], PAIR_LOSS)
            found[-1] += [sums["loss"], policy.step(RATE)]
    assert found[1] == pytest.approx(found[0], rel=1e-4)
    assert found[0][2] < found[0][0], "the second update starts from a lower loss"


@pytest.mark.parametrize(("rope", "layout"), [("linear", "dp2"), ("llama3", "tp2"), ("yarn", "pp2")])
def test_scaled_rotary_positions_match_torch_backend(
    policies: Policies, models: Callable[[str], Path], rope: str, layout: str, tmp_path: Path
) -> None:
    one, many = torch_policy(models(rope)), policies(layout)
    many.load_hf(models(rope))
    expected = logprobs(one)
    np.testing.assert_allclose(logprobs(many), expected, rtol=0, atol=1e-5)
    one.accumulate(BATCHES, LOSS)
    many.accumulate(BATCHES, LOSS)
    assert many.step(RATE) == pytest.approx(one.step(RATE), rel=1e-5)
    unscaled = shutil.copytree(models(rope), tmp_path / "unscaled")
    config = json.loads((unscaled / "config.json").read_text())
    (unscaled / "config.json").write_text(json.dumps(config | {"rope_parameters": {"rope_theta": 1e4}}))
    assert np.abs(logprobs(torch_policy(unscaled)) - expected).max() > 0.01


@pytest.mark.long
def test_checkpoint_of_one_layout_resumes_in_another(
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
        assert_trained_equally(found, after[0])


@pytest.mark.parametrize("layout", ["tp2", pytest.param("fsdp3", marks=pytest.mark.long)])
def test_ranks_pass_every_column_to_the_loss(policies: Policies, models: Callable[[str], Path], layout: str) -> None:
    policy, one = policies(layout), torch_policy(models("qwen3"))
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

    def checked_loss(batch: TokenBatch) -> tuple[torch.Tensor, dict[str, float]]:
        assert batch.reference is not None
        assert (batch.reference == -1.5).all()
        return LOSS(batch)

    known = [replace(row, reference=pack([-1.5] * row.n_loss_tokens, F32)) for row in BATCHES[0]]
    policy.accumulate([known], checked_loss)


@pytest.mark.parametrize("layout", ["dp2", pytest.param("fsdp3", marks=pytest.mark.long)])
def test_loss_not_finite_changes_neither_weights_nor_ranks(
    policies: Policies, models: Callable[[str], Path], layout: str
) -> None:
    policy = policies(layout)
    policy.load_hf(models("qwen2"))
    before = values(policy)
    bad = training_row([3], [4], [float("nan")])
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


@pytest.mark.long
@pytest.mark.timeout(600)
def test_megatron_on_cpu_rewrites_every_module_that_names_cuda() -> None:
    """`tests.support.megatron_cpu` depends on expressions in the sources of the pinned release."""
    code = (
        "import json, sitecustomize, rlboost.services.trainer.adapters.megatron.rank_engine; "
        "print(json.dumps(sitecustomize.rewritten))"
    )
    env = {**os.environ, "PYTHONPATH": python_path(), "CUDA_VISIBLE_DEVICES": ""}
    output = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], env=env, check=True, capture_output=True, timeout=540
    ).stdout
    expected = {
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
        "transformer.moe.moe_utils",
        "transformer.transformer_layer",
    }
    assert {f"megatron.core.{name}" for name in expected} <= set(json.loads(output.splitlines()[-1]))


@pytest.mark.long
def test_megatron_without_gpu_is_rejected_with_the_alternative(
    models: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = MegatronPolicy(PolicySettings(), Layout.of(TrainerSpec()), device="cpu")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    try:
        with pytest.raises(ConfigError, match=r"needs CUDA.*trainer\.backend: torch"):
            policy.load_hf(models("qwen2"))
    finally:
        policy.close()


def test_ranks_reject_unsupported_models_by_name(policies: Policies, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="gpt2"):
        policies("tp2").load_hf(write_model(tmp_path / "gpt2", "gpt2"))
    with pytest.raises(ConfigError, match="key and value heads"):
        policies("tp2").load_hf(write_model(tmp_path / "llama", "llama-untied"))
    with pytest.raises(ConfigError, match=r"pipeline_parallel is 2.*3 layers"):
        policies("pp2").load_hf(write_model(tmp_path / "qwen3", "qwen3-tied"))
    with pytest.raises(ConfigError, match=r"sequence_parallel is false: a mixture of experts"):
        policies("tp2 x pp2").load_hf(rank_policies.write(tmp_path / "qwen3-moe", "qwen3-moe"))
    with pytest.raises(ConfigError, match=r"trainer\.data_parallel, .*not supported for CTRL"):
        policies("fsdp3").load_hf(write_unmarked_model(tmp_path / "unmarked"))
    with pytest.raises(ConfigError, match=str(tmp_path)):
        policies("tp2").load_hf(tmp_path)
    model = rank_policies.write(tmp_path / "model", "qwen2")
    (model / "model.safetensors").write_bytes(b"not tensors")
    with pytest.raises(ConfigError, match=str(model)):
        policies("tp2").load_hf(model)


def test_fsdp_trains_a_model_whose_layers_have_another_name(policies: Policies, tmp_path: Path) -> None:
    model = write_model(tmp_path, "gpt2")
    one, many = torch_policy(model), policies("fsdp3")
    many.load_hf(model)
    for policy in (one, many):
        policy.accumulate(BATCHES, LOSS)
    assert many.step(RATE) == pytest.approx(one.step(RATE), rel=1e-5)
    np.testing.assert_allclose(logprobs(many), logprobs(one), rtol=0, atol=1e-5)


def test_rank_exits_when_the_trainer_has_ended() -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        descriptor = theirs.fileno()
        process = subprocess.Popen([sys.executable, "-m", MODULE, "megatron", str(descriptor)], pass_fds=[descriptor])
    ours.close()
    assert process.wait(60) == 1


async def test_killed_rank_ends_all_ranks_and_is_named(policies: Policies, models: Callable[[str], Path]) -> None:
    policy = policies("tp2 x pp2")
    policy.load_hf(models("qwen3"))
    pids = rank_policies.pids_of(policy)
    os.kill(pids[3], signal.SIGKILL)
    with pytest.raises(Retryable, match=r"rank 3 of the trainer ended with code -9 during"):
        policy.accumulate(BATCHES, LOSS)
    await eventually(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))
    with pytest.raises(Retryable, match="have ended"):
        policy.logprobs(BATCHES)
