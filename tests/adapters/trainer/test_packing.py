"""Packed rows: attention within each row alone, and models whose rows cannot be packed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs
from transformers import (
    AttentionInterface,
    AutoModelForCausalLM,
    DogeConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GraniteSWAConfig,
    LlamaConfig,
    NemotronConfig,
    Qwen2MoeConfig,
    Qwen3Config,
)

from rlboost.services.trainer.adapters.torch import layers
from rlboost.services.trainer.adapters.torch.attention import PACKED, RowLengths
from rlboost.services.trainer.adapters.torch.layers import attention_of
from rlboost.services.trainer.adapters.torch.policy import TorchPolicy
from rlboost.services.trainer.ports.engine import PolicySettings
from rlboost.shared.job.algorithm import CriticSpec
from rlboost.shared.job.training import LoraSpec, OptimizerSpec
from rlboost.shared.wire import floats, ints
from tests.support.losses import clipped_loss
from tests.support.one_rank import critic_of, trained_by
from tests.support.packed_models import CONVOLUTION, SIZES, check_packed_attention, write
from tests.support.policy_comparison import gradients
from tests.support.tiny_models import CONFIGS, MIXTURES, VOCABULARY, logprobs
from tests.support.training_rows import rows

LOSS = clipped_loss(0.2, 0.28)
WINDOWED: dict[str, Any] = {
    "qwen3": Qwen3Config(**SIZES, use_sliding_window=True, sliding_window=5, max_window_layers=1, head_dim=16),
    "gemma3": Gemma3TextConfig(
        **SIZES, head_dim=16, sliding_window=5, layer_types=["sliding_attention", "full_attention"]
    ),
}
SCALED = Gemma3TextConfig(**SIZES, head_dim=16, final_logit_softcapping=3.0, layer_types=["full_attention"] * 2)

_MIXTURE: dict[str, Any] = {**SIZES, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
OTHERS: dict[str, Any] = {
    "convolution": CONVOLUTION,
    "rows unknown to attention": NemotronConfig(**SIZES),
    "sinks": GraniteSWAConfig(**SIZES, layer_types=["full_attention"] * 2),
    "window in the mask only": Qwen2MoeConfig(
        **_MIXTURE,
        num_experts=8,
        shared_expert_intermediate_size=40,
        use_sliding_window=True,
        sliding_window=5,
        max_window_layers=1,
    ),
    "capped scores": Gemma2Config(**SIZES, head_dim=16, attn_logit_softcapping=50.0),
}


def policy(model: Path, **settings: Any) -> TorchPolicy:
    made = TorchPolicy(PolicySettings(optimizer=OptimizerSpec(lr=1e-3), **settings), device="cpu")
    made.load_hf(model)
    return made


@pytest.mark.parametrize("window", [0, 1, 4, 100])
def test_attention_of_packed_rows_equals_a_mask(window: int) -> None:
    check_packed_attention(window, "cpu", torch.float32, 8, None)


@pytest.mark.parametrize("family", sorted(WINDOWED))
def test_sliding_window_is_kept_within_packed_rows(tmp_path: Path, family: str) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(write(WINDOWED[family], tmp_path), attn_implementation="eager")
    batch = rows(6)
    assert max(row.n_tokens for row in batch) > 2 * 5
    for row, column in zip(batch, policy(tmp_path).logprobs([batch]), strict=True):
        expected = logprobs(model.eval(), ints(row.prompt), ints(row.completion))
        assert floats(column) == pytest.approx(expected, abs=2e-5)


def test_models_of_causal_attention_are_packed() -> None:
    assert {attention_of(config) for config in (*CONFIGS.values(), *MIXTURES.values(), *WINDOWED.values())} == {PACKED}


def test_models_with_a_learned_mask_are_not_packed() -> None:
    with capture_logs() as logs:
        assert attention_of(DogeConfig(**SIZES)) == "sdpa"
    (entry,) = logs
    assert (entry["event"], entry["log_level"], entry["model_type"]) == ("rows_not_packed", "warning", "doge")
    assert entry["reason"]


def test_warning_has_the_error_of_a_family_that_cannot_be_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(config: Any) -> Any:
        raise ValueError("no such size")

    monkeypatch.setattr(layers, "_random_model", fail)
    with capture_logs() as logs:
        assert attention_of(next(iter(CONFIGS.values()))) == "sdpa"
    assert "no such size" in logs[0]["reason"]


def test_models_whose_rotary_frequencies_depend_on_the_length_are_not_packed() -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    assert attention_of(LlamaConfig(**SIZES, rope_parameters=rope)) == "sdpa"


@pytest.mark.parametrize("family", sorted(OTHERS))
def test_rows_of_other_models_are_computed_one_by_one(tmp_path: Path, family: str) -> None:
    """Packed attention would fail, or compute without what the layers pass to it."""
    assert attention_of(OTHERS[family]) in {"sdpa", "eager"}
    model: Any = AutoModelForCausalLM.from_pretrained(write(OTHERS[family], tmp_path), attn_implementation="eager")
    batch = rows(4)
    ours = policy(tmp_path)
    for row, column in zip(batch, ours.logprobs([batch]), strict=True):
        assert floats(column) == pytest.approx(logprobs(model.eval(), ints(row.prompt), ints(row.completion)), abs=2e-5)
    ours.accumulate([batch], LOSS)
    assert ours.step(1e-3) > 0


@pytest.mark.parametrize("family", [*sorted(CONFIGS), "scaled"])
@pytest.mark.parametrize("recomputes", [False, True])
def test_logits_in_chunks_change_no_gradient(tmp_path: Path, family: str, recomputes: bool) -> None:
    """Including a family that scales and caps its logits after the head."""
    model = write(SCALED if family == "scaled" else CONFIGS[family], tmp_path)
    batch = rows(5)
    found = []
    for max_logits in (1, 7 * VOCABULARY, 1 << 20):
        recomputing = recomputes and family != "gpt2"
        ours = policy(model, temperature=0.7, max_logits=max_logits, activation_checkpointing=recomputing)
        logprobs = trained_by(ours).forward(batch)
        logprobs.square().sum().backward()
        found.append([logprobs.detach(), *(p.grad for p in ours.rank.module.parameters() if p.grad is not None)])
    for chunked in found[:2]:
        for ours_, whole in zip(chunked, found[2], strict=True):
            torch.testing.assert_close(ours_, whole, atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("recomputes", [False, True])
def test_logits_in_chunks_change_no_gradient_of_an_adapter(tmp_path: Path, recomputes: bool) -> None:
    """The adapter includes the output head."""
    model = write(CONFIGS["llama-untied"], tmp_path)
    lora = LoraSpec(targets=["q_proj", "lm_head"])
    found = []
    for max_logits in (7 * VOCABULARY, 1 << 20):
        ours = policy(model, lora=lora, max_logits=max_logits, activation_checkpointing=recomputes)
        ours.accumulate([rows(5)], LOSS)
        found.append(list(gradients(ours).values()))
        assert len(found[-1]) == len(trained_by(ours).parameters)
    for chunked, whole in zip(*found, strict=True):
        torch.testing.assert_close(chunked, whole, atol=1e-4, rtol=1e-4)


class _Recorder:
    """Stands for a group of one rank; records the dtype of what it would exchange."""

    def __init__(self) -> None:
        self.dtypes: set[torch.dtype] = set()

    def tokens_of_heads(self, shard: torch.Tensor) -> torch.Tensor:
        self.dtypes.add(shard.dtype)
        return shard

    heads_of_tokens = tokens_of_heads


def test_ranks_exchange_half_precision_under_autocast() -> None:
    group, one = _Recorder(), torch.randn(1, 2, 6, 8)
    with torch.autocast("cpu", torch.bfloat16):
        AttentionInterface()[PACKED](
            None, one, one, one, None, cu_seq_lens_q=torch.tensor([0, 6]), row_lengths=RowLengths([6]), context=group
        )
    assert group.dtypes == {torch.bfloat16}


@pytest.mark.parametrize("recomputes", [False, True])
def test_critic_of_packed_rows_trains_as_row_by_row(tmp_path: Path, recomputes: bool) -> None:
    model = write(CONFIGS["qwen3-moe"], tmp_path)
    batch = rows(5)
    found = []
    for batches in ([batch], [[row] for row in batch]):
        critic = critic_of(policy(model, critic=CriticSpec(), activation_checkpointing=recomputes))
        with torch.no_grad():
            weight = critic.tensors["head.weight"]
            weight.copy_(torch.linspace(-1, 1, weight.numel()).expand_as(weight))
        for part in batches:
            critic.forward(part).square().sum().backward()
        found.append([tensor.grad for tensor in critic.tensors.values() if tensor.grad is not None])
    for packed, single in zip(*found, strict=True):
        torch.testing.assert_close(packed, single, atol=1e-3, rtol=1e-4)
