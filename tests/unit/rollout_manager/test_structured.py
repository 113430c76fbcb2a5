"""Which JSON schemas answers can be held to, and the grammars of answers."""

from __future__ import annotations

import json
from typing import Any, Literal

import pytest
from pydantic import BaseModel

from rlboost.services.rollout_manager.serving.schemas import parse_chat
from rlboost.services.rollout_manager.serving.structured import (
    ANY_OBJECT,
    MAX_DEPTH,
    checked_schema,
    form_of_response_format,
    form_of_vllm,
    grammar,
    has_json_arguments,
    json_form,
)
from rlboost.shared.http.problem import Problem
from rlboost.shared.model.tool_calls import HERMES, CallStyle
from tests.support.tool_model import ADD


class Cat(BaseModel):
    kind: Literal["cat"]
    lives: int


class Dog(BaseModel):
    kind: Literal["dog"]
    name: str | None = None


class Tree(BaseModel):
    value: float
    children: list[Tree] = []


class Answer(BaseModel):
    """As agents define it."""

    pets: list[Cat | Dog]
    tree: Tree
    labels: dict[str, int]


def test_large_schema_of_cheap_parts_is_accepted() -> None:
    required = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(999)}}
    required["required"] = [*required["properties"]]
    form = {"type": "string", "pattern": r"^[A-Z]{2}\d{4,8}$"}
    # A property, and a value, may be called so.
    named = {"type": "object", "properties": {"pattern": {"enum": [{"pattern": "a" * 2000}]}, "form": form}}
    for schema in (required, named):
        assert checked_schema(schema) == schema


def test_schemas_of_pydantic_are_accepted() -> None:
    schema = Answer.model_json_schema()
    assert checked_schema(schema) == schema
    strict: dict[str, Any] = {"type": "json_schema", "json_schema": {"name": "a", "strict": True, "schema": schema}}
    assert form_of_response_format(strict) == json_form(schema)
    assert form_of_vllm({"json": json.dumps(schema)}) == form_of_vllm({"json": schema}) == json_form(schema)
    for form in (form_of_response_format({"type": "json_object"}), form_of_vllm({"json_object": True})):
        assert form == json_form(ANY_OBJECT)


def nested(depth: int) -> dict[str, Any]:
    return {"type": "array", "items": nested(depth - 1)} if depth else {"type": "null"}


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ([], "should be a JSON schema"),
        ({"type": "tuple"}, "schema: type is 'tuple'"),
        ({"type": ["string", 3]}, "schema: type is 3"),
        (
            {"type": "object", "properties": {"a": {"type": "integer", "multipleOf": 2}}},
            "schema.properties.a: multipleOf",
        ),
        ({"type": "object", "properties": {"a": 1}}, "schema.properties.a is 1"),
        ({"type": "object", "properties": []}, "properties is .*: should be an object"),
        ({"type": "object", "required": "a"}, "required is 'a'"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems is not supported"),
        ({"minimum": 3}, "minimum is only supported with its type"),
        ({"anyOf": [{"type": "null"}], "minimum": 3}, "minimum is not supported next to anyOf"),
        ({"anyOf": []}, "anyOf is .*: should be a list of schemas"),
        ({"anyOf": [{"type": "null"}], "enum": [1]}, "anyOf and enum: give one"),
        ({"oneOf": [{"type": "null"}]}, "oneOf is not supported without a discriminator"),
        ({"allOf": [{"type": "null"}, {"type": "null"}]}, "allOf with several"),
        ({"not": {"type": "null"}}, "not is not supported"),
        ({"$ref": "#/$defs/a"}, "\\$ref is '#/\\$defs/a': should name a schema of this one"),
        ({"$ref": "http://a/b"}, "should name a schema of this one"),
        ({"enum": []}, "enum is .*: should be a list of values"),
        ({"type": "integer", "minimum": "3"}, "minimum is '3': should be a number"),
        ({"type": "integer", "minimum": 4, "maximum": 3}, "minimum is above maximum"),
        ({"type": "string", "maxLength": 1 << 20}, "maxLength is 1048576: should be from 0 to 1024"),
        ({"type": "string", "pattern": "a", "maxLength": 3}, "give one of pattern, format and a length"),
        ({"type": "string", "pattern": "("}, "pattern is '\\('"),
        ({"type": "string", "pattern": "a{99999999999}"}, "too large"),
        ({"type": "string", "pattern": "a(?=b)"}, "pattern .* is not supported"),
        ({"type": "string", "format": "color"}, "format is 'color'"),
        (nested(MAX_DEPTH), "is nested more than"),
        ({"enum": ["a" * (1 << 16)]}, "more than 65536 characters"),
        ({"anyOf": [{"type": "string", "pattern": "a" * 600}] * 2}, "patterns have 1200 characters"),
        ({"type": "array", "items": {"type": "string", "pattern": "[a-z]{1,60}" * 5}}, "add up to 305"),
        ({"type": "string", "pattern": "(a*|b)?.+" * 11}, "patterns have 33 of"),
        ({"type": "object", "properties": {"enum": {"type": "string", "pattern": "a" * 1025}}}, "have 1025 characters"),
        ({"$ref": "#/default/a", "default": {"a": {"multipleOf": 2}}}, "this is no schema of this one"),
        ({"type": "object", "properties": {f"p{i}": True for i in range(257)}}, "schema: 257 properties are not req"),
    ],
)
def test_schema_that_no_grammar_enforces_is_refused_by_place(schema: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        checked_schema(schema)


@pytest.mark.parametrize(
    "given", ["json", {}, {"type": "regex"}, {"type": "json_schema"}, {"type": "json_schema", "json_schema": {}}]
)
def test_unknown_format_is_refused(given: Any) -> None:
    with pytest.raises(ValueError, match="should be"):
        form_of_response_format(given)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ("json", "give one of json"),
        ({}, "give one of json"),
        ({"grammar": "a"}, "give one of json"),
        ({"json": {}, "json_object": True}, "give one of json"),
        ({"regex": ""}, "give one of json"),
        ({"choice": []}, "give one of json"),
        ({"choice": "ab"}, "give one of json"),
        ({"choice": ["a", 1]}, "give one of json"),
        ({"regex": "a", "choice": ["a"]}, "give one of json"),
        ({"json": "{"}, "no JSON"),
        ({"json": "[" * 100_000}, "no JSON"),
        ({"json": 1}, "should be a JSON schema"),
        ({"regex": "("}, "regex is '\\('"),
        ({"regex": "a(?=b)"}, "regex is .* is not supported"),
        ({"regex": "a" * 1025}, "patterns have 1025"),
        ({"regex": "(" * 1025}, "patterns have 1025"),
        ({"choice": ["a" * (1 << 16), "b"]}, "choice has 65537 characters"),
    ],
)
def test_other_constraints_of_vllm_are_refused(given: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        form_of_vllm(given)


@pytest.mark.parametrize(
    ("parameters", "text"),
    [
        ([{"type": "object", "properties": {"a": {"type": "integer", "multipleOf": 2}}}], "'f0' .*a: multipleOf"),
        ([{"type": "object", "properties": {}, "description": "d" * 9000}] * 8, "65536 characters in all"),
        ([{"type": "object", "properties": {"a": {"type": "string", "pattern": "a" * 600}}}] * 2, "1200 characters"),
    ],
)
def test_parameters_that_no_grammar_enforces_are_refused_for_required_calls(parameters: Any, text: str) -> None:
    tools = [{"type": "function", "function": {"name": f"f{i}", "parameters": one}} for i, one in enumerate(parameters)]
    chat = {"model": "m", "messages": [{"role": "user", "content": "a"}], "tools": tools}
    assert parse_chat(chat).tools
    for more in ({"tool_choice": "required"}, {"response_format": {"type": "json_object"}}):
        with pytest.raises(Problem, match=text):
            parse_chat(chat | more)


def test_answer_is_json_or_a_call_in_the_style_of_the_model() -> None:
    both = json.loads(grammar(json_form(ANY_OBJECT), [ADD]))["format"]
    assert [form["type"] for form in both["elements"]] == ["json_schema", "tag"]
    call = json.loads(grammar(None, [ADD]))["format"]
    assert (call["begin"], call["end"]) == ('<tool_call>\n{"name": "add", "arguments": ', "}\n</tool_call>")
    assert call["content"]["json_schema"] == ADD["function"]["parameters"]
    assert has_json_arguments(HERMES)
    assert not has_json_arguments(CallStyle("qwen3_coder", "<function=NAME>\n<parameter=KEY>\nVALUE\n</parameter>"))
