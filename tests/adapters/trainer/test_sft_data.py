"""Reading examples to imitate: prompts and completions as token ids, or an error that names the row."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, AutoTokenizer

from rlboost.environments import ToolEnvironment
from rlboost.services.trainer.adapters.data import load_data
from rlboost.services.trainer.adapters.environment_pool import TokenizerChatFormatter
from rlboost.services.trainer.adapters.tokens import PromptTokenizer
from rlboost.services.trainer.ports.samples import Data
from rlboost.shared.errors import ConfigError
from rlboost.shared.job.spec import parse
from rlboost.shared.wire import ints
from tests.support.model_folder import CHAT_TEMPLATE, TURNS, with_chat_template, write_model, write_tokenizer

USER = {"role": "user", "content": "t5 t6"}
ANSWER = {"role": "assistant", "content": "t7"}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_tokenizer(write_model(tmp_path / "model"))


@pytest.fixture
def chat_model(model: Path) -> Path:
    return with_chat_template(model, CHAT_TEMPLATE)


def load(model: Path, *rows: object, **data: Any) -> Data:
    file = model.parent / "train.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return load_data(parse({"kind": "sft", "model": "m", "data": {"train": str(file), **data}, "steps": 1}), model)


def pairs(data: Data) -> list[tuple[list[int], list[int]]]:
    return [(ints(row.tokens), ints(row.completion)) for row in data.train]


def test_completion_ends_with_one_end_token(model: Path) -> None:
    rows = [{"prompt": "t5", "completion": "t7 t8", "more": 1}, {"prompt": "t5", "completion": "t7 <eos>"}]
    assert pairs(load(model, *rows)) == [([1, 5], [7, 8, 2]), ([1, 5], [7, 2])]


def test_every_turn_of_the_assistant_is_an_example_on_request(chat_model: Path) -> None:
    messages = [USER, ANSWER, USER, {"role": "assistant", "content": "t8"}]
    assert pairs(load(chat_model, {"messages": messages}, assistant_only_loss=True)) == [
        ([90, 5, 6, 2, 92, 91], [7, 2]),
        ([90, 5, 6, 2, 92, 91, 7, 2, 92, 90, 5, 6, 2, 92, 91], [8, 2]),
    ]
    limited = load(chat_model, {"messages": messages}, assistant_only_loss=True, max_prompt_tokens=6)
    assert (len(limited.train), limited.n_too_long) == (1, 1)


def test_sft_keys_are_configurable(model: Path) -> None:
    row = {"q": "t5", "a": "t7"}
    assert pairs(load(model, row, prompt_key="q", completion_key="a")) == [([1, 5], [7, 2])]


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": [USER], "completion": [ANSWER]},
        {"prompt": [USER], "completion": "t7"},
        {"messages": [USER, ANSWER]},
        {"prompt": [USER, ANSWER]},
        {"messages": [{**USER, "name": None}, {**ANSWER, "tool_calls": None}]},
    ],
)
def test_chat_target_ends_at_the_end_token(chat_model: Path, row: dict[str, Any]) -> None:
    [(prompt, completion)] = pairs(load(chat_model, row))
    assert prompt[-6:] == [90, 5, 6, 2, 92, 91]
    assert completion == [7, 2]


TOOLS_TEMPLATE = (
    "{% if tools %}t80 {% for tool in tools %}{{ tool | tojson }} t{{ 70 + (tool | tojson | length) % 9 }} "
    "{% endfor %}{% endif %}" + CHAT_TEMPLATE
)


def add(a: int, b: int | None = None) -> int:
    """Add two numbers."""
    return a + (b or 0)


def test_prompt_that_is_text_may_be_a_conversation_rendered_by_hand(model: Path) -> None:
    row = {"prompt": "<bos> t5 t7 <eos> <bos> t6", "completion": "t8 <eos>"}
    assert pairs(load(model, row)) == [([1, 5, 7, 2, 1, 6], [8, 2])]


@pytest.mark.parametrize("as_text", [False, True])
def test_tools_column_gives_the_prompts_of_a_tool_environment(model: Path, as_text: bool) -> None:
    with_chat_template(model, TOOLS_TEMPLATE)
    tools = ToolEnvironment([add]).tools
    row = {"prompt": [USER], "completion": [ANSWER], "tools": json.dumps(tools) if as_text else tools}
    [(prompt, completion)] = pairs(load(model, row))
    tokenizer = AutoTokenizer.from_pretrained(model)
    formatter = TokenizerChatFormatter(PromptTokenizer(tokenizer, AutoConfig.from_pretrained(model), [2]))
    assert prompt == formatter.format_prompt([USER], ToolEnvironment([add]).tools)
    assert 80 in prompt
    assert completion == [7, 2]


def test_tools_null_or_empty_are_no_tools(model: Path) -> None:
    with_chat_template(model, TOOLS_TEMPLATE)
    nothing: tuple[object, ...] = (None, [], "")
    rows = [{"messages": [USER, ANSWER], "tools": tools} for tools in nothing]
    assert {tuple(prompt[-6:]) for prompt, _ in pairs(load(model, *rows))} == {(90, 5, 6, 2, 92, 91)}
    assert pairs(load(model, {"prompt": "t5", "completion": "t7", "tools": None})) == [([1, 5], [7, 2])]


def test_conversation_is_the_prompt_of_its_last_turns(chat_model: Path) -> None:
    before = [90, 5, 6, 2, 92, 91, 7, 2, 92, 90, 5, 6, 2, 92, 91]
    messages = [USER, ANSWER, USER, ANSWER, {"role": "assistant", "content": "t8"}]
    assert pairs(load(chat_model, {"messages": messages})) == [(before, [7, 2]), ([*before, 7, 2, 92, 91], [8, 2])]


@pytest.mark.parametrize("key", ["messages", "prompt"])
def test_two_turns_in_a_row_are_two_examples(chat_model: Path, key: str) -> None:
    """What the template writes between them is never generated, so it is not trained."""
    messages = [USER, ANSWER, {"role": "assistant", "content": "t8"}]
    row = {"messages": messages} if key == "messages" else {"prompt": messages[:1], "completion": messages[1:]}
    first = [90, 5, 6, 2, 92, 91]
    expected = [(first, [7, 2]), ([*first, 7, 2, 92, 91], [8, 2])]
    assert pairs(load(chat_model, row)) == pairs(load(chat_model, row, assistant_only_loss=True)) == expected


@pytest.mark.parametrize("key", ["weight", "train", "loss"])
def test_turn_that_is_not_to_be_trained_is_none_with_assistant_only_loss(chat_model: Path, key: str) -> None:
    messages = [{**USER, key: 0}, {**ANSWER, key: False}, USER, {"role": "assistant", "content": "t8", key: True}]
    before = [90, 5, 6, 2, 92, 91, 7, 2, 92, 90, 5, 6, 2, 92, 91]
    for only in (True, False):
        assert pairs(load(chat_model, {"messages": messages}, assistant_only_loss=only)) == [(before, [8, 2])]


@pytest.mark.parametrize("name", ["input", "history"])
def test_what_an_instruction_is_about_is_not_left_out(model: Path, name: str) -> None:
    """Alpaca's rows; an empty `input`, as many have, is none."""
    row: dict[str, Any] = {"instruction": "t5", "completion": "t7", "input": "", "history": []}
    for empty in (row[name], None, math.nan):
        assert pairs(load(model, {**row, name: empty}, prompt_key="instruction")) == [([1, 5], [7, 2])]
    with pytest.raises(ConfigError, match=f"line 1: the column '{name}' .* is not shown to the model: put it into"):
        load(model, {**row, name: "t6" if name == "input" else [["t6", "t7"]]}, prompt_key="instruction")
    assert len(load(model, {"prompt": "t5", "completion": "t7", name: "t6"}).train) == 1


def test_system_prompt_that_the_model_sees_may_be_a_column_too(chat_model: Path) -> None:
    messages = [{"role": "system", "content": "t8"}, USER, ANSWER]
    assert len(load(chat_model, {"messages": messages, "system": "t8"}).train) == 1
    assert len(load(chat_model, {"messages": [USER, ANSWER], "system": " ", "system_prompt": None}).train) == 1
    for content in ("t8 t5 t6", [{"type": "text", "text": "t8"}, {"type": "text", "text": " t5"}]):
        asked = {"role": "user", "content": content}  # as for templates without a role for it
        assert len(load(chat_model, {"messages": [asked, ANSWER], "system": "t8"}).train) == 1
    with pytest.raises(ConfigError, match=r"the column 'system' \('t8'\) is not shown"):
        load(chat_model, {"messages": [USER, ANSWER], "system": "t8"})


def test_too_long_rows_are_dropped_and_counted(model: Path) -> None:
    rows = [{"prompt": "t5 " * n, "completion": "t6 " * m} for n, m in ((2, 2), (9, 2), (2, 9))]
    data = load(model, *rows, max_prompt_tokens=4, max_completion_tokens=4)
    assert (len(data.train), data.n_too_long) == (1, 2)
    with pytest.raises(ConfigError, match=r"all 1 prompts have more than 4 tokens \(data\.max_completion_tokens\)"):
        load(model, rows[2], max_completion_tokens=4)


@pytest.mark.parametrize(
    ("row", "text"),
    [
        ({"prompt": "t5"}, r"line 1: no key 'completion', nor .* \(keys: prompt\): .*data\.completion_key"),
        ({"completion": "t5"}, r"line 1: no key 'prompt' \(keys: completion\): .*data\.prompt_key"),
        ({"messages": [USER]}, r"line 1: no key 'completion', nor chat messages that end with the assistant's"),
        ({"messages": [ANSWER]}, "line 1: all messages are the assistant's"),
        ({"messages": [{"from": "human", "value": "t5"}, {"from": "gpt", "value": "t7"}]}, "line 1: .*as ShareGPT's"),
        ({"prompt": "t5", "completion": "t7", "system": "t8"}, r"line 1: the column 'system' \('t8'\) is not shown"),
        ({"messages": [USER, ANSWER], "system_prompt": "t8"}, "line 1: the column 'system_prompt' .* is not shown"),
        ({"prompt": "t5", "completion": 7}, "line 1: 'completion' is not text, but 'prompt' is"),
        ({"prompt": "t5", "completion": json.dumps([ANSWER])}, "line 1: 'completion' is not text, but 'prompt' is"),
        ({"prompt": 5, "completion": "t7"}, "line 1: 'prompt' is neither text nor"),
        ({"prompt": [USER], "completion": [USER]}, "line 1: 'completion' is neither text nor a list of chat messages"),
        ({"prompt": [USER], "completion": "t7"}, "line 1: chat messages need a chat template"),
        ({"prompt": "t5", "completion": "t7", "tools": [{}]}, "line 1: 'tools' needs a chat template"),
        ({"messages": [USER, ANSWER], "tools": "add"}, "line 1: 'tools' is not JSON"),
        ({"messages": [USER, ANSWER], "tools": ["add"]}, "line 1: 'tools' is not a list of JSON schemas"),
        ({"messages": [USER, ANSWER], "tools": [{"function": {"a": None}}]}, "line 1: 'tools' has keys that are null"),
        ({"messages": [USER, {**ANSWER, "weight": 0}]}, r"line 1: message 2 \(assistant\) is not to be trained, but w"),
        ({"messages": [{**USER, "train": True}, ANSWER]}, r"line 1: message 1 \(user\) is to be trained, but only"),
        (
            {"messages": [USER, {**ANSWER, "weight": 1}, USER, ANSWER]},
            r"line 1: message 2 .* to be trained, but a",
        ),
        (
            {"messages": [USER, {**ANSWER, "weight": 0.5}]},
            r"line 1: message 2 \(assistant\) has weight 0.5: give 0 or 1",
        ),
        ({"messages": [USER, {**ANSWER, "content": " "}]}, r"line 1: message 2 \(assistant\) is empty"),
        ({"messages": [{**USER, "content": ""}, ANSWER]}, r"line 1: message 1 \(user\) is empty"),
        ({"prompt": [USER], "completion": ""}, r"line 1: message 2 \(assistant\) is empty"),
        ({"prompt": [USER, ANSWER], "completion": "t7"}, "line 1: the prompt ends with a message of the assistant"),
        ({"prompt": "t5", "completion": " "}, "line 1: 'completion' is empty"),
        ({"prompt": "", "completion": "t7"}, "line 1: 'prompt' is empty"),
        ({"prompt": "t5", "completion": "t7 <eos> t8"}, "line 1: the completion has the special token '<eos>' before"),
        ({"prompt": "t5", "completion": "<bos> t8"}, "line 1: the completion has the special token '<bos>' before"),
        ({"prompt": "t5", "completion": "t7 \ud83d"}, "line 1: the text .* half of a character: correct the row"),
        ({"prompt": "t5", "completion": "t7 " * 160}, r"line 1: 2 prompt and 161 completion tokens do not fit .* 160"),
    ],
)
def test_invalid_row_error_names_the_line(model: Path, row: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=rf"train\.jsonl, {text}"):
        load(model, row)


def test_template_that_renders_the_prompt_differently_is_rejected(model: Path) -> None:
    with_chat_template(model, TURNS + "{% if add_generation_prompt %}t91 t93 {% endif %}")
    with pytest.raises(ConfigError, match="line 1: the chat template renders the prompt differently"):
        load(model, {"messages": [USER, ANSWER]})
