"""The memory that `rlboost memory` computes, against what torch saves and what models have."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig
from typer.testing import CliRunner

from rlboost.cli import app
from rlboost.jobs.memory import (
    ModelSize,
    TrainedModel,
    adapter_parameters,
    estimate,
    generating_bytes,
    scoring_parameters,
    size_of,
    state_bytes,
    trained_model,
    update_memory,
)
from rlboost.services.trainer.adapters.torch.policy import TorchPolicy
from rlboost.services.trainer.domain.loss.policy import PolicyLoss
from rlboost.services.trainer.ports.engine import PolicySettings
from rlboost.shared.data.vision import FAMILIES, vision_of
from rlboost.shared.errors import ConfigError
from rlboost.shared.job.algorithm import CriticSpec
from rlboost.shared.job.spec import parse
from rlboost.shared.job.training import LoraSpec, TrainerSpec
from rlboost.shared.model.experts import count_in_experts
from rlboost.shared.model.folder import read_config
from rlboost.shared.wire import F32, pack
from tests.support import tiny_vision
from tests.support.one_rank import critic_of, trained_by
from tests.support.saved_bytes import saved_bytes
from tests.support.tiny_vision import SHORT, Shown, picture
from tests.support.training_rows import training_row

N_TOKENS = 512
_SIZES: dict[str, Any] = {
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": N_TOKENS,
    "vocab_size": 500,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
CONFIGS: dict[str, Any] = {
    "llama": LlamaConfig(**_SIZES, intermediate_size=384),
    "qwen2": Qwen2Config(**_SIZES, intermediate_size=384, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**_SIZES, intermediate_size=384, head_dim=32),
    "qwen3-moe": Qwen3MoeConfig(**_SIZES, head_dim=32, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=96),
}
QWEN3_235B = {
    "model_type": "qwen3_moe",
    "num_hidden_layers": 94,
    "hidden_size": 4096,
    "num_attention_heads": 64,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 1536,
    "vocab_size": 151936,
}


_OF_TOWER = {"spatial_merge_size": 2, "temporal_patch_size": 2}
SEEING: dict[str, dict[str, Any]] = {
    "Qwen2.5-VL-3B": {
        "model_type": "qwen2_5_vl",
        "image_token_id": 151655,
        "hidden_size": 2048,
        "intermediate_size": 11008,
        "num_attention_heads": 16,
        "num_hidden_layers": 36,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
        "vocab_size": 151936,
        "vision_config": {
            **_OF_TOWER,
            "depth": 32,
            "hidden_size": 1280,
            "intermediate_size": 3420,
            "num_heads": 16,
            "in_chans": 3,
            "out_hidden_size": 2048,
            "patch_size": 14,
        },
    },
    "Qwen3-VL-4B": {
        "model_type": "qwen3_vl",
        "image_token_id": 151655,
        "tie_word_embeddings": True,
        "text_config": {
            "model_type": "qwen3_vl_text",
            "head_dim": 128,
            "hidden_size": 2560,
            "intermediate_size": 9728,
            "num_attention_heads": 32,
            "num_hidden_layers": 36,
            "num_key_value_heads": 8,
            "tie_word_embeddings": True,
            "vocab_size": 151936,
        },
        "vision_config": {
            **_OF_TOWER,
            "deepstack_visual_indexes": [5, 11, 17],
            "depth": 24,
            "hidden_size": 1024,
            "intermediate_size": 4096,
            "num_heads": 16,
            "num_position_embeddings": 2304,
            "out_hidden_size": 2560,
            "patch_size": 16,
        },
    },
}
"""The sizes in `config.json` of models on the hub."""


def written(config: Any, folder: Path) -> ModelSize:
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return size_of(json.loads((folder / "config.json").read_text()))


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_computed_bytes_match_what_torch_saves(tmp_path: Path, family: str, dtype: Any, checkpointing: bool) -> None:
    """Within a tenth: activations, logits, and weights cast to bfloat16."""
    size = written(CONFIGS[family], tmp_path)
    policy = TorchPolicy(PolicySettings(dtype=dtype, activation_checkpointing=checkpointing), device="cpu")
    policy.load_hf(tmp_path)
    tokens = [1] * (N_TOKENS - 1)
    row = training_row([1], tokens, [-1.0] * len(tokens))
    with saved_bytes(policy.rank.module.parameters()) as n_saved:
        trained_by(policy).forward([row])
        saved = n_saved()
    spec = TrainerSpec(dtype=dtype, activation_checkpointing=checkpointing)
    update = update_memory(size, TrainedModel(size.total), spec, N_TOKENS)
    element = 4 if dtype == "float32" else 2
    computed = update.activations + update.working_weights + element * N_TOKENS * size.vocabulary
    if checkpointing and dtype == "bfloat16":
        computed -= 2 * size.layer  # cast again in the backward pass
    assert computed == pytest.approx(saved, rel=0.1)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("frozen", [False, True])
def test_computed_bytes_of_images_match_what_torch_saves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, dtype: Any, checkpointing: bool, frozen: bool
) -> None:
    """Within a tenth, next to a row of text of the same length."""
    changed = tiny_vision.config(family)
    changed.text_config.max_position_embeddings = N_TOKENS
    monkeypatch.setattr(tiny_vision, "config", lambda *_: changed)
    monkeypatch.setitem(tiny_vision.PROCESSOR, "size", {"shortest_edge": 64, "longest_edge": 1 << 20})
    config = read_config(tiny_vision.write(tmp_path / "model", family=family))
    size, vision = size_of(config), vision_of(config)
    assert size.tower is not None
    assert vision is not None
    settings = PolicySettings(
        dtype=dtype, activation_checkpointing=checkpointing, images=str(tmp_path), freeze_vision_tower=frozen
    )
    policy = TorchPolicy(settings, device="cpu")
    policy.load_hf(tmp_path / "model")
    shown = Shown(tmp_path / "model", vision, SHORT, picture("red", size=(96, 160)))
    n_patches = 96 * 160 // 4**2
    for (digest, _), data in zip(shown.images, shown.data, strict=True):
        (tmp_path / digest).write_bytes(data)
    row = training_row([*shown.ids], [11] * 2, [-1.0] * 2)
    saved = {}
    for images in ([], [digest for digest, _ in shown.images]):
        with saved_bytes(policy.rank.module.parameters()) as n_saved:
            trained_by(policy).forward([replace(row, images=images)])
            saved[bool(images)] = n_saved()
    half = dtype == "bfloat16"
    bytes_of = partial(size.tower.saved_bytes, half=half, checkpointed=checkpointing)
    allowed = 0.02 * n_patches * bytes_of(frozen=False)
    computed = n_patches * bytes_of(frozen=frozen)
    assert saved[True] - saved[False] == pytest.approx(computed, rel=0.1, abs=allowed)


LARGER: dict[str, Any] = {**_SIZES, "hidden_size": 512, "max_position_embeddings": 4096}


@pytest.mark.long
@pytest.mark.timeout(900)  # a processor without instructions for bfloat16 takes minutes
@pytest.mark.parametrize(("dtype", "checkpointing"), [("float32", False), ("bfloat16", True)])
@pytest.mark.parametrize(
    "config",
    [
        Qwen3Config(**{**LARGER, "vocab_size": 8000}, head_dim=64, intermediate_size=1536),
        Qwen3MoeConfig(
            **{**LARGER, "vocab_size": 8000},
            head_dim=64,
            num_experts=8,
            num_experts_per_tok=2,
            moe_intermediate_size=384,
        ),
    ],
    ids=["qwen3", "qwen3-moe"],
)
def test_computed_total_matches_peak_of_a_process(tmp_path: Path, config: Any, dtype: Any, checkpointing: bool) -> None:
    """Within a tenth, for a whole update with its state."""
    size, n_tokens = written(config, tmp_path), 1024
    measured = peak_of_update(tmp_path, dtype, [n_tokens], checkpointing=checkpointing)
    spec = TrainerSpec(dtype=dtype, activation_checkpointing=checkpointing)
    assert update_memory(size, TrainedModel(size.total), spec, n_tokens).total == pytest.approx(measured, rel=0.1)


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("rows", [[16384], [8192, *[1024] * 8]], ids=["one-row", "packed-rows"])
def test_computed_total_of_16k_tokens_matches_peak_of_a_process(tmp_path: Path, rows: list[int]) -> None:
    """Within a tenth. Whole logits with their gradient would be 2.6 GB in float32: they exist in chunks only."""
    sizes = {**_SIZES, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 20_000}
    config = Qwen3Config(**{**sizes, "max_position_embeddings": 16384}, head_dim=32, intermediate_size=192)
    size, n_tokens = written(config, tmp_path), sum(rows)
    spec = TrainerSpec(activation_checkpointing=True)
    computed = update_memory(size, TrainedModel(size.total), spec, n_tokens)
    assert computed.logits < 8 * n_tokens * size.vocabulary
    assert computed.total == pytest.approx(peak_of_update(tmp_path, "float32", rows, checkpointing=True), rel=0.1)


def peak_of_update(model: Path, dtype: str, rows: list[int], *, checkpointing: bool) -> int:
    """Return the bytes that a process holds at the peak of an update with rows of these lengths."""
    arguments = [str(model), dtype, str(checkpointing), *map(str, rows)]
    # Freed buffers go back to the system, so that the peak is the allocated memory.
    env = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
    return int(
        subprocess.run(
            [sys.executable, "-m", "tests.support.peak_of_update", *arguments],
            env=env,
            check=True,
            capture_output=True,
            timeout=900,
        ).stdout
    )


@pytest.mark.parametrize("family", CONFIGS)
def test_parameter_count_matches_the_model(tmp_path: Path, family: str) -> None:
    size = written(CONFIGS[family], tmp_path)
    model: Any = AutoModelForCausalLM.from_config(CONFIGS[family])
    assert size.total == pytest.approx(sum(parameter.numel() for parameter in model.parameters()), rel=2e-3)
    assert (size.active < size.total) is (family == "qwen3-moe")
    assert size.in_experts == count_in_experts(tmp_path)


@pytest.mark.parametrize(
    ("name", "n", "n_in_tower"), [("Qwen2.5-VL-3B", 3754622976, 668684288), ("Qwen3-VL-4B", 4437815808, 415347712)]
)
def test_parameter_count_of_models_that_see_images(name: str, n: int, n_in_tower: int) -> None:
    """As transformers has them, without biases and norms; from `config.json` as it is published."""
    size = size_of(SEEING[name])
    assert size.total == pytest.approx(n, rel=2e-3)
    assert size.in_tower == pytest.approx(n_in_tower, rel=2e-3)
    assert size.active == size.total - size.in_tower


def test_frozen_tower_has_no_moments_and_no_gradients(tmp_path: Path) -> None:
    raw = job(tmp_path, SEEING["Qwen3-VL-4B"])
    whole, frozen, adapter = (
        estimate(parse({**raw, **extra}))
        for extra in ({}, {"trainer": {"freeze_vision_tower": True}}, {"elastic": {"weights": "lora"}})
    )
    size = size_of(SEEING["Qwen3-VL-4B"])
    assert whole.bytes["state"] == 16 * size.total
    assert frozen.bytes["state"] == 16 * size.total - 12 * size.in_tower
    assert adapter.bytes["state"] == 4 * size.total + 16 * adapter_parameters(size, LoraSpec())
    assert whole.bytes["images"] > frozen.bytes["images"] == 0
    spec = parse({**raw, "trainer": {"freeze_vision_tower": True, "offload": "optimizer"}})
    model = trained_model(spec, size.total, n_in_tower=size.in_tower)
    assert generating_bytes(model, spec.trainer) == 4 * size.total
    few = estimate(parse(raw), image_tokens=512)
    assert (whole.image_tokens, few.image_tokens) == (whole.tokens, 512)
    assert few.bytes["images"] * whole.tokens == whole.bytes["images"] * 512
    with pytest.raises(ConfigError, match="critic is not supported with models that see images"):
        estimate(parse({**raw, "algorithm": {"name": "ppo"}}))
    with pytest.raises(ConfigError, match="8193 tokens of images: a micro-batch of this model has at most 8192"):
        estimate(parse(raw), image_tokens=8193)
    with pytest.raises(ConfigError, match="1 tokens of images: a micro-batch of this model has at most 0"):
        estimate(parse(job(tmp_path, QWEN3_235B)), image_tokens=1)


@pytest.mark.parametrize(
    ("family", "lora"),
    [
        ("llama", LoraSpec(rank=3)),
        ("qwen2", LoraSpec(rank=3)),
        ("qwen3-moe", LoraSpec(targets=("q_proj", "layers.1.self_attn.o_proj"))),
    ],
)
def test_state_of_an_adapter_and_a_critic_is_what_torch_holds(tmp_path: Path, family: str, lora: LoraSpec) -> None:
    """Weights, gradients and moments in the middle of the second update."""
    size = written(CONFIGS[family], tmp_path)
    policy = TorchPolicy(PolicySettings(dtype="bfloat16", lora=lora, critic=CriticSpec()), device="cpu")
    policy.load_hf(tmp_path)
    row = training_row([1], [1] * 7, [0.1] * 7, values=pack([0.1] * 7, F32), returns=pack([1.0] * 7, F32))
    for _ in range(2):
        policy.accumulate([[row]], PolicyLoss())
        if not trained_by(policy).optimizers[0].state:
            policy.step(1e-3)
    critic = critic_of(policy)
    weights = [*policy.rank.module.parameters(), *critic.tensors.values()]
    gradients = [weight.grad for weight in weights if weight.grad is not None]
    moments = [
        state[key]
        for one in (*trained_by(policy).optimizers, *critic.optimizers)
        for state in one.state.values()
        for key in ("exp_avg", "exp_avg_sq")
    ]
    held = sum(tensor.nbytes for tensor in (*weights, *gradients, *moments))
    n_added = adapter_parameters(size, lora) + size.critic
    assert adapter_parameters(size, lora) == sum(tensor.numel() for tensor in trained_by(policy).tensors.values())
    model = TrainedModel(size.total, frozen=True, n_added=n_added)
    assert state_bytes(model, TrainerSpec(dtype="bfloat16")) == pytest.approx(held, rel=2e-2)


def test_qwen3_235b_has_its_published_sizes() -> None:
    size = size_of(QWEN3_235B)
    assert round(size.total / 1e9) == 235
    assert round(size.active / 1e9) == 22


def job(tmp_path: Path, config: dict[str, Any], **trainer: Any) -> dict[str, Any]:
    (tmp_path / "config.json").write_text(json.dumps(config))
    return {
        "model": str(tmp_path),
        "data": {"train": "t"},
        "reward": {"function": "m:f"},
        "sampling": {"max_tokens": 8192},
        "trainer": trainer,
        "steps": 1,
    }


def test_more_gpus_need_less_memory_each(tmp_path: Path) -> None:
    few, many = (estimate(parse(job(tmp_path, QWEN3_235B, data_parallel=n, micro_batch_tokens=65536))) for n in (8, 64))
    assert few.bytes["state"] == pytest.approx(8 * many.bytes["state"], rel=1e-6)
    assert (few.tokens, many.tokens) == (8192, 8192), "a sample is never divided"
    assert few.bytes["total"] == sum(few.bytes[name] for name in ("state", "activations", "logits", "working_weights"))


def test_context_parallel_divides_the_longest_sample(tmp_path: Path) -> None:
    whole, divided = (estimate(parse(job(tmp_path, QWEN3_235B, data_parallel=64, context_parallel=n))) for n in (1, 4))
    assert (divided.gpus, divided.tokens) == (256, whole.tokens // 4)
    assert whole.bytes["state"] == pytest.approx(4 * divided.bytes["state"], rel=1e-6)
    assert whole.bytes["activations"] == 4 * divided.bytes["activations"]


def test_critic_and_adapter_are_part_of_a_job_s_state(tmp_path: Path) -> None:
    raw = job(tmp_path, QWEN3_235B, data_parallel=64)
    plain, critic, adapter, both = (
        estimate(parse({**raw, **extra})).bytes["state"]
        for extra in (
            {},
            {"algorithm": {"name": "ppo"}},
            {"elastic": {"weights": "lora"}},
            {"elastic": {"weights": "lora"}, "algorithm": {"name": "ppo"}},
        )
    )
    size = size_of(QWEN3_235B)
    assert critic - plain == pytest.approx(16 * size.critic / 64)
    assert both - adapter == pytest.approx(16 * size.critic / 64)
    assert adapter * 64 - 4 * size.total == pytest.approx(16 * adapter_parameters(size, LoraSpec()), rel=1e-6)


def test_megatron_has_state_only(tmp_path: Path) -> None:
    found = estimate(parse(job(tmp_path, QWEN3_235B, backend="megatron", data_parallel=2)))
    assert list(found.bytes) == ["state"]


def test_expert_parallel_divides_the_experts_alone(tmp_path: Path) -> None:
    megatron: dict[str, Any] = {"backend": "megatron", "dtype": "bfloat16", "data_parallel": 8}
    one, all_ = (estimate(parse(job(tmp_path, QWEN3_235B, **megatron, expert_parallel=n))).bytes for n in (1, 8))
    in_experts = 94 * 128 * 3 * 4096 * 1536
    assert one["state"] - all_["state"] == 18 * in_experts * 7 // 8


def test_sft_without_tokens_takes_those_of_the_micro_batch(tmp_path: Path) -> None:
    raw = job(tmp_path, QWEN3_235B, data_parallel=2, micro_batch_tokens=256)
    sft = {"kind": "sft", **{name: raw[name] for name in ("model", "data", "trainer", "steps")}}
    assert estimate(parse(sft)).tokens == 128
    assert estimate(parse(sft), 5000).tokens == 5000


def test_pairs_need_memory_for_the_reference(tmp_path: Path) -> None:
    raw = job(tmp_path, QWEN3_235B, data_parallel=2)
    imitated, preferred = (
        estimate(parse({"kind": kind, **{name: raw[name] for name in ("model", "data", "trainer", "steps")}}))
        for kind in ("sft", "dpo")
    )
    assert preferred.bytes["state"] > imitated.bytes["state"]
    online = {**raw, "algorithm": {"name": "dpo"}}
    assert estimate(parse(online)).bytes["state"] == preferred.bytes["state"]


def test_a_reward_model_has_no_logits_and_needs_memory_where_it_scores(tmp_path: Path) -> None:
    raw, size = job(tmp_path, QWEN3_235B, data_parallel=64, offload="all"), size_of(QWEN3_235B)
    imitated, scored = (
        estimate(parse({"kind": kind, **{name: raw[name] for name in ("model", "data", "trainer", "steps")}}))
        for kind in ("sft", "reward")
    )
    assert scored.parameters == size.total - (size.vocabulary - 1) * size.hidden
    assert scored.bytes["state"] < imitated.bytes["state"]
    assert scored.bytes["logits"] == 0 < imitated.bytes["logits"]
    spec = parse({**raw, "reward": {"functions": [{"model": raw["model"]}], "workers": 2}})
    n_scoring = scoring_parameters(spec)
    assert n_scoring == 2 * size.reward_model
    assert estimate(spec).bytes["state"] - estimate(parse(raw)).bytes["state"] == 4 * n_scoring
    model = trained_model(spec, size.total, n_reward_models=n_scoring)
    assert generating_bytes(model, spec.trainer) == 4 * n_scoring, "offloading leaves it where it is"


def test_job_that_trains_nothing_is_refused(tmp_path: Path) -> None:
    raw = job(tmp_path, QWEN3_235B)
    evaluation = {
        "kind": "eval",
        "data": {"eval": "t"},
        "eval": {},
        **{name: raw[name] for name in ("model", "reward", "sampling")},
    }
    with pytest.raises(ConfigError, match="trains nothing"):
        estimate(parse(evaluation))


def test_unknown_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="model type gpt2: its memory cannot be computed"):
        estimate(parse(job(tmp_path, {"model_type": "gpt2"})))
    with pytest.raises(ConfigError, match=r"config\.json has no moe_intermediate_size"):
        estimate(parse(job(tmp_path, {k: v for k, v in QWEN3_235B.items() if k != "moe_intermediate_size"})))


@pytest.mark.parametrize(
    ("model", "advice"),
    [("nowhere", "name the folder with the model's config.json"), ("Qwen/Qwen3-0.6B", "'hf download Qwen/Qwen3-0.6B")],
)
def test_model_that_is_no_folder_error_says_what_to_do(tmp_path: Path, model: str, advice: str) -> None:
    with pytest.raises(ConfigError) as caught:
        estimate(parse({**job(tmp_path, {}), "model": model}))
    assert str(caught.value).startswith(f"model: there is no folder {model}: ")
    assert advice in str(caught.value)
    assert "Errno" not in str(caught.value)


def test_command_prints_a_table_and_json(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(job(tmp_path, QWEN3_235B, data_parallel=64)))
    shown = CliRunner().invoke(app, ["memory", str(file), "trainer.dtype=bfloat16", "--tokens", "16384"])
    assert shown.exit_code == 0, shown.output
    assert "235.09 billion parameters, 22.19 per token" in shown.output
    assert "on each of 64 GPUs, with 16384 tokens in a micro-batch:" in shown.output
    printed = json.loads(CliRunner().invoke(app, ["memory", str(file), "--json"]).output)
    assert (printed["gpus"], printed["tokens"]) == (64, 8192)
