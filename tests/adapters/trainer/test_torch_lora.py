"""Training an adapter, and merging it on the other side: both against PEFT itself."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM

from rlboost.jobs.file import complete
from rlboost.services.trainer.adapters.run_folder import LocalRunFolder
from rlboost.services.trainer.adapters.torch.policy import TorchPolicy
from rlboost.services.trainer.ports.engine import PolicySettings
from rlboost.shared.errors import ConfigError
from rlboost.shared.job.spec import parse
from rlboost.shared.job.training import LoraSpec
from rlboost.shared.weights.access import RecordKey
from rlboost.shared.weights.cache import AdaptedVersion
from rlboost.shared.weights.manifest import Shard
from rlboost.shared.wire import floats, ints
from tests.support.engine_steps import train
from tests.support.losses import clipped_loss
from tests.support.model_folder import write_model
from tests.support.policy_comparison import bits
from tests.support.staged_versions import pulled
from tests.support.tiny_models import logprobs
from tests.support.training_rows import rows

LORA = LoraSpec(rank=4, alpha=12.0)
LOSS = clipped_loss(0.2, 0.28)


def engine(folder: Path, lora: LoraSpec = LORA, *, dtype: str = "float32", seed: int = 0) -> TorchPolicy:
    made = TorchPolicy(PolicySettings(dtype=dtype, lora=lora, seed=seed), device="cpu")
    made.load_hf(folder)
    return made


def trained(folder: Path, **settings: Any) -> TorchPolicy:
    made = engine(folder, **settings)
    for seed in range(3):
        train(made, seed)
    return made


def tensors(policy: TorchPolicy, what: Any = "model") -> dict[str, torch.Tensor]:
    return {shard.name: tensor(shard) for shard in policy.export_shards(what)}


def tensor(shard: Shard) -> torch.Tensor:
    return torch.frombuffer(bytearray(shard.data), dtype=getattr(torch, shard.dtype)).reshape(shard.local_shape)


def merged_by_peft(folder: Path, policy: TorchPolicy, run: Path, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Save the adapter as PEFT's users do, and let PEFT load and merge it."""
    run.mkdir()
    adapter = LocalRunFolder(run, folder, RecordKey("secret")).export_adapter(
        policy.export_shards("adapter"), policy.adapter_json
    )
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    merged: Any = peft.PeftModel.from_pretrained(model, adapter).merge_and_unload()
    found: dict[str, torch.Tensor] = merged.state_dict()
    return found


def bits_of(value: torch.Tensor) -> torch.Tensor:
    return value.contiguous().view(torch.uint8)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["qwen3-tied", "llama-untied"])
def test_worker_merge_equals_peft_merge(tmp_path: Path, family: str, dtype: str) -> None:
    folder = write_model(tmp_path / "model", family)
    policy = trained(folder, dtype=dtype)
    expected = merged_by_peft(folder, policy, tmp_path / "run", getattr(torch, dtype))
    base = pulled(policy.export_shards("base"), tmp_path)
    version = pulled(policy.export_shards("adapter"), tmp_path, 1, base=base, adapter_json=policy.adapter_json)
    staged = AdaptedVersion(version, base)
    loaded = dict(staged.tensors())
    ours = tensors(policy)
    assert loaded.keys() == ours.keys() == tensors(policy, "base").keys()
    changed = 0
    for name, value in loaded.items():
        assert value.dtype == getattr(torch, dtype)
        assert torch.equal(bits_of(value), bits_of(expected[name])), name
        assert torch.equal(bits_of(value), bits_of(ours[name])), name
        changed += name.endswith("proj.weight")
    assert changed == 3 * 7
    assert version.manifest.n_bytes < base.manifest.n_bytes


def test_corrupt_merged_tensor_is_named(tmp_path: Path) -> None:
    policy = trained(write_model(tmp_path / "model"))
    base = pulled(policy.export_shards("base"), tmp_path)
    version = pulled(policy.export_shards("adapter"), tmp_path, 1, base=base, adapter_json=policy.adapter_json)
    staged = AdaptedVersion(version, base)
    loaded = {name: value.clone() for name, value in staged.tensors()}
    assert staged.differing(loaded.items()) == []
    assert AdaptedVersion(version, base).differing(loaded.items()) == [], "nothing was read of this one before"
    loaded["model.layers.1.mlp.up_proj.weight"].view(torch.int32)[3, 4] ^= 1
    loaded["model.norm.weight"].view(torch.int32)[0] ^= 1
    assert staged.differing(loaded.items()) == ["model.layers.1.mlp.up_proj.weight", "model.norm.weight"]
    assert len(staged.differing(dict(AdaptedVersion(version, base)._base.tensors()).items())) == 3 * 7


def test_next_adapter_changes_only_its_tensors(tmp_path: Path) -> None:
    policy = engine(write_model(tmp_path / "model"), LoraSpec(targets=("q_proj", "v_proj")))
    base = pulled(policy.export_shards("base"), tmp_path)
    versions = []
    for number in (1, 2):
        train(policy, number)
        adapter = pulled(policy.export_shards("adapter"), tmp_path, number, base=base, adapter_json=policy.adapter_json)
        versions.append(AdaptedVersion(adapter, base))
    first, second = versions
    new = {name for name, content in second.contents.items() if first.contents[name] != content}
    assert new == {f"model.layers.{i}.self_attn.{layer}_proj.weight" for i in range(3) for layer in "qv"}
    assert dict(second.tensors(new)).keys() == new
    assert second.differing({**dict(first.tensors()), **dict(second.tensors(new))}.items()) == []


def test_trainer_and_merged_model_agree_on_logprobs(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    policy = trained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder).eval()
    before = logprobs(model, [3, 4, 5], [6, 7, 8])
    model.load_state_dict(tensors(policy), strict=False)
    assert logprobs(model, [3, 4, 5], [6, 7, 8]) != pytest.approx(before, abs=1e-3), "the adapter has come to matter"
    batch = rows(7)
    for row, column in zip(batch, policy.logprobs([batch]), strict=True):
        assert floats(column) == pytest.approx(logprobs(model, ints(row.prompt), ints(row.completion)), abs=2e-5)


def test_adapter_names_match_peft(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    policy = trained(folder)
    config = peft.LoraConfig(r=LORA.rank, lora_alpha=LORA.alpha, target_modules="all-linear", task_type="CAUSAL_LM")
    theirs = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(folder), config)
    state = peft.get_peft_model_state_dict(theirs)
    assert {name: value.shape for name, value in state.items()} == {
        name: value.shape for name, value in tensors(policy, "adapter").items()
    }


@pytest.mark.parametrize("model", ["Org/Tiny", "../models/tiny", "~/tiny"])
def test_adapter_names_the_job_files_model_as_its_base(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str
) -> None:
    """Not the folder where it was found, also if the submitted job has that one."""
    (tmp_path / "here").mkdir()
    folder = write_model(tmp_path / "models" / "tiny")
    monkeypatch.setenv("HOME", str(tmp_path / "models"))
    monkeypatch.chdir(tmp_path / "here")
    raw = {"model": model, "data": {"train": "t"}, "reward": {"function": "a:b"}, "steps": 1}
    job = parse(complete({**raw, "elastic": {"weights": "lora"}}))
    assert job.model == (model if model == "Org/Tiny" else str(Path(model).expanduser().absolute()))
    made = TorchPolicy(PolicySettings.of(job, "token_mean", None), device="cpu")
    made.load_hf(folder)
    assert json.loads(made.adapter_json)["base_model_name_or_path"] == model
    named = parse(complete({**raw, "elastic": {"weights": "lora"}, "lora": {"base_model_name_or_path": "Org/Base"}}))
    assert named.adapter is not None
    assert named.adapter.base_model_name_or_path == "Org/Base"


def test_lora_defaults_match_peft() -> None:
    ours, theirs = LoraSpec(), peft.LoraConfig()
    assert (ours.rank, ours.alpha, ours.dropout) == (theirs.r, theirs.lora_alpha, theirs.lora_dropout)


def test_new_adapter_is_the_identity_and_depends_on_the_seed(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    first, again, other = engine(folder), engine(folder), engine(folder, seed=1)
    assert bits(first) == bits(first, "base")
    assert bits(first, "adapter") == bits(again, "adapter") != bits(other, "adapter")
    assert first.adapter_json == again.adapter_json


def test_checkpoint_has_the_adapter_but_not_the_model(tmp_path: Path) -> None:
    policy = trained(write_model(tmp_path / "model"), lora=LoraSpec(rank=1, targets=("q_proj",)))
    policy.snapshot()(tmp_path)
    n_bytes = (tmp_path / "weight-0000.safetensors").stat().st_size
    assert n_bytes < (tmp_path / "model" / "model.safetensors").stat().st_size / 10


def test_adapter_dropout_is_active_in_gradients_only(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    lora = LoraSpec(dropout=0.5)
    steady, whole = trained(folder, lora=lora), trained(folder, lora=LoraSpec())
    assert bits(steady) != bits(whole)
    assert steady.logprobs([rows()]) == steady.logprobs([rows()])
    steady.snapshot()(tmp_path)
    norm = train(steady, 7)
    restored = engine(folder, lora)
    restored.load(tmp_path)
    assert train(restored, 7) == norm
    assert bits(restored) == bits(steady)


@pytest.mark.parametrize(
    ("family", "targets"),
    [
        ("qwen3-tied", ("no_such_layer",)),
        ("qwen3-tied", ("embed_tokens",)),
        ("qwen3-tied", ("lm_head",)),
        ("gpt2", ("c_attn",)),
    ],
)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_layer_without_adapter_support_is_rejected(tmp_path: Path, family: str, targets: tuple[str, ...]) -> None:
    folder = write_model(tmp_path / "model", family)
    with pytest.raises(ConfigError, match=r"lora\.targets"):
        engine(folder, LoraSpec(targets=targets))


def test_untied_head_may_have_an_adapter(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", "llama-untied")
    policy = trained(folder, lora=LoraSpec(targets=("lm_head",)))
    model: Any = AutoModelForCausalLM.from_pretrained(folder).eval()
    model.load_state_dict(tensors(policy))
    (row,) = rows(1)
    (column,) = policy.logprobs([[row]])
    assert floats(column) == pytest.approx(logprobs(model, ints(row.prompt), ints(row.completion)), abs=2e-5)


def test_missing_peft_error_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ConfigError, match=r"pip install -c constraints.txt -e '\.\[trainer\]'"):
        engine(write_model(tmp_path / "model"))
