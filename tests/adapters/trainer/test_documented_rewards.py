"""The reward functions that the documentation shows, run on completions as a tokenizer decodes them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from rlboost.services.trainer.adapters.data import load_data
from rlboost.services.trainer.adapters.reward_pool import RewardPool
from rlboost.services.trainer.domain.groups import WholeGroup
from rlboost.services.trainer.step.texts import reward_batch, sample_summaries
from rlboost.shared.ids import SampleId
from rlboost.shared.job.reward import RewardSpec
from rlboost.shared.job.spec import parse
from rlboost.shared.messages import SampleFinished
from rlboost.shared.process.waiting import Waits
from rlboost.shared.wire import I32, pack
from tests.support.black_box import ROOT
from tests.support.model_folder import write_model, write_tokenizer

EOS_ID = 2
PAGES = ("README.md", "docs/quickstart.md")


def snippet(page: str) -> str:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL)
    return next((block for block in blocks if "def score(" in block), "")


def group_of(*completions: list[int]) -> WholeGroup:
    samples = tuple(
        SampleFinished(
            sample=SampleId(job=1, is_eval=False, step=0, group=0, member=member).pack(),
            tokens=pack(tokens, I32),
            logprobs=b"",
            finish="stop",
            spans=[],
            attempts=1,
            group_done=False,
        )
        for member, tokens in enumerate(completions)
    )
    return WholeGroup(samples[0].sample, samples)


@pytest.mark.parametrize("page", PAGES)
async def test_documented_reward_pays_a_right_answer_that_ends_in_eos(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = snippet(page)
    if not code:
        pytest.skip(f"{page} shows no reward function")
    (tmp_path / "documented_reward.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    model = write_tokenizer(write_model(tmp_path / "model"))
    (tmp_path / "train.jsonl").write_text(json.dumps({"prompt": "t3 t4", "answer": "t7"}) + "\n")
    reward = {"function": "documented_reward:score", "timeout_s": 60}
    job = {"model": str(model), "data": {"train": str(tmp_path / "train.jsonl")}, "reward": reward, "steps": 1}
    job |= {"sampling": {"max_tokens": 8}}
    data = load_data(parse(job), model)
    group = group_of([7, EOS_ID], [8, EOS_ID])
    pool = RewardPool(RewardSpec.model_validate(reward), Waits())
    try:
        await pool.start()
        scores = await pool.score(reward_batch(group, data.train[0], data))
    finally:
        await pool.close()
    assert scores.rewards == (1.0, 0.0), scores.detail
    summary = sample_summaries(group, data.train[0].tokens, scores, data)[0]
    assert (summary["prompt"], summary["completion"]) == ("t3 t4", "t7")


def test_at_least_one_page_shows_a_reward_function() -> None:
    assert any(map(snippet, PAGES))
