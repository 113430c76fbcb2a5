"""Tools in requests, and the calls that are read from answers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlboost.services.rollout_manager.serving.tools import CallReader, ToolCall, call_ids, tools_of_request
from rlboost.shared.model.tool_calls import HERMES, CallStyle
from tests.support.tool_model import ADD, call_text


def function(**more: Any) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": "f", **more}}]


def read(
    text: str, *, style: CallStyle = HERMES, end: str = "", only_first: bool = False, size: int = 3
) -> tuple[list[str], str, list[ToolCall]]:
    """Return the pieces of text before the end, all text, and the calls."""
    reader = CallReader(style, [ADD], call_ids("answer"), only_first=only_first)
    pieces = [reader.add(text[i : i + size]) for i in range(0, len(text), size)]
    rest, calls = reader.finish(end)
    return pieces, "".join([*pieces, rest]), calls


def arguments_of(calls: Sequence[ToolCall]) -> list[Any]:
    return [json.loads(call.arguments) for call in calls]


def test_tools_have_the_form_that_tool_environments_give() -> None:
    wanted = {**ADD["function"], "strict": True}
    assert tools_of_request([{"type": "function", "function": wanted}]) == [ADD]
    assert tools_of_request(function(description=None, parameters=None)) == function(
        description="", parameters={"type": "object", "properties": {}}
    )


@pytest.mark.parametrize(
    ("tools", "text"),
    [
        ({}, "should be a list of functions"),
        (["add"], "entry 0 is 'add'"),
        ([{"type": "web_search"}], "entry 0 has the type 'web_search': only 'function'"),
        ([{"type": "function"}], "entry 0: function is None"),
        ([{"type": "function", "name": "f", "function": {"name": "f"}}], "entry 0 has the unknown key 'name'"),
        (function(name=3), "entry 0: function.name is 3"),
        (function(name=" "), "entry 0: function.name is ' '"),
        (function(description=3), "entry 0: function.description is 3"),
        (function(parameters=[]), r"entry 0: function.parameters is \[\]"),
        (function(parameters={"type": "string"}), "entry 0: function.parameters has the type 'string'"),
        (function(parameters={"properties": 3}), "entry 0: function.parameters.properties"),
        (function(strict=3), "entry 0: function.strict"),
        (function(returns={}), "entry 0: function has the unknown key 'returns'"),
        ([*function(), *function()], "entry 1 has the name 'f', as entry 0 has"),
    ],
)
def test_invalid_tool_is_named_by_its_place(tools: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        tools_of_request(tools)


def test_text_before_a_call_is_returned_at_once_and_space_is_not() -> None:
    pieces, text, calls = read("I add them.\n\n" + call_text(), size=1)
    assert "".join(pieces) == text == "I add them."
    assert pieces[-1] == ""
    assert arguments_of(calls) == [{"a": 3, "b": 4}]
    assert calls[0].name == "add"


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
@pytest.mark.parametrize("text", ["", "no call", " 1 < 2 <tool", "a\n\n", "<think>x</think> <b>", "{[("])
def test_text_without_calls_is_unchanged(text: str, size: int) -> None:
    for style in (HERMES, CallStyle("llama3_json", '{"name": "NAME", "parameters": {"KEY": "VALUE"}}')):
        assert read(text, size=size, style=style)[1:] == (text, [])


def test_several_calls_have_ids_of_their_own_and_the_text_between_stays() -> None:
    _, text, calls = read(f"a{call_text()}b{call_text('{}')}c")
    assert text == "abc"
    assert arguments_of(calls) == [{"a": 3, "b": 4}, {}]
    assert len({call.id for call in calls}) == 2
    assert all(call.id.isalnum() and len(call.id) == 9 for call in calls)
    assert calls == read(f"a{call_text()}b{call_text('{}')}c", size=1)[2]


@pytest.mark.parametrize("wrong", ["{3}", '{"a": NaN}', "[]"])
def test_call_that_cannot_be_read_stays_text(wrong: str) -> None:
    _, text, calls = read(f"{call_text(wrong)} {call_text()}")
    assert text == call_text(wrong)
    assert arguments_of(calls) == [{"a": 3, "b": 4}]


def test_call_that_is_cut_off_stays_text() -> None:
    cut = call_text()[:-20]
    assert read(f"a {cut}")[1:] == (f"a {cut}", [])


def test_only_the_first_call_is_read_and_the_others_stay_text() -> None:
    two = call_text() + call_text("{}")
    _, text, calls = read(two, only_first=True)
    assert (text, arguments_of(calls)) == (call_text("{}"), [{"a": 3, "b": 4}])
    both = '<tool_call>[{"name": "add", "arguments": {}}, {"name": "add", "arguments": {"a": 1}}]</tool_call>'
    assert arguments_of(read(both)[2]) == [{}, {"a": 1}]
    _, text, calls = read(both, only_first=True)
    assert (text, arguments_of(calls)) == (both, [{}])


def test_ids_of_the_model_are_kept_while_they_differ() -> None:
    style = CallStyle("kimi_k2", "<|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>{}<|tool_call_end|>")
    one = "<|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>{}<|tool_call_end|>"
    ids = [call.id for call in read(one + one, style=style)[2]]
    assert ids[0] == "functions.add:0"
    assert ids[1] not in ("", ids[0])


def test_half_a_character_in_an_argument_is_escaped() -> None:
    (call,) = read(call_text('{"a": "\\ud800", "b": "é"}'))[2]
    call.arguments.encode()
    assert json.loads(call.arguments) == {"a": "\ud800", "b": "é"}
    (call,) = read(call_text('{"b": "é"}'))[2]
    assert call.arguments == '{"b": "é"}'


def test_special_tokens_are_read_and_are_no_text() -> None:
    reader = CallReader(HERMES, [ADD], call_ids("answer"))
    body = '{"name": "add", "arguments": {"a": 1}}'
    text = (
        reader.add("a ") + reader.add("<|x|>", {"<|x|>"}) + reader.add("b") + reader.add("<tool_call>", {"<tool_call>"})
    )
    text += reader.add(body) + reader.add("</tool_call>", {"</tool_call>"}) + reader.add("<|y|>", {"<|y|>"})
    rest, calls = reader.finish("<|im_end|>")
    assert (text + rest, arguments_of(calls)) == ("a b", [{"a": 1}])


def test_call_that_a_thought_quotes_is_text() -> None:
    thought = f"<think>maybe {call_text()}</think>ok"
    assert read(thought)[1:] == (thought, [])
    reader = CallReader(HERMES, [ADD], call_ids("answer"), in_thought=True)
    text = reader.add(f"maybe {call_text()}</think>{call_text('{}')}")
    rest, calls = reader.finish("")
    assert (text + rest, arguments_of(calls)) == (f"maybe {call_text()}</think>", [{}])


@given(
    st.lists(st.sampled_from(["a ", "<", "\n", "tool_call>", call_text(), call_text("{"), "<think>", "</think>", "é"])),
    st.integers(1, 9),
)
def test_any_split_of_an_answer_has_the_same_text_and_calls(parts: list[str], size: int) -> None:
    text = "".join(parts)
    whole, split = read(text, size=10_000), read(text, size=size)
    assert split[2] == whole[2]
    # Space before a call may have been returned before the call began, or not.
    assert split[1].split() == whole[1].split()
    assert split[2] or split[1] == whole[1]
