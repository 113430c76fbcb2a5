"""Kinds of models that vLLM serves on a CPU, before and after an update, against transformers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from safetensors.torch import load_file  # noqa: E402 - only where torch is
from transformers import DeepseekV3Config, Qwen3MoeConfig  # noqa: E402

from rlboost.services.rollout_worker.domain.parity_check import judge  # noqa: E402 - only where torch is
from rlboost.services.trainer.domain.canary_prompts import build_canary_prompts, build_reference  # noqa: E402
from rlboost.shared.errors import UnsuitableWeights  # noqa: E402
from rlboost.shared.weights.manifest import ParityReference  # noqa: E402
from rlboost.shared.wire import F32, pack  # noqa: E402
from tests.support import families, tiny_models, vllm_engines  # noqa: E402
from tests.support.engines import request, run  # noqa: E402
from tests.support.staged_weights import Staged  # noqa: E402

pytestmark = vllm_engines.MARKS

_LIMITS: dict[str, Any] = {
    "vocab_size": tiny_models.VOCABULARY,
    "max_position_embeddings": tiny_models.MAX_LEN,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
MIXTURE = Qwen3MoeConfig(
    **_LIMITS,
    hidden_size=64,
    intermediate_size=64,
    num_hidden_layers=2,
    moe_intermediate_size=64,
    num_attention_heads=2,
    num_key_value_heads=2,
    head_dim=32,
    num_experts=4,
    num_experts_per_tok=2,
)
LATENT = DeepseekV3Config(
    **_LIMITS,
    hidden_size=64,
    intermediate_size=64,
    num_hidden_layers=2,
    first_k_dense_replace=1,
    moe_intermediate_size=64,
    n_routed_experts=4,
    num_experts_per_tok=2,
    n_shared_experts=1,
    n_group=1,
    topk_group=1,
    # Published models have both; without them vLLM's router follows another rule.
    topk_method="noaux_tc",
    scoring_func="sigmoid",
    num_attention_heads=4,
    num_key_value_heads=4,
    # vLLM supports one size of the cached vector: kv_lora_rank + qk_rope_head_dim = 576.
    kv_lora_rank=512,
    q_lora_rank=32,
    qk_nope_head_dim=64,
    qk_rope_head_dim=64,
    v_head_dim=64,
)


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    vllm_engines.require()
    yield
    vllm_engines.end_shared()


def checkpoint(model: Any) -> list[tuple[str, Any]]:
    """Return the tensors under the names of a checkpoint, which has each expert by itself."""
    with TemporaryDirectory() as directory:
        model.save_pretrained(directory)
        return list(load_file(Path(directory, "model.safetensors")).items())


@pytest.mark.parametrize(
    "config", [pytest.param(MIXTURE, marks=pytest.mark.long), LATENT], ids=["mixture", "latent-attention"]
)
async def test_model_takes_new_weights(config: Any) -> None:
    old, new = (tiny_models.make(config, seed) for seed in (1, 2))
    engine = vllm_engines.build(config, slots=4)
    for version, model in enumerate((old, new)):
        await engine.load_weights(version, Staged(checkpoint(model)))
        for made in await run(engine, [request(10 * version + n, max_tokens=20) for n in range(4)]):
            expected = tiny_models.logprobs(model, [3, 1, 4], made.tokens)
            assert made.logprobs == pytest.approx(expected, abs=5e-5)
    await engine.close()


@pytest.mark.parametrize(
    ("family", "dtype", "tolerance"),
    [
        ("gemma3", "float32", 5e-5),
        pytest.param("mixtral", "float32", 5e-5, marks=pytest.mark.long),
        # vLLM's gated delta rule for CPUs computes in bfloat16 only.
        pytest.param("qwen3_5", "bfloat16", 0.1, marks=pytest.mark.long),
        pytest.param("qwen3_5_moe", "bfloat16", 0.1, marks=pytest.mark.long),
    ],
)
async def test_family_takes_what_is_published(tmp_path: Path, family: str, dtype: str, tolerance: float) -> None:
    """By the names of its files; of a model with towers vLLM runs the language model only."""
    models = [families.make(family, seed).to(getattr(torch, dtype)) for seed in (1, 2)]
    models[0].save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    engine = vllm_engines.build(config, slots=4, dtype=dtype)
    for version, model in enumerate(models):
        await engine.load_weights(version, Staged(checkpoint(model)))
        for made in await run(engine, [request(10 * version + n, max_tokens=20) for n in range(4)]):
            differences = np.subtract(made.logprobs, tiny_models.logprobs(model, [3, 1, 4], made.tokens))
            assert np.abs(differences).mean() < tolerance
    assert "images" not in engine.sampling_options
    await engine.close()


def reference(model: Any) -> ParityReference:
    probe = build_canary_prompts(tiny_models.VOCABULARY, temperature=1.0, dtype="bfloat16")
    return build_reference(probe, [pack(tiny_models.logprobs(model, *row), F32) for row in probe.rows])


async def test_engine_quantizes_the_weights_of_each_version() -> None:
    config = vllm_engines.config(tied=False)
    models = [tiny_models.make(config, seed) for seed in (1, 2)]
    weights = [[(name, tensor.bfloat16()) for name, tensor in tiny_models.weights(model)] for model in models]
    engine = vllm_engines.build(config, slots=4, dtype="bfloat16", vllm_args={"quantization": "fp8_per_channel"})
    scores = []
    for version, which in enumerate((0, 1, 0)):
        await engine.load_weights(version, Staged(weights[which]))
        await engine.suspend()
        probe = [(row.prompt, row.completion) for row in reference(models[which]).rows]
        scores.append(await engine.score(probe, 1.0))
        for other in (0, 1):
            verdict = judge(reference(models[other]), scores[-1], precision="quantized")
            assert verdict.agrees is (other == which), verdict
        await engine.resume()
    assert scores[2] == scores[0], "nothing of the version between them is left"
    with pytest.raises(UnsuitableWeights, match=r"lacks 1 weights of the model, such as lm_head\.weight"):
        await engine.load_weights(3, Staged([item for item in weights[0] if item[0] != "lm_head.weight"]))
    await engine.close()


async def test_quantization_that_changes_no_layer_is_refused() -> None:
    """This method quantizes experts only: vLLM would serve a dense model as if nothing was asked for."""
    config = vllm_engines.config()
    weights = Staged([(name, tensor.bfloat16()) for name, tensor in tiny_models.weights(tiny_models.make(config))])
    method = "int8_per_channel_weight_only"
    engine = vllm_engines.build(config, slots=4, dtype="bfloat16", vllm_args={"quantization": method})
    with pytest.raises(UnsuitableWeights, match=f"quantizes no layer of this model with {method}"):
        await engine.load_weights(0, weights)
    await engine.close()
