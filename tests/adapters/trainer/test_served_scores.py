"""A reward model that workers serve as a causal language model has the scores of transformers' reward model."""

from __future__ import annotations

import copy
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    Gemma2Config,
)

from rlboost.services.trainer.adapters.served_scores import SCALE, TOKEN, ServedScores
from rlboost.shared.errors import ConfigError
from rlboost.shared.model.file_names import by_file_name, names_in_files
from rlboost.shared.wire import F32, ints, pack
from tests.support import tiny_models
from tests.support.model_folder import TURNS, with_chat_template, write_tokenizer
from tests.support.packed_models import SIZES

NOW = datetime.now(UTC)
PAIRS = [("t5 t6 ", "t7 t8 t9"), ("t5 ", "t10"), ("t6 t7 ", "t11 t12 t13 t14")]


CONFIGS = {
    **{name: tiny_models.CONFIGS[name] for name in ("qwen3-tied", "llama-untied", "qwen3-moe", "gpt2")},
    "gemma2": Gemma2Config(**SIZES, head_dim=8, final_logit_softcapping=2.0),
}
"""The last one caps the logits of the language model."""


def write_scores(
    folder: Path, family: str = "qwen3-tied", spread: float = 1.0, dtype: torch.dtype = torch.float32
) -> Path:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        config = copy.deepcopy(CONFIGS[family])
        config.num_labels, config.pad_token_id = 1, 0
        found: Any = AutoModelForSequenceClassification.from_config(config)
        found.score.weight.data.normal_(std=spread)
    found.to(dtype).save_pretrained(folder)
    return with_chat_template(write_tokenizer(folder), TURNS)


def served(folder: Path, **changes: Any) -> ServedScores:
    return ServedScores(folder, NOW, {}, **{"has_chats": True, **changes})


def language_model(scores: ServedScores, dtype: torch.dtype) -> Any:
    """Return what an engine loads."""
    config = json.loads(scores.config_json)
    model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(config.pop("model_type"), **config), dtype=dtype)
    found = {
        shard.name: torch.frombuffer(bytearray(shard.data), dtype=getattr(torch, shard.dtype)).view(shard.global_shape)
        for shard in scores.shards()
    }
    names = names_in_files(model, found)
    tensors = by_file_name(model.state_dict(), names)
    assert tensors.keys() == found.keys()
    for name, tensor in tensors.items():
        tensor.copy_(found[name])
    return model.eval()


def of_transformers(folder: Path, ids: list[int]) -> float:
    model: Any = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    with torch.no_grad():
        return float(model(input_ids=torch.tensor([ids])).logits.item())


@pytest.mark.parametrize("spread", [1.0, 10.0])
@pytest.mark.parametrize("family", CONFIGS)
def test_scores_are_those_of_transformers(family: str, spread: float, tmp_path: Path) -> None:
    folder = write_scores(tmp_path, family, spread)
    scores = served(folder)
    model, seen = language_model(scores, torch.float32), list[float]()
    for prompt, completion in PAIRS:
        ids = ints(scores.conversation(prompt, completion, {}))
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([ids])).logits[0, -1]
        logprob = torch.log_softmax(logits.float(), -1)[TOKEN].item()
        seen.append(of_transformers(folder, ids))
        assert scores.score(pack([logprob], F32)) == pytest.approx(seen[-1], abs=1e-4)
    assert max(map(abs, seen)) > 2 * spread  # in reach of a cap, and of rounding
    assert (scores.vocab_size, ints(scores.forced)) == (len(logits), [TOKEN])


def test_head_is_not_rounded(tmp_path: Path) -> None:
    folder = write_scores(tmp_path, dtype=torch.bfloat16)
    head = load_file(folder / "model.safetensors")["score.weight"]
    model = language_model(served(folder), torch.bfloat16)
    assert torch.equal(model.lm_head.weight[TOKEN] * SCALE, head[0])


@pytest.mark.parametrize(
    ("logprob", "score"), [(-11.5, 0.0), (-1e-5, None), (-0.0, None), (float("nan"), None), (-200.0, None)]
)
def test_log_probabilities_that_tell_no_score(logprob: float, score: float | None, tmp_path: Path) -> None:
    scores = served(write_scores(tmp_path))
    found = scores.score(pack([logprob], F32))
    assert found is None if score is None else found is not None


def test_conversations_are_those_of_its_own_chat_template(tmp_path: Path) -> None:
    folder = write_scores(tmp_path)
    scores = served(folder)
    chat = [{"role": "user", "content": "t5"}], [{"role": "assistant", "content": "t7"}]
    assert ints(scores.conversation(*chat, {}))[1] == 5
    with pytest.raises(ConfigError, match=r"has 160 tokens of the reward model, which has 160 positions"):
        scores.conversation("t5 ", "t6 " * 157, {})
    assert scores.conversation("t5 ", "t6 " * 156, {})
    write_tokenizer(folder)
    with pytest.raises(ConfigError, match="prompts are chat messages, and its tokenizer has no chat template"):
        served(folder)
    assert served(folder, has_chats=False)


def test_model_with_other_tensors_is_refused_by_name(tmp_path: Path) -> None:
    folder = write_scores(tmp_path)
    weights = load_file(folder / "model.safetensors")
    save_file({**weights, "model.extra": torch.zeros(2)}, folder / "model.safetensors")
    with pytest.raises(ConfigError, match=r"as Qwen3ForCausalLM, which differs in model.extra: name its folder in"):
        served(folder)
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "model_type": "bert"}))
    with pytest.raises(ConfigError, match=r"name its folder in reward.model, so that the trainer's reward processes"):
        served(folder)
