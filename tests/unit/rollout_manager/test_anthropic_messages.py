"""Anthropic's Messages API over HTTP, answered by simulated workers with given tokens."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from rlboost.services.rollout_manager.serving.anthropic_messages import MessageWriter, chat_of_messages
from rlboost.services.rollout_manager.serving.routes import translated_stream
from rlboost.services.rollout_manager.serving.schemas import parse_chat
from rlboost.services.rollout_manager.serving.structured import json_form
from tests.support.serving_site import TOKEN, Site, running_site
from tests.support.tool_model import ADD, call_text, tool_files

HEADERS = {"x-api-key": TOKEN, "anthropic-version": "2023-06-01"}
TOOL: dict[str, Any] = {
    "name": "add",
    "description": "Add.",
    "input_schema": ADD["function"]["parameters"],
    "cache_control": {"type": "ephemeral"},
}
ASKED: dict[str, Any] = {"model": "j", "max_tokens": 400, "messages": [{"role": "user", "content": "3+4?"}]}
PING = 'event: ping\ndata: {"type": "ping"}\n\n'


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    async with running_site("a") as site:
        site.files = tool_files()
        yield site


async def post(site: Site, answer: str = "", *, path: str = "", session: str = "", **more: Any) -> httpx.Response:
    if answer:
        assert site.files.tokenizer is not None
        site.answer([*site.files.tokenizer.encode(answer, add_special_tokens=False), 0])
    headers = HEADERS | ({"X-Session-ID": session} if session else {})
    return await site.http.post(f"/v1/messages{path}", headers=headers, json=ASKED | more)


async def message(site: Site, answer: str = "", **more: Any) -> dict[str, Any]:
    response = await post(site, answer, **more)
    assert response.status_code == 200, response.text
    made: dict[str, Any] = response.json()
    return made


async def events(site: Site, answer: str = "", **more: Any) -> list[dict[str, Any]]:
    response = await post(site, answer, stream=True, **more)
    assert response.headers["Content-Type"].startswith("text/event-stream")
    found = []
    for text in response.text.split("\n\n"):
        kind, _, data = text.partition("\n")
        if kind.startswith("event: "):
            found.append(json.loads(data.removeprefix("data: ")))
            assert found[-1]["type"] == kind.removeprefix("event: ")
    return found


def test_blocks_become_the_messages_of_a_chat() -> None:
    call = {"type": "tool_use", "id": "c1", "name": "add", "input": {"a": 3}, "caller": {"type": "direct"}}
    text = {"type": "text", "text": "a", "citations": None, "cache_control": {"type": "ephemeral"}}
    given = [
        {"role": "user", "content": [text, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": [{"type": "text", "text": "c"}, call, call | {"id": "c2"}]},
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "c1", "content": "7", "is_error": False},
                {"type": "tool_result", "tool_use_id": "c2", "content": [text], "is_error": True},
                {"type": "text", "text": "d"},
            ],
        },
        {"role": "assistant", "content": [call | {"id": "c3"}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c3"}]},
        {"role": "assistant", "content": []},
        {"role": "system", "content": "e"},
        {"role": "user", "content": "f"},
    ]
    body = chat_of_messages(ASKED | {"messages": given, "system": [text], "tools": [TOOL], "stop_sequences": ["x"]})
    function = {"name": "add", "arguments": '{"a": 3}'}
    calls = [{"id": f"c{i}", "type": "function", "function": function} for i in (1, 2, 3)]
    assert body["messages"] == [
        {"role": "system", "content": "a"},
        {"role": "user", "content": "ab"},
        {"role": "assistant", "content": "c", "tool_calls": calls[:2]},
        {"role": "tool", "tool_call_id": "c1", "content": "7"},
        {"role": "tool", "tool_call_id": "c2", "content": "error: a"},
        {"role": "user", "content": "d"},
        {"role": "assistant", "content": "", "tool_calls": calls[2:]},
        {"role": "tool", "tool_call_id": "c3", "content": ""},
        {"role": "assistant", "content": ""},
        {"role": "system", "content": "e"},
        {"role": "user", "content": "f"},
    ]
    assert body["tools"] == [{"type": "function", "function": ADD["function"] | {"strict": False}}]
    assert (body["max_tokens"], body["stop"]) == (400, ["x"])


@pytest.mark.parametrize(
    ("given", "choice", "parallel"),
    [
        ({"type": "auto"}, "auto", True),
        ({"type": "auto", "disable_parallel_tool_use": True}, "auto", False),
        ({"type": "none"}, "none", True),
    ],
)
def test_tool_choice_is_that_of_a_chat(given: dict[str, Any], choice: str, parallel: bool) -> None:
    body = chat_of_messages(ASKED | {"tools": [TOOL], "tool_choice": given})
    assert (body["tool_choice"], body["parallel_tool_calls"]) == (choice, parallel)


def test_field_that_changes_no_answer_is_accepted() -> None:
    for more in (
        {"metadata": {"user_id": "a"}, "service_tier": "auto", "cache_control": {"type": "ephemeral"}},
        {"thinking": {"type": "disabled"}, "mcp_servers": [], "output_config": {}},
        {"thinking": {"type": "adaptive"}, "context_management": {}},
        {"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}},
        {"container": None, "system": None},
    ):
        assert chat_of_messages(ASKED | more) == chat_of_messages(ASKED)


async def test_message_has_text_then_calls(site: Site) -> None:
    made = await message(site, f"I add. {call_text()}", tools=[TOOL], system="Be brief.")
    text, call = made["content"]
    assert text == {"type": "text", "text": "I add."}
    assert (call["type"], call["name"], call["input"]) == ("tool_use", "add", {"a": 3, "b": 4})
    assert (made["type"], made["role"], made["stop_reason"]) == ("message", "assistant", "tool_use")
    assert made["usage"]["output_tokens"] == len(f"I add. {call_text()}") + 1
    assert [block["type"] for block in (await message(site, call_text(), tools=[TOOL]))["content"]] == ["tool_use"]


async def test_stream_has_the_events_of_each_block_in_order(site: Site) -> None:
    found = await events(site, f"I add. {call_text()}{call_text('{}')}", tools=[TOOL])
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    kinds = [
        event["type"] for i, event in enumerate(found) if i < 3 or event.get("delta", {}).get("type") != "text_delta"
    ]
    assert kinds == ["message_start", *block[:1], *block[1:], *block, *block, "message_delta", "message_stop"]
    texts = [event["delta"]["text"] for event in found if event.get("delta", {}).get("type") == "text_delta"]
    inputs = [event["delta"]["partial_json"] for event in found if "partial_json" in event.get("delta", {})]
    assert ("".join(texts), [json.loads(text) for text in inputs]) == ("I add.", [{"a": 3, "b": 4}, {}])
    assert [event["index"] for event in found if event["type"] == "content_block_stop"] == [0, 1, 2]
    started = found[0]["message"]
    assert (started["content"], started["stop_reason"], started["usage"]["output_tokens"]) == ([], None, 0)
    assert found[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert found[-2]["usage"]["input_tokens"] == started["usage"]["input_tokens"] > 0
    assert found[-2]["usage"]["output_tokens"] == len(f"I add. {call_text()}{call_text('{}')}") + 1


@pytest.mark.parametrize(
    ("more", "text", "reason", "stop"),
    [
        ({}, "Seven is the sum.", "end_turn", None),
        ({"max_tokens": 5}, "Seven", "max_tokens", None),
        ({"stop_sequences": ["sum", " the"]}, "Seven is", "stop_sequence", " the"),
    ],
)
async def test_answer_says_why_it_ended_streamed_or_not(
    site: Site, more: dict[str, Any], text: str, reason: str, stop: str | None
) -> None:
    made = await message(site, "Seven is the sum.", **more)
    assert made["content"] == [{"type": "text", "text": text}]
    assert (made["stop_reason"], made["stop_sequence"]) == (reason, stop)
    found = await events(site, "Seven is the sum.", **more)
    assert found[-2]["delta"] == {"stop_reason": reason, "stop_sequence": stop}


async def test_answer_without_text_is_an_empty_block_streamed_or_not(site: Site) -> None:
    site.answer([0], [0])
    assert (await message(site))["content"] == [{"type": "text", "text": ""}]
    kinds = [event["type"] for event in await events(site)]
    block = ["content_block_start", "content_block_stop"]
    assert kinds == ["message_start", *block, "message_delta", "message_stop"]


async def test_agent_loop_continues_with_its_session(site: Site) -> None:
    odd = '<tool_call>{"arguments":{"b":4,  "a":3},"name":"add"}</tool_call>'
    first = await message(site, odd, tools=[TOOL], session="s")
    results = [{"type": "tool_result", "tool_use_id": block["id"], "content": "7"} for block in first["content"]]
    messages = [
        *ASKED["messages"],
        {"role": "assistant", "content": first["content"]},
        {"role": "user", "content": results},
    ]
    second = await message(site, "Seven.", messages=messages, tools=[TOOL], session="s")
    assert site.files.tokenizer is not None
    between = "\n<|im_start|>tool\n7<|im_end|>\n<|im_start|>assistant\n"
    n_between = len(site.files.tokenizer.encode(between, add_special_tokens=False))
    used = first["usage"]
    assert second["usage"]["input_tokens"] == used["input_tokens"] + used["output_tokens"] + n_between


async def test_counted_tokens_are_those_of_the_prompt(site: Site) -> None:
    asked: dict[str, Any] = {"system": "Be brief.", "tools": [TOOL]}
    counted = await site.http.post(
        "/v1/messages/count_tokens",
        headers=HEADERS,
        json={name: value for name, value in (ASKED | asked).items() if name != "max_tokens"},
    )
    assert counted.json() == {"input_tokens": (await message(site, "ok", **asked))["usage"]["input_tokens"]}
    refused = await post(site, path="/count_tokens", model="x")
    assert (refused.status_code, refused.json()["error"]["type"]) == (404, "not_found_error")


def json_output(schema: dict[str, Any]) -> dict[str, Any]:
    return {"output_config": {"format": {"type": "json_schema", "schema": schema}}}


def test_form_of_the_answer_is_that_of_a_chat() -> None:
    more = json_output({"type": "object"}) | {
        "tools": [TOOL],
        "tool_choice": {"type": "tool", "name": "add"},
        "top_k": 3,
    }
    body = parse_chat(chat_of_messages(ASKED | more))
    assert (body.form_of_answer, body.tool_choice, body.top_k) == (json_form({"type": "object"}), ["add"], 3)
    assert parse_chat(chat_of_messages(ASKED | more | {"tool_choice": {"type": "any"}})).must_call


def test_request_of_a_coding_agent_is_a_chat() -> None:
    """Of the form in which Claude Code 2.1 sends its first one: a message of the system is the last."""
    told = {"role": "system", "content": "Available agent types: none."}
    body = chat_of_messages(
        {
            "model": "j",
            "messages": [{"role": "user", "content": [{"type": "text", "text": "Fix it."}]}, told],
            "system": [{"type": "text", "text": "a"}, {"type": "text", "text": "b", "cache_control": {}}],
            "tools": [TOOL],
            "metadata": {"user_id": "u"},
            "max_tokens": 32000,
            "thinking": {"type": "adaptive"},
            "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
            "output_config": {"effort": "high"},
            "stream": True,
        }
    )
    assert body["messages"] == [{"role": "system", "content": "ab"}, {"role": "user", "content": "Fix it."}, told]
    assert parse_chat(body).reasoning_effort == "high"


def block(**content: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [content]}]}


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({"max_tokens": None}, "max_tokens: missing"),
        ({"max_tokens": 0}, "max_tokens: "),
        ({"temperature": 9}, "temperature: "),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking: not supported"),
        ({"top_k": -5}, "top_k: "),
        ({"output_config": {"effort": 1}}, "output_config: "),
        ({"output_config": {"wrong": 1}}, "output_config: the key 'wrong' is not supported"),
        ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "entry 0 is 'clear_tool_uses"),
        ({"context_management": {"edits": "all"}}, "context_management: edits: 'all' is no list"),
        ({"output_config": {"format": {"type": "json"}}}, "output_config: format is"),
        (json_output({"type": "tuple"}), "output_config: schema: type is 'tuple'"),
        ({"mcp_servers": [{"url": "u"}]}, "mcp_servers: not supported"),
        ({"container": "c"}, "container: not supported"),
        ({"wrong": 1}, "wrong: not supported"),
        ({"stop_sequences": "x"}, "stop_sequences: 'x' is no list"),
        ({"stop_sequences": ["x"] * 17}, "stop_sequences"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"tool_choice": {"type": "any"}}, "tool_choice: tools has no function that it allows"),
        ({"tool_choice": {"type": "tool", "name": "sub"}}, "tool_choice: tools has no function that it allows"),
        ({"tool_choice": {"type": "some"}}, "tool_choice: the type is 'some'"),
        ({"tool_choice": "auto"}, "tool_choice is 'auto'"),
        ({"tool_choice": {"type": "auto", "disable_parallel_tool_use": 1}}, "tool_choice: disable_parallel_tool_use"),
        ({"tools": [{"type": "web_search_20250305", "name": "w"}]}, "entry 0 has the type 'web_search_20250305'"),
        ({"tools": [TOOL, TOOL]}, "tools: entry 1 has the name 'add'"),
        ({"tools": [{"name": "add"}]}, "tools: entry 0: input_schema is None"),
        ({"tools": [TOOL | {"input_schema": {"type": "array"}}]}, "tools: entry 0: input_schema is"),
        ({"tools": [TOOL | {"defer_loading": True}]}, "the key 'defer_loading' is not supported"),
        ({"tools": [TOOL | {"description": 1}]}, "tools: entry 0: description is 1"),
        ({"system": 5}, "system: 5 is no list"),
        ({"messages": []}, "messages: the last one should be the user's"),
        ({"messages": [], "system": "a"}, "messages: the last one should be the user's"),
        ({"messages": "a"}, "messages: 'a' is no list"),
        ({"messages": [{"role": "assistant", "content": "a"}]}, "messages: the last one should be the user's"),
        ({"messages": [{"role": "wizard", "content": "a"}]}, "messages: entry 0 has the role 'wizard'"),
        (block(type="image", source={}), "messages: entry 0: content: block 0 has the type 'image': not supported"),
        (block(type="document"), "block 0 has the type 'document'"),
        (block(type="thinking", thinking="a"), "block 0 has the type 'thinking'"),
        (block(type="tool_use", id="a", name="b", input={}), "block 0 has the type 'tool_use'"),
        (block(type="text"), "block 0: text is None"),
        (block(type="text", text="a", x=1), "block 0: the key 'x' is not supported"),
        (block(type="tool_result", content="a"), "block 0: tool_use_id is None"),
        (block(type="tool_result", tool_use_id="a", is_error=1), "block 0: is_error is 1"),
        (
            block(type="tool_result", tool_use_id="a", content=[{"type": "image"}]),
            "content: block 0 has the type 'image'",
        ),
    ],
)
async def test_invalid_request_names_the_field_of_this_api(site: Site, more: dict[str, Any], text: str) -> None:
    response = await post(site, **more)
    body = response.json()
    assert (response.status_code, body["type"], body["error"]["type"]) == (400, "error", "invalid_request_error")
    assert text in body["error"]["message"]


async def test_errors_of_these_routes_only_have_this_format(site: Site) -> None:
    async def kind(path: str, **headers: str) -> tuple[int, str]:
        response = await site.http.post(path, headers=headers, json=ASKED)
        assert response.json().keys() == {"type", "error"}
        return response.status_code, response.json()["error"]["type"]

    assert await kind("/v1/messages") == (401, "authentication_error")
    assert await kind("/v1/messages/batches", **HEADERS) == (404, "not_found_error")
    assert await kind("/v1/v1/messages", **HEADERS) == (404, "not_found_error")
    hint = (await site.http.post("/v1/v1/messages", headers=HEADERS)).json()["error"]["message"]
    assert "leave /v1 out of the client's base_url" in hint
    other = await site.http.post("/v1/responses", headers=HEADERS, json={})
    assert other.json().keys() == {"error"}


async def test_thread_is_refused_so_that_tool_runners_send_all_messages(site: Site) -> None:
    error = (await post(site, thread={"type": "create"})).json()["error"]
    assert error["message"] == "thread: messages are not stored: send all of them each time"
    assert error["details"] == {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}


async def test_error_in_a_stream_is_its_last_event(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlboost.services.rollout_manager.serving.completion.Choice.add", None)
    (error,) = await events(site, "ok")
    assert error["error"]["type"] == "api_error"
    assert "the stream failed" in error["error"]["message"]


async def test_stream_is_kept_alive_by_pings_after_its_first_event() -> None:
    class Waiting:
        async def chunks(self) -> AsyncIterator[dict[str, Any] | None]:
            for chunk in (None, {"id": "cmpl-1", "model": "j", "choices": []}, None):
                yield chunk

    waiting: Any = Waiting()
    before, started, after, *_ = [text async for text in translated_stream(waiting, MessageWriter(3))]
    assert before.startswith(":")
    assert started.startswith("event: message_start")
    assert after == PING
