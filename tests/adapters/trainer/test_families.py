"""Families whose files differ from transformers' models, or that have towers: trained, and published as in their files.

`test_mixture_families` has those whose routers are observed.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, Llama4Config, OlmoHybridConfig

from rlboost.services.trainer.adapters.torch.policy import TorchPolicy
from rlboost.services.trainer.domain.plan import SequenceRow, TrainingRow
from rlboost.services.trainer.ports.engine import PolicySettings
from rlboost.shared.data.vision import is_in_tower
from rlboost.shared.errors import ConfigError
from rlboost.shared.job.algorithm import CriticSpec
from rlboost.shared.job.training import LoraSpec, OptimizerSpec
from rlboost.shared.model.experts import is_mixture
from rlboost.shared.model.folder import count_in_tower, read_config
from rlboost.shared.wire import floats, ints
from tests.support import families, rank_policies, tiny_models
from tests.support.losses import clipped_loss
from tests.support.model_folder import saved
from tests.support.training_rows import rows, taught

pytestmark = pytest.mark.timeout(600)

OPTIMIZER = OptimizerSpec(lr=1e-3, weight_decay=0.1)
LOSS = clipped_loss(0.2, 0.28)


def trained(folder: Path, **settings: Any) -> TorchPolicy:
    policy = TorchPolicy(PolicySettings(optimizer=OPTIMIZER, **{"dtype": "float32", **settings}), device="cpu")
    policy.load_hf(folder)
    return policy


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def check_logprobs(policy: Any, model: Any, seed: int) -> None:
    batch = rows(4, seed)
    for row, column in zip(batch, policy.logprobs([batch]), strict=True):
        expected = tiny_models.logprobs(model, ints(row.prompt), ints(row.completion))
        assert floats(column) == pytest.approx(expected, abs=2e-5)


def check_ranks_publish_the_same(source: Path, folder: Path) -> TorchPolicy:
    """Take a step in one process and in two ranks, and compare what they publish, in `folder`; return the first."""
    alone = trained(source)
    with rank_policies.policy(OPTIMIZER, backend="torch", data_parallel=2) as ranks:
        ranks.load_hf(source)
        for policy in (alone, ranks):
            policy.accumulate([rows(4)], LOSS)
            policy.step(1e-3)
        found, expected = (
            tensors(saved(policy, source, folder / name)) for policy, name in ((ranks, "ranks"), (alone, "alone"))
        )
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, atol=1e-4, rtol=0, msg=name)
    return alone


@pytest.mark.parametrize("family", sorted(families.CONFIGS))
def test_update_is_published_under_the_names_of_the_files(tmp_path: Path, family: str) -> None:
    source = families.write(tmp_path / "source", family)
    policy = trained(source)
    check_logprobs(policy, families.load(source, family), 0)
    policy.accumulate([rows(4)], LOSS)
    assert policy.step(1e-3) > 0
    published = saved(policy, source, tmp_path / "published")
    before, after = tensors(source), tensors(published)
    assert after.keys() == before.keys()
    assert is_mixture(read_config(source)) == any("experts" in name or "block_sparse_moe" in name for name in before)
    check_logprobs(policy, families.load(published, family), 7)
    towers = [name for name in after if re.search(r"\b(vision|visual|multi_modal|embed_vision)", name)]
    assert bool(towers) == (family in families.WITH_TOWERS and family != "gemma4")
    assert count_in_tower(source) == sum(before[name].numel() for name in towers)
    for name in towers:  # also by weight decay
        assert torch.equal(after[name], before[name]), name


@pytest.mark.parametrize("family", ["gemma3", "qwen3_5_moe"])
def test_other_names_of_files_are_kept(tmp_path: Path, family: str) -> None:
    """As published on the Hugging Face Hub, with a tower's older names, or all experts of a layer in a tensor."""
    source = families.write(tmp_path / "source", family)
    if family == "gemma3":
        given = {name.replace("tower.", "tower.vision_model."): tensor for name, tensor in tensors(source).items()}
    else:
        given = families.load(source, family).state_dict()
    save_file(given, source / "model.safetensors", {"format": "pt"})
    alone = check_ranks_publish_the_same(source, tmp_path)
    assert tensors(tmp_path / "alone").keys() == given.keys()
    check_logprobs(alone, families.load(tmp_path / "alone", family), 7)


@pytest.mark.parametrize("family", ["gemma3", "qwen3_5"])
def test_reward_model_trains_its_head_and_no_tower(tmp_path: Path, family: str) -> None:
    source = families.write(tmp_path / "source", family)
    policy = trained(source, scores=True)
    before = tensors(saved(policy, source, tmp_path / "before"))
    scored = [TrainingRow.of(SequenceRow(row.prompt, row.completion[:4], bytes(4)), b"") for row in rows(4)]
    policy.accumulate([scored], lambda batch: (batch.logprobs.sum(), {"divisor": 4.0}))
    policy.step(1e-3)
    published = saved(policy, source, tmp_path / "published")
    changed = {name for name, tensor in tensors(published).items() if not torch.equal(tensor, before[name])}
    assert "score.weight" in changed
    assert changed == {name for name in before if not is_in_tower(name)}
    again = trained(published, scores=True)
    assert again.logprobs([scored]) == policy.logprobs([scored])


@pytest.mark.parametrize("family", ["gemma3", "mixtral", "qwen3_5"])
def test_critic_of_ranks_is_that_of_one_process(tmp_path: Path, family: str) -> None:
    source, checkpoint = families.write(tmp_path / "source", family), tmp_path / "checkpoint"
    critic = CriticSpec(lr=1e-3)
    alone = trained(source, critic=critic)
    with rank_policies.policy(OPTIMIZER, backend="torch", data_parallel=2, critic=critic, dtype="float32") as ranks:
        ranks.load_hf(source)
        for policy in (alone, ranks):
            policy.accumulate([taught()], LOSS)
            policy.step(1e-3)
        found, expected = (b"".join(policy.values([taught()])) for policy in (ranks, alone))
        assert floats(found) == pytest.approx(floats(expected), abs=1e-5)
        checkpoint.mkdir()
        ranks.snapshot()(checkpoint)
    resumed = trained(source, critic=critic)
    resumed.load(checkpoint)
    assert floats(b"".join(resumed.values([taught()]))) == pytest.approx(floats(found), abs=1e-5)


@pytest.mark.parametrize("family", sorted(families.CONFIGS))
def test_bfloat16_rounds_and_no_more(tmp_path: Path, family: str) -> None:
    source, batch = families.write(tmp_path, family), rows(4)
    exact, rounded = (
        [floats(column) for column in policy.logprobs([batch])]
        for policy in (trained(source), trained(source, dtype="bfloat16"))
    )
    differences = np.abs(np.concatenate(exact) - np.concatenate(rounded))
    assert 0 < differences.mean() < 0.1


@pytest.mark.parametrize("family", ["gemma3", "gpt_oss", "mixtral"])
def test_ranks_publish_what_one_process_publishes(tmp_path: Path, family: str) -> None:
    check_ranks_publish_the_same(families.write(tmp_path / "source", family), tmp_path)


def test_adapter_leaves_out_towers(tmp_path: Path) -> None:
    policy = trained(families.write(tmp_path, "qwen3_5"), lora=LoraSpec(rank=2))
    names = [shard.name for shard in policy.export_shards("adapter")]
    assert any(".linear_attn." in name for name in names)
    assert all(".language_model." in name for name in names)


def test_adapter_is_refused_if_files_have_other_names(tmp_path: Path) -> None:
    source = families.write(tmp_path, "gemma3")
    with pytest.raises(ConfigError, match=r"lora does not support model type gemma3, whose files have .* elastic"):
        trained(source, lora=LoraSpec(rank=2))


def test_family_that_is_stored_in_another_form_is_refused(tmp_path: Path) -> None:
    config = OlmoHybridConfig(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        linear_num_key_heads=2,
        linear_num_value_heads=2,
        layer_types=["linear_attention", "full_attention"],
        eos_token_id=None,
        pad_token_id=None,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"olmo_hybrid: transformers stores .*conv1d.weight in another form"):
        trained(tmp_path)


def test_family_without_a_body_is_refused(tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    text = {**sizes, "vocab_size": 96, "num_key_value_heads": 2, "head_dim": 8, "num_local_experts": 2}
    tower = {**sizes, "image_size": 28, "patch_size": 14, "vision_output_dim": 16, "projector_input_dim": 16}
    config = Llama4Config(
        text_config={**text, "intermediate_size_mlp": 48, "pad_token_id": None},
        vision_config={**tower, "projector_output_dim": 16},
    )
    AutoModelForImageTextToText.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="Llama4ForConditionalGeneration has no body apart from its output head"):
        trained(tmp_path)
