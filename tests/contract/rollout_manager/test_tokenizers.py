"""Tokenizers of the OpenAI endpoint: one contract for the fake and for a model folder's."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlboost.services.rollout_manager.adapters.text import load_model_files
from rlboost.services.rollout_manager.ports import Tokenizer
from tests.support.manager_fakes import FakeTokenizer
from tests.support.model_folder import write_tokenizer

BOS, EOS = 1, 2


@pytest.fixture(params=["fake", "folder"])
def tokenizer(request: pytest.FixtureRequest, tmp_path: Path) -> Tokenizer:
    if request.param == "fake":
        return FakeTokenizer()
    tokenizer = load_model_files(str(write_tokenizer(tmp_path))).tokenizer
    assert tokenizer is not None
    return tokenizer


def test_special_tokens_begin_a_text_where_they_are_asked_for(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode("t3 t4", add_special_tokens=False)
    assert BOS not in tokens
    assert tokenizer.encode("t3 t4", add_special_tokens=True) == [BOS, *tokens]


def test_special_tokens_are_no_text_where_they_are_skipped(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode("t3 t4", add_special_tokens=False)
    text = tokenizer.decode(tokens, skip_special_tokens=True)
    assert text
    assert tokenizer.decode([BOS, *tokens, EOS], skip_special_tokens=True) == text
    assert tokenizer.decode(tokens, skip_special_tokens=False) == text
    assert tokenizer.decode([BOS, *tokens, EOS], skip_special_tokens=False) != text
