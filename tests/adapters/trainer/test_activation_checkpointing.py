"""Activation checkpointing changes no bit, and saves only each layer's input."""

from __future__ import annotations

import json
import os
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, Qwen3Config

from rlboost.services.trainer import build
from rlboost.services.trainer.adapters.torch.policy import TorchPolicy
from rlboost.services.trainer.domain.loss.function import TokenBatch
from rlboost.services.trainer.ports.engine import PolicySettings
from rlboost.services.trainer.settings import Settings
from rlboost.shared.errors import ConfigError
from rlboost.shared.job.algorithm import CriticSpec
from rlboost.shared.job.spec import parse
from rlboost.shared.job.training import LoraSpec, OptimizerSpec
from tests.support import rank_policies
from tests.support.fork_server import output_of
from tests.support.losses import clipped_loss
from tests.support.megatron_cpu import python_path
from tests.support.model_folder import write_model, write_unmarked_model
from tests.support.offloaded_ranks import three_steps as three_steps_of_ranks
from tests.support.one_rank import critic_of
from tests.support.policy_comparison import bits, gradients
from tests.support.saved_bytes import saved_bytes
from tests.support.saved_bytes_of_rank import N_TOKENS, ROW
from tests.support.training_rows import taught

pytestmark = pytest.mark.timeout(300)

LOSS, RATE = clipped_loss(0.2, 0.28), 1e-2
DROPPING = LoraSpec(rank=4, dropout=0.5)
HIDDEN, LAYERS = 32, (2, 5)


def engine(model: Path, *, recomputes: bool, **choices: Any) -> TorchPolicy:
    optimizer = OptimizerSpec(lr=RATE)
    settings = PolicySettings(optimizer=optimizer, temperature=0.8, activation_checkpointing=recomputes, **choices)
    made = TorchPolicy(settings, device="cpu")
    made.load_hf(model)
    return made


# --- bits ---


def three_steps(policy: TorchPolicy) -> list[Any]:
    """Return everything that comes out, and the gradients."""
    seen: list[Any] = []
    for seed in range(3):
        batch = taught(seed=seed)
        seen.append(policy.accumulate([batch[:3], batch[3:]], LOSS))
        seen.append({name: gradient.tolist() for name, gradient in gradients(policy).items()})
        seen += [policy.step(RATE), bits(policy), policy.logprobs([batch])]
        if policy.settings.reference:
            seen.append(policy.reference_logprobs([batch]))
        if policy.settings.critic:
            seen.append(policy.values([batch]))
    return seen


@pytest.mark.parametrize(
    ("family", "choices"),
    [
        ("qwen3-tied", {"reference": True}),
        ("gpt2", {"reference": True}),
        ("llama-untied", {"reference": True, "critic": CriticSpec(lr=5e-3), "dtype": "bfloat16"}),
        ("qwen3-tied", {"critic": CriticSpec(lr=5e-3), "offload": "all"}),
        ("llama-untied", {"reference": True, "lora": LoraSpec()}),
        ("qwen3-tied", {"lora": DROPPING, "dtype": "bfloat16"}),
    ],
    ids=["reference", "gpt2", "bfloat16-critic", "offloaded-critic", "adapter", "adapter-dropout"],
)
def test_activation_checkpointing_changes_no_bit_in_three_steps(
    family: str, choices: dict[str, Any], tmp_path: Path
) -> None:
    write_model(tmp_path, family)
    steady = three_steps(engine(tmp_path, recomputes=False, **choices))
    assert three_steps(engine(tmp_path, recomputes=True, **choices)) == steady


@pytest.mark.parametrize(
    "layout",
    [
        {"backend": "torch", "data_parallel": 2, "reference": True, "dtype": "bfloat16"},
        {"tensor_parallel": 2, "sequence_parallel": True, "reference": True},
        {"pipeline_parallel": 2, "dtype": "bfloat16"},
    ],
    ids=["fsdp2", "tp2", "pp2"],
)
def test_activation_checkpointing_of_ranks_changes_no_bit(layout: dict[str, Any], tmp_path: Path) -> None:
    model = rank_policies.write(tmp_path / "llama", "llama")
    seen = []
    for recomputes in (False, True):
        settings = {**layout, "activation_checkpointing": recomputes}
        with rank_policies.policy(OptimizerSpec(lr=RATE, weight_decay=0.1), **settings) as policy:
            policy.load_hf(model)
            seen.append(three_steps_of_ranks(policy, tmp_path / str(recomputes), offloaded=False))
    assert seen[1] == seen[0]


# --- memory ---


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Models that differ in how many layers they have."""
    made = []
    for n_layers in LAYERS:
        config = Qwen3Config(
            vocab_size=96,
            hidden_size=HIDDEN,
            intermediate_size=48,
            num_hidden_layers=n_layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            max_position_embeddings=160,
            bos_token_id=None,
            eos_token_id=None,
        )
        made.append(tmp_path_factory.mktemp("model"))
        model: Any = AutoModelForCausalLM.from_config(config)
        model.save_pretrained(made[-1])
    return made


def per_layer(saved: list[int]) -> float:
    return (saved[1] - saved[0]) / (LAYERS[1] - LAYERS[0])


INPUT_BYTES = N_TOKENS * HIDDEN * 4


@pytest.mark.parametrize("lora", [None, DROPPING], ids=["model", "adapter"])
def test_layer_saves_only_its_input(models: list[Path], lora: LoraSpec | None) -> None:
    def kept_of(policy: TorchPolicy) -> int:
        found: list[int] = []

        def loss(batch: TokenBatch) -> tuple[Tensor, dict[str, float]]:
            found.append(n_saved_bytes())
            return LOSS(batch)

        with saved_bytes(policy.rank.module.parameters()) as n_saved_bytes:
            policy.accumulate([[ROW]], loss)
        return found[0]

    without, within = (
        [kept_of(engine(model, recomputes=recomputes, lora=lora)) for model in models] for recomputes in (False, True)
    )
    assert per_layer(within) == INPUT_BYTES
    assert per_layer(without) > 10 * INPUT_BYTES


def test_critic_layer_saves_only_its_input(models: list[Path]) -> None:
    def kept_of(policy: TorchPolicy) -> int:
        critic = critic_of(policy)
        with saved_bytes(critic.tensors.values()) as n_saved_bytes:
            critic.forward([ROW])
            return n_saved_bytes()

    without, within = (
        [kept_of(engine(model, recomputes=recomputes, critic=CriticSpec())) for model in models]
        for recomputes in (False, True)
    )
    assert per_layer(within) == INPUT_BYTES
    assert per_layer(without) > 10 * INPUT_BYTES


class Rounded(TorchDispatchMode):
    """Counts the copies in bfloat16 of matrices of some shape that are still there."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch has no annotation there
        self._shape = shape
        self._made: list[weakref.ref[Tensor]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        if function is torch.ops.aten._to_copy.default and tuple(made.shape) == self._shape:
            self._made.append(weakref.ref(made))
        return made

    def count(self) -> tuple[int, int]:
        """Return how many were made, and how many are left."""
        return len(self._made), sum(copy() is not None for copy in self._made)


def test_rounded_weights_of_a_layer_are_freed(models: list[Path]) -> None:
    made = engine(models[0], recomputes=True, dtype="bfloat16")
    layers = made.rank.module.get_decoder().layers
    seen: list[tuple[int, int]] = []
    with Rounded(tuple(layers[0].mlp.up_proj.weight.shape)) as rounded:
        made.rank.module.get_output_embeddings().register_forward_pre_hook(lambda *_: seen.append(rounded.count()))
        made.accumulate([[ROW]], LOSS)
    assert seen == [(2 * LAYERS[0], 0)]  # two matrices of that shape, up and gate


@pytest.mark.parametrize("kind", ["fsdp", "megatron"])
def test_rank_with_checkpointing_saves_only_layer_inputs(kind: str, models: list[Path]) -> None:
    env = {**os.environ, "PYTHONPATH": python_path(), "CUDA_VISIBLE_DEVICES": ""}
    output = output_of("tests.support.saved_bytes_of_rank", env, kind, *map(str, models))
    saved = json.loads(output.splitlines()[-1])
    assert per_layer(saved["true"]) == INPUT_BYTES
    assert per_layer(saved["false"]) > 10 * INPUT_BYTES


def test_reference_model_is_not_checkpointed(tmp_path: Path) -> None:
    made = engine(write_model(tmp_path), recomputes=True, reference=True)
    policy, reference = ([*model.get_decoder().layers] for model in (made.rank.module, made.rank.reference))
    assert all("forward" in vars(layer) for layer in policy)
    assert not any("forward" in vars(layer) for layer in reference)


@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize(
    "trainer", [{}, {"data_parallel": 2}, {"backend": "megatron"}], ids=["torch", "fsdp", "megatron"]
)
@pytest.mark.parametrize("kind", ["rl", "sft"])
def test_job_setting_reaches_the_engine(kind: str, trainer: dict[str, Any], recomputes: bool, tmp_path: Path) -> None:
    job = {"model": "m", "data": {"train": "t"}, "steps": 1} | ({"reward": {"function": "a:b"}} if kind == "rl" else {})
    spec = parse({"kind": kind, **job, "trainer": {**trainer, "activation_checkpointing": recomputes}})
    made = build._engine(
        Settings(device="cpu"), spec.trainer, tmp_path, None, PolicySettings.of(spec, "token_mean", None)
    )
    assert made.settings.activation_checkpointing is recomputes
    if made._ranks is not None:
        assert made._ranks._arguments["settings"]["activation_checkpointing"] is recomputes


def test_model_without_marked_layers_is_rejected(tmp_path: Path) -> None:
    model = write_unmarked_model(tmp_path)
    assert engine(model, recomputes=False).logprobs([[ROW]])
    with pytest.raises(ConfigError, match=r"^trainer\.activation_checkpointing: not supported for"):
        engine(model, recomputes=True)
