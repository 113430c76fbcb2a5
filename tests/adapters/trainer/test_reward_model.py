"""`reward: {model: ...}`: a reward process scores a group as transformers does, and names what it cannot score."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from rlboost.services.trainer.adapters.reward_pool import RewardModelSource, RewardPool
from rlboost.services.trainer.adapters.torch.reward_model import RewardModel
from rlboost.services.trainer.ports.samples import RewardBatch
from rlboost.shared.errors import ConfigError
from rlboost.shared.job.reward import RewardSpec
from rlboost.shared.model.folder import digest_of_weights, require_reward_model
from rlboost.shared.process.waiting import Waits
from tests.support.model_folder import TURNS, with_chat_template, write_model, write_tokenizer

TEXTS = ["t7 t8 t9", "t10", "t11 t12 t13 t14", "t7"]
Start = Callable[..., Awaitable[RewardPool]]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    base = write_tokenizer(write_model(tmp_path / "base"))
    torch.manual_seed(3)
    found: Any = AutoModelForSequenceClassification.from_pretrained(base, num_labels=1, pad_token_id=0)
    found.score.weight.data.normal_()
    found.save_pretrained(tmp_path / "scores")
    return with_chat_template(write_tokenizer(tmp_path / "scores"), TURNS)


def settings(model: Path, **changes: Any) -> dict[str, Any]:
    given = {"folder": str(model), "device": "cpu", "dtype": "float32", "micro_batch_tokens": 16, "has_chats": True}
    return {**given, "created": datetime.now(UTC).isoformat(), "chat_template_kwargs": {}, **changes}


def group(prompt: Any, texts: list[str]) -> RewardBatch:
    is_text = isinstance(prompt, str)
    completions: list[Any] = [text if is_text else [{"role": "assistant", "content": text}] for text in texts]
    return RewardBatch([prompt] * len(texts), completions, [[1]] * len(texts), {}, texts, texts)


def expected(model: Path, rendered: list[str]) -> list[float]:
    loaded: Any = AutoModelForSequenceClassification.from_pretrained(model).eval()
    tokenizer = AutoTokenizer.from_pretrained(model)
    with torch.no_grad():
        ids = [tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"] for text in rendered]
        return [loaded(input_ids=one).logits.item() for one in ids]


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    async with AsyncExitStack() as stack:

        async def make(spec: dict[str, Any], model: Path, **changes: Any) -> RewardPool:
            sources = {"rm": RewardModelSource(settings(model, **changes), digest_of_weights(model))}
            pool = RewardPool(RewardSpec(timeout_s=60.0, **spec), Waits(), models=sources)
            stack.push_async_callback(pool.close)
            await pool.start()
            return pool

        yield make


async def test_scores_are_those_of_transformers_next_to_a_function(model: Path, start: Start) -> None:
    function = {"function": "tests.support.reward_functions:lengths", "weight": 0.0}
    pool = await start({"functions": [{"model": "rm", "weight": 2.0}, function]}, model)
    found = await pool.score(group("t5 t6 ", TEXTS))
    assert found.rewards is not None
    theirs = expected(model, [f"<bos> t5 t6 {text} <eos>" for text in TEXTS])
    assert found.parts["model"] == pytest.approx(theirs, abs=1e-5)
    assert found.rewards == pytest.approx([2 * score for score in theirs], abs=1e-5)
    assert found.parts["lengths"] == (0.25,) * 4
    assert found.models == {"rm": digest_of_weights(model)}
    assert (await pool.score(group("t5 t6 ", TEXTS))).rewards == found.rewards, "the same bits"
    chats = await pool.score(group([{"role": "user", "content": "t5 t6"}], TEXTS))
    theirs = expected(model, [f"t90 t5 t6 <eos> t92 t91 {text} <eos> t92" for text in TEXTS])
    assert chats.parts["model"] == pytest.approx(theirs, abs=1e-5)


async def test_a_conversation_that_is_too_long_is_dropped_by_name(model: Path, start: Start) -> None:
    pool = await start({"model": "rm"}, model)
    found = await pool.score(group("t5 ", ["t6 " * 200]))
    assert (found.rewards, found.reason) == (None, "raised")
    assert "has 203 tokens of the reward model, which has 160 positions: lower sampling.max_tokens" in found.detail
    assert (await pool.score(group("t5 ", TEXTS))).rewards is not None


async def test_a_reward_model_without_a_chat_template_fails_the_start(model: Path, start: Start) -> None:
    write_tokenizer(model)
    with pytest.raises(
        ConfigError, match=r"reward.model: rm: prompts are chat messages, and its tokenizer has no chat"
    ):
        await start({"model": "rm"}, model)
    assert (await (await start({"model": "rm"}, model, has_chats=False)).score(group("t5 ", TEXTS))).rewards


def test_the_beginning_of_an_answer_in_the_prompt_is_scored_with_the_answer(model: Path) -> None:
    loaded = RewardModel(**settings(model))
    user, answer = {"role": "user", "content": "t5"}, {"role": "assistant", "content": "t7 "}
    begun = group([user, answer], ["t8"])
    whole = group([user], ["t7 t8"])
    scores = [loaded.score({"prompts": g.prompts, "completions": g.completions, "columns": {}}) for g in (begun, whole)]
    assert scores[0] == scores[1]


def test_a_folder_that_cannot_score_is_refused_by_name(model: Path, tmp_path: Path) -> None:
    require_reward_model(model)
    before = digest_of_weights(model)
    with pytest.raises(ConfigError, match=r"reward.model: model .*/base is no reward model: config.json has Qwen3For"):
        require_reward_model(tmp_path / "base")
    (model / "tokenizer.json").rename(tmp_path / "tokenizer.json")
    with pytest.raises(ConfigError, match=r"reward.model: model .*/scores has no tokenizer"):
        require_reward_model(model)
    (tmp_path / "tokenizer.json").rename(model / "tokenizer.json")
    loaded: Any = AutoModelForSequenceClassification.from_pretrained(model)
    loaded.score.weight.data[0, 0] += 1.0
    loaded.save_pretrained(model)
    assert digest_of_weights(model) != before
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "fp8"}}))
    with pytest.raises(ConfigError, match=r"reward.model: config.json: the model's weights are quantized \(fp8\)"):
        require_reward_model(model)
