"""RLBoost's readers of tool calls find what vLLM's parsers find."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from rlboost.shared.model.tool_calls import CallStyle, read_calls
from tests.support import vllm_engines

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"text": {"type": "string"}, "n": {"type": "integer"}, "inner": {"type": "object"}},
}
CALL = '{"name": "f", "arguments": {"text": "a\\"b é <c>\\n", "n": 3, "inner": {"k": [1, null, true]}}}'
ARGUMENTS = json.dumps(json.loads(CALL)["arguments"], ensure_ascii=False)
PARAMETERS = CALL.replace("arguments", "parameters")
ATEM = (
    '<atem:function_calls>\n<atem:invoke name="f">\n<atem:parameter name="text">a "b"</atem:parameter>\n'
    '<atem:parameter name="n">3</atem:parameter>\n</atem:invoke>\n</atem:function_calls>'
)
DEEPSEEK = {
    name: f"<\uff5ctool▁{name.replace('_', '▁')}\uff5c>"
    for name in ("calls_begin", "calls_end", "call_begin", "call_end", "sep")
}
V3 = "{calls_begin}{call_begin}function{sep}f\n```json\nARGUMENTS\n```{call_end}{calls_end}".format(**DEEPSEEK)
V31 = "{calls_begin}{call_begin}f{sep}ARGUMENTS{call_end}{call_begin}g{sep}{{}}{call_end}{calls_end}".format(**DEEPSEEK)


class Vocabulary:
    """A tokenizer that has every token that a parser asks for."""

    def get_vocab(self) -> Any:
        return SimpleNamespace(get=lambda _token, _default=None: 7)

    def __getattr__(self, _name: str) -> Any:
        return lambda *_args, **_named: []


@pytest.mark.parametrize(
    ("form", "parser", "text"),
    [
        ("hermes", "hermes", f"I call.\n<tool_call>\n{CALL}\n</tool_call>\n<tool_call>\n{CALL}\n</tool_call>"),
        ("llama3_json", "llama3_json", PARAMETERS),
        ("llama3_json", "llama3_json", f"{PARAMETERS}; {CALL}"),
        ("deepseek_v3", "deepseek_v3", V3.replace("ARGUMENTS", ARGUMENTS)),
        ("deepseek_v31", "deepseek_v31", V31.replace("ARGUMENTS", ARGUMENTS)),
        (
            "functiongemma",
            "functiongemma",
            "<start_function_call>call:f{text:<escape>a<escape>}<end_function_call>",
        ),
        (
            "lfm2",
            "lfm2",
            '<|tool_call_start|>[f(text="a\\"b é", n=3, inner={"k": [1, None, True]}), g()]<|tool_call_end|>',
        ),
        ("pythonic", "pythonic", '[f(text="a\\"b é", n=3, inner={"k": [1, None, True]}), g()]'),
        ("olmo3", "olmo3", '<function_calls>\nf(text="a", n=3)\ng()\n</function_calls>'),
        ("jamba", "jamba", f"<tool_calls>[{CALL}]</tool_calls>"),
        ("functools", "phi4_mini_json", 'functools[{"name": "f", "arguments": {"text": "a", "n": 3}}]'),
        ("invoke", "muse_glimmer", ATEM),
    ],
)
def test_reader_finds_what_the_parser_of_vllm_finds(form: str, parser: str, text: str) -> None:
    vllm_engines.require()
    tool_parsers = pytest.importorskip("vllm.tool_parsers")
    protocol = pytest.importorskip("vllm.entrypoints.openai.chat_completion.protocol")
    given = [
        protocol.ChatCompletionToolsParam(type="function", function={"name": name, "parameters": SCHEMA})
        for name in "fg"
    ]
    request = protocol.ChatCompletionRequest(messages=[], model="m", tools=given)
    their = tool_parsers.ToolParserManager.get_tool_parser(parser)(Vocabulary(), given).extract_tool_calls(
        text, request
    )
    tools = [{"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in "fg"]
    ours = [(call.name, call.arguments, call.problem) for call in read_calls(text, CallStyle(form), tools)]
    assert ours == [(one.function.name, json.loads(one.function.arguments), "") for one in their.tool_calls]
    assert ours
