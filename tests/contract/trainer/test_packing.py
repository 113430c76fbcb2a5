"""Packed rows: attention within each row alone, and models whose rows cannot be packed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
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
    Lfm2Config,
    LlamaConfig,
    NemotronConfig,
    Qwen2MoeConfig,
    Qwen3Config,
)

from rlboost.services.trainer.adapters.torch import attention_choice
from rlboost.services.trainer.adapters.torch.attention_choice import attention_of
from rlboost.services.trainer.adapters.torch.packing import PACKED, RowLengths, attention
from rlboost.services.trainer.adapters.torch.policy import TorchPolicy
from rlboost.services.trainer.ports.policy_settings import PolicySettings
from rlboost.shared.job.algorithm import CriticSpec
from rlboost.shared.job.training import LoraSpec, OptimizerSpec
from rlboost.shared.wire.columns import floats, ints
from tests.support.losses import clipped_loss
from tests.support.policy_comparison import gradients
from tests.support.tiny_models import CONFIGS, MIXTURES, VOCABULARY, logprobs
from tests.support.training_rows import rows

LOSS = clipped_loss(0.2, 0.28)
_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 160,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
WINDOWED: dict[str, Any] = {
    "qwen3": Qwen3Config(**_SIZES, use_sliding_window=True, sliding_window=5, max_window_layers=1, head_dim=16),
    "gemma3": Gemma3TextConfig(
        **_SIZES, head_dim=16, sliding_window=5, layer_types=["sliding_attention", "full_attention"]
    ),
}
SCALED = Gemma3TextConfig(**_SIZES, head_dim=16, final_logit_softcapping=3.0, layer_types=["full_attention"] * 2)
CONVOLUTION = Lfm2Config(**_SIZES, layer_types=["conv", "full_attention"])

_MIXTURE: dict[str, Any] = {**_SIZES, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
OTHERS: dict[str, Any] = {
    "convolution": CONVOLUTION,
    "rows unknown to attention": NemotronConfig(**_SIZES),
    "sinks": GraniteSWAConfig(**_SIZES, layer_types=["full_attention"] * 2),
    "window in the mask only": Qwen2MoeConfig(
        **_MIXTURE,
        num_experts=8,
        shared_expert_intermediate_size=40,
        use_sliding_window=True,
        sliding_window=5,
        max_window_layers=1,
    ),
    "capped scores": Gemma2Config(**_SIZES, head_dim=16, attn_logit_softcapping=50.0),
}


def write(config: Any, folder: Path) -> Path:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def policy(model: Path, **settings: Any) -> TorchPolicy:
    made = TorchPolicy(PolicySettings(optimizer=OptimizerSpec(lr=1e-3), **settings), device="cpu")
    made.load_hf(model)
    return made


def check_packed_attention(window: int, device: str, dtype: torch.dtype, head: int, tolerance: float | None) -> None:
    """Compare `attention` and its gradients with attention in float32 under a mask.

    Args:
        window: tokens that a token attends to.
        device: where it is computed.
        dtype: in which it is computed.
        head: the head size.
        tolerance: absolute; None for that of float32.

    """
    torch.manual_seed(0)
    boundaries = [0, 1, 8, 14, 27]  # the second and third row are computed by one call
    exact = [torch.randn(27, n, head).to(dtype).float().requires_grad_() for n in (4, 2, 2)]
    at = torch.arange(27)
    row = torch.bucketize(at, torch.tensor(boundaries[1:]), right=True)
    mask = (row[:, None] == row) & (at[:, None] >= at) & (at[:, None] - at < (window or 27))
    q, k, v = (part.transpose(0, 1) for part in exact)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    expected = expected.transpose(0, 1)
    ours = [part.detach().to(device, dtype).requires_grad_() for part in exact]
    ends = torch.tensor(boundaries, dtype=torch.int32, device=device)
    packed = attention(ours[0], ours[1], ours[2], ends, np.diff(boundaries).tolist(), None, window)
    upstream = torch.randn_like(expected).to(dtype)
    pairs = zip(
        (packed, *torch.autograd.grad(packed, ours, upstream.to(device))),
        (expected, *torch.autograd.grad(expected, exact, upstream.float())),
        strict=True,
    )
    for found, wanted in pairs:
        torch.testing.assert_close(found.float().cpu(), wanted, atol=tolerance, rtol=tolerance and 0)


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
        assert attention_of(DogeConfig(**_SIZES)) == "sdpa"
    (entry,) = logs
    assert (entry["event"], entry["log_level"], entry["model_type"]) == ("rows_not_packed", "warning", "doge")
    assert entry["reason"]


def test_warning_has_the_error_of_a_family_that_cannot_be_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(config: Any) -> Any:
        raise ValueError("no such size")

    monkeypatch.setattr(attention_choice, "_random_model", fail)
    with capture_logs() as logs:
        assert attention_of(next(iter(CONFIGS.values()))) == "sdpa"
    assert "no such size" in logs[0]["reason"]


def test_models_whose_rotary_frequencies_depend_on_the_length_are_not_packed() -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    assert attention_of(LlamaConfig(**_SIZES, rope_parameters=rope)) == "sdpa"


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
        logprobs = ours.loaded.forward(batch)
        logprobs.square().sum().backward()
        found.append([logprobs.detach(), *(p.grad for p in ours.loaded.model.parameters() if p.grad is not None)])
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
        assert len(found[-1]) == len(ours.loaded.parameters)
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
        critic = policy(model, critic=CriticSpec(), activation_checkpointing=recomputes).loaded.critic
        assert critic is not None
        with torch.no_grad():
            weight = critic.trained["head.weight"]
            weight.copy_(torch.linspace(-1, 1, weight.numel()).expand_as(weight))
        for part in batches:
            critic.forward(part).square().sum().backward()
        found.append([tensor.grad for tensor in critic.trained.values() if tensor.grad is not None])
    for packed, single in zip(*found, strict=True):
        torch.testing.assert_close(packed, single, atol=1e-3, rtol=1e-4)
