"""Experts divided over the data-parallel ranks of megatron-core, compared with the torch backend in one process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from rlboost.jobs.memory import ModelSize, TrainedModel, size_of, state_bytes
from rlboost.services.trainer.adapters.torch.policy import TorchPolicy
from rlboost.services.trainer.domain.loss.function import EXPERT_LOAD, ROUTED_TOKENS, ROUTING_LOSS
from rlboost.services.trainer.ports.engine import PolicyEngine, PolicySettings
from rlboost.shared.job.training import OptimizerSpec, TrainerSpec
from rlboost.shared.wire import F32, unpack
from tests.support import rank_policies
from tests.support.losses import clipped_loss
from tests.support.offloaded_ranks import resident
from tests.support.one_rank import trained_by
from tests.support.policy_comparison import assert_close, assert_trained_equally, bits, gradient_of, moment, values
from tests.support.tiny_models import split_experts
from tests.support.training_rows import rows, with_loss_mask

pytestmark = pytest.mark.timeout(600)

RATE, CLIP = 1e-3, 0.7
OPTIMIZER = OptimizerSpec(lr=RATE, weight_decay=0.1, grad_clip=CLIP)
LOSS = clipped_loss(0.2, 0.28)
BATCHES = [rows(6, seed=1), with_loss_mask(rows(3, seed=2)), rows(1, seed=3)]
"""The last has a row for one rank only; those with its experts compute a dummy."""
N_LAYERS = rank_policies.MODELS["qwen3-moe"].num_hidden_layers
LAYOUTS: dict[str, dict[str, Any]] = {
    "ep2": {"data_parallel": 2, "expert_parallel": 2},
    "ep2 x dp2": {"data_parallel": 4, "expert_parallel": 2, "distributed_optimizer": True},
    "ep2 x tp2": {"data_parallel": 2, "expert_parallel": 2, "tensor_parallel": 2, "sequence_parallel": True},
    "ep2 x pp2": {"data_parallel": 2, "expert_parallel": 2, "pipeline_parallel": 2, "distributed_optimizer": True},
}

FOUR_RANKS = {name: pytest.mark.long for name in LAYOUTS if " x " in name}
"""Four ranks compete for the processors of a small machine."""
UNDIVIDED: dict[str, dict[str, Any]] = {
    "dp2": {"data_parallel": 2, "distributed_optimizer": True},
    "fsdp2": {"backend": "torch", "data_parallel": 2},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return rank_policies.write(tmp_path_factory.mktemp("models") / "qwen3-moe", "qwen3-moe")


def torch_policy(model: Path) -> TorchPolicy:
    policy = TorchPolicy(PolicySettings(optimizer=OPTIMIZER), device="cpu")
    policy.load_hf(model)
    return policy


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, ModelSize]:
    """A model so large that its memory shows."""
    config = Qwen3MoeConfig(
        vocab_size=1024,
        hidden_size=256,
        moe_intermediate_size=512,
        num_experts=8,
        num_experts_per_tok=2,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=160,
        bos_token_id=None,
        eos_token_id=None,
    )
    folder = tmp_path_factory.mktemp("wide")
    made: Any = AutoModelForCausalLM.from_config(config)
    made.save_pretrained(folder)
    return folder, size_of(json.loads((folder / "config.json").read_text()))


def logprobs(policy: PolicyEngine) -> Any:
    return np.concatenate([unpack(column, F32) for column in policy.logprobs(BATCHES)])


@pytest.mark.parametrize("layout", [pytest.param(name, marks=FOUR_RANKS.get(name, ())) for name in LAYOUTS])
def test_two_steps_with_divided_experts_match_one_process(model: Path, layout: str, tmp_path: Path) -> None:
    one = torch_policy(model)
    with rank_policies.policy(OPTIMIZER, **LAYOUTS[layout]) as many:
        many.load_hf(model)
        assert_close(values(many), values(one), 0)
        np.testing.assert_allclose(logprobs(many), logprobs(one), rtol=0, atol=1e-5)
        for step in range(2):
            sums = one.accumulate(BATCHES, LOSS)
            gradients = {
                name: gradient_of(tensor) / sums["divisor"] for name, tensor in trained_by(one).tensors.items()
            }
            found = many.accumulate(BATCHES, LOSS)
            if "tp2" not in layout:
                # Once per layer; no token of a dummy. With tp2 also per rank, and padding.
                assert found[ROUTED_TOKENS] == N_LAYERS * sums[ROUTED_TOKENS]
            for name in (ROUTED_TOKENS, ROUTING_LOSS, EXPERT_LOAD):
                sums.pop(name)  # of each rank's part: see test_load_balancing
            assert {name: found[name] for name in sums} == pytest.approx(sums, rel=1e-4, abs=1e-3)
            norm = one.step(RATE)
            assert many.step(RATE) == pytest.approx(norm, rel=1e-5)
            if not step:
                # With betas[0] = 0.9 Adam's moment is a tenth of the clipped gradient.
                clip = min(1, CLIP / norm)
                clipped = {name: value.numpy().ravel() * clip for name, value in split_experts(gradients).items()}
                moments = moment(many, tmp_path / "one", "exp_avg")
                assert_close({name: 10 * value for name, value in moments.items()}, clipped, 1e-6)
        assert_trained_equally(values(many), values(one))
        np.testing.assert_allclose(logprobs(many), logprobs(one), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "layouts",
    [
        ["ep2", "fsdp2", "dp2", "ep2"],
        pytest.param(["ep2", "fsdp2", "ep2 x dp2", "dp2", "ep2 x tp2", "ep2"], marks=pytest.mark.long),
    ],
    ids=["two ranks", "two and four ranks"],
)
def test_checkpoint_passes_through_layouts_with_and_without_divided_experts(
    model: Path, layouts: list[str], tmp_path: Path
) -> None:
    """Each layout resumes from the checkpoint of the one before, with its moments, and takes a step."""
    one = torch_policy(model)
    before: dict[str, Any] = {}
    for number, layout in enumerate(layouts):
        with rank_policies.policy(OPTIMIZER, **{**LAYOUTS, **UNDIVIDED}[layout]) as policy:
            policy.load_hf(model)
            if number:
                policy.load(tmp_path / str(number - 1))
                assert_close(values(policy), before, 0)
            policy.accumulate(BATCHES, LOSS)
            one.accumulate(BATCHES, LOSS)
            assert policy.step(RATE) == pytest.approx(one.step(RATE), rel=1e-3)
            before = values(policy)
            (tmp_path / str(number)).mkdir()
            policy.snapshot()(tmp_path / str(number))
    assert_trained_equally(before, values(one))


@pytest.mark.parametrize("trainer", [{}, {"dtype": "bfloat16", "distributed_optimizer": True}])
@pytest.mark.long
def test_offload_frees_the_computed_state_and_changes_no_bit(
    wide: tuple[Path, ModelSize], trainer: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Host buffers are reused, so from the second time a process shrinks by what would leave its GPU."""
    # By default the C library keeps freed memory for reuse.
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "4096")
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "0")
    (source, size), settings = wide, {**LAYOUTS["ep2"], **trainer, "offload": "all"}
    spec = TrainerSpec(backend="megatron", **settings)
    computed = state_bytes(TrainedModel(size.total, n_in_experts=size.in_experts), spec)
    assert computed < 0.6 * 16 * size.total
    with rank_policies.policy(OPTIMIZER, **settings) as policy:
        policy.load_hf(source)
        for batch in BATCHES:
            policy.accumulate([batch], LOSS)
            policy.step(RATE)
        expected = bits(policy)
        policy.load_hf(source)
        for batch in BATCHES:
            policy.accumulate([batch], LOSS)
            policy.offload()
            policy.step(RATE)
            onloaded = resident(policy)
            policy.offload()
            freed = [before - after for before, after in zip(onloaded, resident(policy), strict=True)]
        assert bits(policy) == expected
    assert freed == pytest.approx([computed] * 2, rel=0.03)
