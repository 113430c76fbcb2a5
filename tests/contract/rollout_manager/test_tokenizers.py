"""Tokenizers of the OpenAI endpoint: one contract for the fake and for a model folder's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlboost.services.rollout_manager.adapters.text import load_model_files
from rlboost.services.rollout_manager.ports import TokenizationError, Tokenizer
from tests.support.manager_fakes import FakeTokenizer
from tests.support.model_folder import write_tokenizer

BOS, EOS = 1, 2
LONGER = {"type": "Replace", "pattern": {"String": "t3"}, "content": "t3" * 10}


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


@pytest.mark.parametrize(
    ("part", "says"),
    [
        ({"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}}, "cannot be read: Precompiled"),
        ({"decoder": {"type": "Sequence", "decoders": [LONGER, {"type": "Fuse"}, LONGER]}}, "100 times as long"),
    ],
)
def test_tokenizer_that_could_stop_the_manager_is_refused(tmp_path: Path, part: dict[str, Any], says: str) -> None:
    file = write_tokenizer(tmp_path) / "tokenizer.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | part))
    with pytest.raises(TokenizationError, match=says):
        load_model_files(str(tmp_path))


def test_fault_of_a_decoder_is_an_error_of_its_request(tmp_path: Path) -> None:
    file = write_tokenizer(tmp_path, texts={3: "tttt"}) / "tokenizer.json"
    strip = {"type": "Strip", "content": "t", "start": 100_000, "stop": 100_000}
    file.write_text(json.dumps(json.loads(file.read_text()) | {"decoder": strip}))
    tokenizer = load_model_files(str(tmp_path)).tokenizer
    assert tokenizer is not None
    with pytest.raises(TokenizationError, match="cannot decode these tokens: index out of bounds"):
        tokenizer.decode([3], skip_special_tokens=True)
