"""A teacher: another model, whose log-probabilities of the generated tokens the engine computes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from rlboost.services.trainer.adapters.data import check_teacher
from rlboost.services.trainer.adapters.torch.policy import RanksPolicy, TorchPolicy
from rlboost.services.trainer.domain.loss.policy import PolicyLoss
from rlboost.services.trainer.ports.engine import PolicySettings
from rlboost.services.trainer.ports.samples import Data, Prompt
from rlboost.shared.errors import ConfigError
from rlboost.shared.job.spec import parse
from rlboost.shared.job.training import LoraSpec, OptimizerSpec
from rlboost.shared.model.folder import require_teachable
from rlboost.shared.wire import I32, floats, ints, pack
from tests.support import rank_policies
from tests.support.decoding import decode_as_numbers
from tests.support.model_folder import write_character_tokenizer
from tests.support.tiny_models import logprobs
from tests.support.training_rows import rows, with_loss_mask

pytestmark = pytest.mark.timeout(300)

RATE = 1e-2
OPTIMIZER = OptimizerSpec(lr=RATE)
TEMPERATURE = 0.9
BATCHES = [with_loss_mask(rows(6, seed=1)), rows(3, seed=2)]
LAYOUTS: dict[str, dict[str, Any]] = {
    "one process": {},
    "one process, adapter": {"lora": LoraSpec(rank=3)},
    "fsdp2": {"backend": "torch", "data_parallel": 2},
    "fsdp2, adapter": {"backend": "torch", "data_parallel": 2, "lora": LoraSpec(rank=3)},
    "context parallel": {"backend": "torch", "context_parallel": 2},
    "tensor and pipeline parallel": {"backend": "megatron", "tensor_parallel": 2, "pipeline_parallel": 2},
}


def write_teacher(directory: Path, **changes: Any) -> Path:
    """Write a wider and shallower model than the student, with more logits."""
    config = Qwen3Config(
        **{
            "vocab_size": 100,
            "hidden_size": 48,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "max_position_embeddings": 160,
            "tie_word_embeddings": False,
            **changes,
        }
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model: Any = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(directory)
    return directory


@contextmanager
def student(folder: Path, **settings: Any) -> Iterator[RanksPolicy]:
    """Yield the policy of a student in a layout, with the teacher in `folder`."""
    settings = {"reference": True, "teacher": str(folder / "teacher"), "temperature": TEMPERATURE, **settings}
    if "backend" in settings:
        with rank_policies.policy(OPTIMIZER, **settings) as made:
            yield made
        return
    one = TorchPolicy(PolicySettings(optimizer=OPTIMIZER, **settings), device="cpu")
    yield one
    one.close()


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_teacher_scores_what_the_student_generated(layout: dict[str, Any], tmp_path: Path) -> None:
    write_teacher(tmp_path / "teacher")
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "teacher", attn_implementation="eager")
    with student(tmp_path, **layout) as policy:
        policy.load_hf(rank_policies.write(tmp_path / "model", "qwen3"))
        before = policy.reference_logprobs(BATCHES)
        policy.accumulate(BATCHES, PolicyLoss())
        assert policy.step(RATE) > 0
        assert policy.reference_logprobs(BATCHES) == before, "the teacher does not learn"
    for row, column in zip([row for batch in BATCHES for row in batch], before, strict=True):
        expected = np.array(logprobs(model, ints(row.prompt), ints(row.completion), TEMPERATURE))
        mask = np.frombuffer(row.loss_mask, np.uint8).astype(bool) if row.loss_mask else slice(None)
        np.testing.assert_allclose(floats(column), expected[mask], atol=1e-4)


@pytest.mark.parametrize("name", ["one process", "fsdp2", "tensor and pipeline parallel"])
def test_scores_of_a_teacher_on_workers_count_like_the_trainers_own(name: str, tmp_path: Path) -> None:
    write_teacher(tmp_path / "teacher")
    layout, model, loss = LAYOUTS[name], rank_policies.write(tmp_path / "model", "qwen3"), PolicyLoss()
    with student(tmp_path, **layout) as policy:
        policy.load_hf(model)
        columns = iter(policy.reference_logprobs(BATCHES))
        held = policy.accumulate(BATCHES, loss)
    taught = [[replace(row, reference=next(columns)) for row in batch] for batch in BATCHES]
    with student(tmp_path, **{**layout, "reference": False, "teacher": ""}) as policy:
        policy.load_hf(model)
        served = policy.accumulate(taught, loss)
    assert served == pytest.approx(held, rel=1e-5)
    assert served["reference_kl"] > 0


@pytest.mark.parametrize("layout", [LAYOUTS["one process"], LAYOUTS["fsdp2"]], ids=["one process", "fsdp2"])
def test_unusable_teacher_is_named(layout: dict[str, Any], tmp_path: Path) -> None:
    teacher = write_teacher(tmp_path / "teacher")
    (teacher / "model.safetensors").write_bytes(b"damaged")
    with (
        student(tmp_path, **layout) as policy,
        pytest.raises(ConfigError, match=r"algorithm\.teacher\.model: model .*teacher"),
    ):
        policy.load_hf(rank_policies.write(tmp_path / "model", "qwen3"))


def test_teacher_has_the_tokens_of_the_student(tmp_path: Path) -> None:
    model, teacher = rank_policies.write(tmp_path / "model", "qwen3"), write_teacher(tmp_path / "teacher")
    for folder in (model, teacher):
        write_character_tokenizer(folder)
    require_teachable(model, teacher)
    file = teacher / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    added = tokenizer["added_tokens"]
    tokenizer["added_tokens"] = [*added, {**added[0], "id": 99, "content": "<think>"}]
    file.write_text(json.dumps(tokenizer))
    require_teachable(model, teacher)
    tokenizer["model"]["vocab"].pop(token := min(tokenizer["model"]["vocab"], key=tokenizer["model"]["vocab"].get))
    tokenizer["added_tokens"] = [one for one in added if one["content"] != token]
    file.write_text(json.dumps(tokenizer))
    with pytest.raises(ConfigError, match=r"algorithm\.teacher\.model: .*is none there: use a teacher of the same"):
        require_teachable(model, teacher)
    file.unlink()
    with pytest.raises(ConfigError, match=r"tokenizer\.json cannot be read"):
        require_teachable(model, teacher)


def test_teacher_has_a_logit_for_each_of_the_students(tmp_path: Path) -> None:
    model = rank_policies.write(tmp_path / "model", "qwen3")
    teacher = write_teacher(tmp_path / "teacher", vocab_size=95)
    for folder in (model, teacher):
        write_character_tokenizer(folder)
    with pytest.raises(ConfigError, match="has 95 logits, fewer than the 96"):
        require_teachable(model, teacher)


def test_teacher_has_the_positions_of_the_longest_sample(tmp_path: Path) -> None:
    teacher = write_teacher(tmp_path / "teacher")
    raw: dict[str, Any] = {"model": "m", "data": {"train": "t"}, "steps": 1, "models": {"big": {"model": str(teacher)}}}
    job = parse({**raw, "algorithm": {"name": "distill", "teacher": {"model": "big"}}, "sampling": {"max_tokens": 150}})
    prompts = [Prompt(f"p{n}", pack([1] * n, I32), {}) for n in (3, 10)]
    data = Data(prompts, [], (2,), decode_as_numbers, [], 0)
    check_teacher(job, data, teacher)
    prompts.append(Prompt("p11", pack([1] * 11, I32), {}))
    with pytest.raises(ConfigError, match="160 positions, fewer than the 11 tokens of the longest prompt"):
        check_teacher(job, data, teacher)
