"""What rows of data say as chat messages: read as it is meant, or refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlboost.shared.data.examples import examples_of, prompt_of
from rlboost.shared.data.messages import clean_messages
from rlboost.shared.data.rows import BadRow, read_rows
from rlboost.shared.errors import ConfigError

USER = {"role": "user", "content": "12+34?"}
ANSWER = {"role": "assistant", "content": "46"}


def calling(arguments: object) -> dict[str, Any]:
    return {"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": arguments}}]}


def test_null_in_the_json_text_of_arguments_stays() -> None:
    given = prompt_of({"prompt": [USER, calling('{"a": null}'), USER]}, "prompt").given
    message: Any = given[1]
    assert message["tool_calls"][0]["function"]["arguments"] == {"a": None}
    assert clean_messages([message]) == [message]
    with pytest.raises(ConfigError, match=r"message 2 .*, tool call 1 has arguments that are null, as tables add"):
        prompt_of({"prompt": [USER, calling({"a": {"b": None}})]}, "prompt")


@pytest.mark.parametrize("arguments", ['{"a": NaN}', '{"a": [1, -Infinity]}', {"a": float("nan")}])
def test_arguments_of_a_row_that_are_no_json_are_refused(arguments: object) -> None:
    with pytest.raises(ConfigError, match=r"message 1 .*, tool call 1 has an argument that is no finite number"):
        clean_messages([calling(arguments)], of_row=True)


@pytest.mark.parametrize("arguments", ['{"a": NaN}', '{"a": 1, "a": 2}'])
def test_arguments_that_a_client_repeats_are_what_the_model_wrote(arguments: str) -> None:
    [message] = clean_messages([calling(arguments)])
    assert "a" in message["tool_calls"][0]["function"]["arguments"]


def test_json_text_of_messages_is_read_as_messages() -> None:
    call = calling('{"a": 12}')
    for messages in ([USER], [USER, call, {"role": "tool", "content": "46"}]):
        assert prompt_of({"prompt": json.dumps(messages)}, "prompt") == prompt_of({"prompt": messages}, "prompt")
    row = {"messages": [USER, ANSWER]}
    texts: tuple[dict[str, Any], ...] = (
        {"messages": json.dumps([USER, ANSWER])},
        {"prompt": json.dumps([USER]), "completion": json.dumps([ANSWER])},
    )
    for text in texts:
        for every_turn in (False, True):
            assert examples_of(text, "prompt", "completion", every_turn=every_turn) == examples_of(
                row, "prompt", "completion"
            )


@pytest.mark.parametrize(
    "text",
    [
        str([USER, ANSWER]),
        str([{"content": "12", "role": "user"}]),
        str([USER]),
        str(USER),
        "[{'role': 'user', 'content': '12'}\n {'role': 'assistant', 'content': '46'}]",
        '[{"from": "human", "value": "12+34?"}]',
    ],
)
def test_other_text_of_messages_is_no_prompt(text: str) -> None:
    with pytest.raises(ConfigError, match="is a text of chat messages: give a list of them with role and content"):
        prompt_of({"prompt": text}, "prompt")


JSON_OF_DATA = ('{"role": "engineer", "content": "x"}', '{"from": "USD", "value": 3}')


@pytest.mark.parametrize(
    "text", ["[INST] 1", "[1, 2] is", '[{"value": 3}]', '{"role": 1}', "[{'a': 1}]", "[" * 9999, *JSON_OF_DATA]
)
def test_text_that_only_looks_like_messages_is_text(text: str) -> None:
    assert prompt_of({"prompt": text}, "prompt").given == text


@pytest.mark.parametrize("text", [*JSON_OF_DATA, json.dumps(USER)])
def test_completion_may_be_any_json(text: str) -> None:
    [example] = examples_of({"prompt": [USER], "completion": text}, "prompt", "completion")
    assert example.completion == [{"role": "assistant", "content": text}]


def test_keys_that_say_what_is_trained_anyway_change_nothing() -> None:
    plain = {"messages": [USER, ANSWER, USER, ANSWER]}
    given = {"messages": [{**message, "weight": 1, "loss": 0.3} for message in plain["messages"]]}
    read = [examples_of(row, "prompt", "completion", every_turn=True) for row in (plain, given)]
    assert read[0] == read[1]


@pytest.mark.parametrize(
    ("prompt", "why"),
    [
        ("", "'prompt' is empty"),
        (" \n", "'prompt' is empty"),
        ([{**USER, "content": " "}], r"message 1 \(user\) is empty"),
        ([USER, {**ANSWER, "content": ""}, USER], r"message 2 \(assistant\) is empty"),
        ([ANSWER], "all messages are the assistant's"),
    ],
)
def test_prompt_without_a_question_is_refused(prompt: object, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        prompt_of({"prompt": prompt}, "prompt")


def test_texts_that_may_be_empty_stay_empty() -> None:
    """A system message without text replaces the template's own, and tools may return nothing."""
    messages = [{"role": "system", "content": ""}, USER, calling({}), {"role": "tool", "content": ""}]
    assert [message["content"] for message in clean_messages(messages, of_row=True)] == ["", "12+34?", "", ""]


def test_row_whose_turns_are_all_left_out_is_refused() -> None:
    row = {"messages": [USER, {**ANSWER, "weight": 0}]}
    with pytest.raises(ConfigError, match="no message of the assistant is to be trained: leave out the row"):
        examples_of(row, "prompt", "completion", every_turn=True)


@pytest.mark.parametrize("line", ['{"prompt": "1", "prompt": "2"}', '{"prompt": "1", "x": {"a": 1, "a": 2}}'])
def test_key_that_is_there_twice_is_refused(tmp_path: Path, line: str) -> None:
    (tmp_path / "train.jsonl").write_text(f'{{"prompt": "0"}}\n{line}\n')
    with pytest.raises(BadRow, match=r"line 2: not JSON: the key '(prompt|a)' is there twice: remove one"):
        list(read_rows(str(tmp_path / "train.jsonl")))


def test_rows_share_the_names_of_their_columns(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text('{"some_column": {"inner": 1}}\n' * 2)
    one, other = (row.values for row in read_rows(str(tmp_path / "train.jsonl")))
    assert next(iter(one)) is next(iter(other))
    assert next(iter(one["some_column"])) is next(iter(other["some_column"]))
