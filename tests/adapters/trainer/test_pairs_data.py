"""Reading pairs: a prompt with a better and a worse completion as token ids, or an error that names the row."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlboost.services.trainer.adapters.data import load_data
from rlboost.services.trainer.ports.samples import Data
from rlboost.shared.errors import ConfigError
from rlboost.shared.job.spec import parse
from rlboost.shared.wire import ints
from tests.support.model_folder import CHAT_TEMPLATE, with_chat_template, write_model, write_tokenizer

USER = {"role": "user", "content": "t5 t6"}
BETTER, WORSE = ({"role": "assistant", "content": content} for content in ("t7", "t8"))
CHAT_PROMPT = [90, 5, 6, 2, 92, 91]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_tokenizer(write_model(tmp_path / "model"))


@pytest.fixture
def chat_model(model: Path) -> Path:
    return with_chat_template(model, CHAT_TEMPLATE)


def load(model: Path, *rows: object, **data: Any) -> Data:
    file = model.parent / "train.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return load_data(parse({"kind": "dpo", "model": "m", "data": {"train": str(file), **data}, "steps": 1}), model)


def pairs(data: Data) -> list[tuple[list[int], list[int], list[int]]]:
    return [(ints(row.tokens), ints(row.completion), ints(row.rejected)) for row in data.train]


def test_both_completions_end_with_one_end_token(model: Path) -> None:
    row = {"prompt": "t5", "chosen": " t7 t8", "rejected": " t9 <eos>", "score": 1.5}
    assert pairs(load(model, row)) == [([1, 5], [7, 8, 2], [9, 2])]


def test_pair_keys_are_configurable(model: Path) -> None:
    row = {"q": "t5", "a": "t7", "b": "t8"}
    keys = {"prompt_key": "q", "chosen_key": "a", "rejected_key": "b"}
    assert pairs(load(model, row, **keys)) == [([1, 5], [7, 2], [8, 2])]


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": [USER], "chosen": [BETTER], "rejected": [WORSE]},
        {"prompt": [USER], "chosen": "t7", "rejected": "t8"},
        {"chosen": [USER, BETTER], "rejected": [USER, WORSE]},
        {"prompt": "t5 t6", "chosen": [USER, BETTER], "rejected": [USER, WORSE]},
        {"prompt": None, "chosen": json.dumps([USER, BETTER]), "rejected": json.dumps([USER, WORSE])},
    ],
    ids=["messages", "text-after-messages", "implicit", "implicit-with-its-text", "json"],
)
def test_chat_pair_has_the_prompt_of_both(chat_model: Path, row: dict[str, Any]) -> None:
    assert pairs(load(chat_model, row)) == [(CHAT_PROMPT, [7, 2], [8, 2])]


def test_implicit_prompt_is_all_that_both_begin_with(chat_model: Path) -> None:
    before = [USER, BETTER, USER]
    row = {"chosen": [*before, BETTER], "rejected": [*before, WORSE]}
    assert pairs(load(chat_model, row)) == [([*CHAT_PROMPT, 7, 2, 92, *CHAT_PROMPT], [7, 2], [8, 2])]


def test_pair_with_one_too_long_completion_is_left_out_and_counted(model: Path) -> None:
    rows = [{"prompt": "t5 " * a, "chosen": "t6 " * b, "rejected": "t7 " * c} for a, b, c in ((2, 2, 2), (9, 2, 2))]
    rows += [{"prompt": "t5", "chosen": "t6 " * b, "rejected": "t7 " * c} for b, c in ((9, 2), (2, 9))]
    data = load(model, *rows, max_prompt_tokens=4, max_completion_tokens=4)
    assert (len(data.train), data.n_too_long) == (1, 3)


@pytest.mark.parametrize(
    ("row", "text"),
    [
        ({"prompt": "t5", "rejected": "t7"}, r"line 2: no key 'chosen' \(keys: .*\): .*set data\.chosen_key"),
        ({"prompt": "t5", "chosen": "t7"}, r"line 2: no key 'rejected' \(keys: .*\): .*set data\.rejected_key"),
        ({"chosen": "t5 t7", "rejected": "t5 t8"}, r"line 2: no key 'prompt' .* give it a column .*data\.prompt_key"),
        ({"prompt": "t5", "chosen": "t7", "rejected": "t7"}, "'chosen' and 'rejected' are equal, .* leave out the row"),
        ({"prompt": "t5", "chosen": "t7", "rejected": "t7 "}, "line 2: both completions have the same tokens"),
        ({"prompt": "t5", "chosen": "t7", "rejected": " "}, "line 2: 'rejected' is empty: give it text"),
        ({"prompt": "t5", "chosen": "", "rejected": "t7"}, "line 2: 'chosen' is empty: give it text"),
        ({"prompt": "", "chosen": "t7", "rejected": "t8"}, "line 2: 'prompt' is empty"),
        ({"prompt": "t5", "chosen": "t7", "rejected": [WORSE]}, "'rejected' has chat messages, and 'chosen' has none"),
        (
            {"prompt": [USER], "chosen": [BETTER], "rejected": "t8"},
            "'chosen' has chat messages, and 'rejected' has non",
        ),
        ({"prompt": "t5", "chosen": 7, "rejected": "t8"}, "line 2: 'chosen' is not text, but 'prompt' is"),
        ({"prompt": "t5", "chosen": [BETTER], "rejected": [WORSE]}, "'chosen' and 'rejected' begin with different mes"),
        (
            {"prompt": "t9", "chosen": [USER, BETTER], "rejected": [USER, WORSE]},
            "line 2: 'prompt' is none of the messages that 'chosen' and 'rejected' begin with",
        ),
        (
            {"chosen": [USER, BETTER], "rejected": [USER, BETTER, USER, WORSE]},
            "line 2: 'chosen' is the beginning of 'rejected': give it an answer of its own",
        ),
        (
            {"prompt": [USER], "chosen": [BETTER, WORSE], "rejected": [WORSE]},
            "line 2: 'chosen' has 2 messages of the assistant, .*: join them",
        ),
        (
            {"prompt": [USER], "chosen": [USER, BETTER], "rejected": [WORSE]},
            "line 2: 'chosen' is neither text nor a list of chat messages of the assistant",
        ),
        (
            {"prompt": [USER], "chosen": [BETTER], "rejected": [{**WORSE, "content": " "}]},
            r"line 2: 'rejected': message 2 \(assistant\) is empty",
        ),
        (
            {"prompt": "t5", "chosen": "t7", "rejected": "t8 " * 160},
            r"line 2: 2 prompt and 161 completion tokens do not fit .* data\.max_completion_tokens to leave such",
        ),
    ],
)
def test_invalid_pair_error_names_the_line(chat_model: Path, row: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=rf"train\.jsonl, .*{text}"):
        load(chat_model, {"prompt": "t5", "chosen": "t7", "rejected": "t8"}, row)
