"""OpenAI's Responses API by OpenAI's own client, answered by simulated workers with given tokens."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest
from openai import APIError, BadRequestError

from rlboost.services.rollout_manager.serving.openai_responses import chat_of_response
from rlboost.services.rollout_manager.serving.routes import _respond
from rlboost.services.rollout_manager.serving.schemas import parse_chat
from rlboost.services.rollout_manager.serving.structured import ANY_OBJECT, json_form
from tests.support.serving_site import BEARER, Site, running_site
from tests.support.tool_model import ADD, call_text, tool_files

TOOL: dict[str, Any] = {"type": "function", **ADD["function"], "strict": True}


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    async with running_site("a") as site:
        site.files = tool_files()
        yield site


async def respond(site: Site, answer: str = "", **more: Any) -> Any:
    if answer:
        assert site.files.tokenizer is not None
        site.answer([*site.files.tokenizer.encode(answer, add_special_tokens=False), 0])
    asked: dict[str, Any] = {"model": "j", "input": "3+4?", "max_output_tokens": 400, **more}
    return await site.client().responses.create(**asked)


def test_items_become_the_messages_of_a_chat() -> None:
    call = {"type": "function_call", "call_id": "c1", "name": "add", "arguments": "{}", "id": "fc_1", "status": None}
    items = [
        {"role": "developer", "content": "a"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "b"}]},
        {
            "type": "message",
            "role": "assistant",
            "id": "msg_1",
            "status": "completed",
            "content": [{"type": "output_text", "text": "c", "annotations": []}],
        },
        call,
        {**call, "call_id": "c2"},
        {"type": "function_call_output", "call_id": "c1", "output": "7"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "8"}]},
        {**call, "call_id": "c3"},
    ]
    function = {"name": "add", "arguments": "{}"}
    calls = [{"id": f"c{i}", "type": "function", "function": function} for i in (1, 2, 3)]
    body = chat_of_response(
        {"model": "j", "input": items, "instructions": "s", "max_output_tokens": 5, "tools": [TOOL]}
    )
    assert body["messages"] == [
        {"role": "system", "content": "s"},
        {"role": "developer", "content": "a"},
        {"role": "user", "content": "b"},
        {"role": "assistant", "content": "c", "tool_calls": calls[:2]},
        {"role": "tool", "tool_call_id": "c1", "content": "7"},
        {"role": "tool", "tool_call_id": "c2", "content": "8"},
        {"role": "assistant", "content": "", "tool_calls": calls[2:]},
    ]
    assert body["max_tokens"] == 5
    assert body["tools"][0]["function"] == {**ADD["function"], "strict": True}


def test_form_of_the_answer_is_that_of_a_chat() -> None:
    form = {"type": "json_schema", "name": "a", "schema": {"type": "object"}, "strict": True}
    choice = {"type": "function", "name": "add"}
    raw = {"model": "j", "input": "a", "text": {"format": form}, "tools": [TOOL], "tool_choice": choice}
    body = parse_chat(chat_of_response(raw))
    assert (body.form_of_answer, body.tool_choice) == (json_form({"type": "object"}), ["add"])
    assert parse_chat(
        chat_of_response(raw | {"text": {"format": {"type": "json_object"}}})
    ).form_of_answer == json_form(ANY_OBJECT)


async def test_stream_whose_client_has_gone_stops_waiting() -> None:
    completion = Mock()
    completion.body.stream, completion.stream = True, never

    async def receive() -> dict[str, str]:
        return {"type": "http.disconnect"}

    response = await _respond(completion, Mock())
    await response({"type": "http", "asgi": {"spec_version": "2.3"}}, receive, AsyncMock())
    completion.close.assert_called_once()


async def never() -> AsyncGenerator[str]:
    await asyncio.Event().wait()
    yield ""


async def test_response_has_text_then_calls(site: Site) -> None:
    made = await respond(site, f"I add. {call_text()}", tools=[TOOL], instructions="Be brief.", store=False)
    assert (made.status, made.output_text, made.incomplete_details) == ("completed", "I add.", None)
    message, call = made.output
    assert message.type == "message"
    assert (call.type, call.name, json.loads(call.arguments)) == ("function_call", "add", {"a": 3, "b": 4})
    assert made.usage.output_tokens == len(f"I add. {call_text()}") + 1
    assert [item.type for item in (await respond(site, call_text(), tools=[TOOL])).output] == ["function_call"]


async def test_stream_has_the_events_of_each_item_in_order(site: Site) -> None:
    stream = await respond(site, f"I add. {call_text()}{call_text('{}')}", tools=[TOOL], stream=True)
    events = [event async for event in stream]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type.removeprefix("response.") for event in events if not event.type.endswith("text.delta")]
    call = ["output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"]
    text = ["output_text.done", "content_part.done", "output_item.done"]
    begun = ["created", "in_progress", "output_item.added", "content_part.added"]
    assert kinds == [*begun, *text, *call, *call, "completed"]
    assert "".join(event.delta for event in events if event.type.endswith("text.delta")) == "I add."
    done = events[-1].response
    assert [item.type for item in done.output] == ["message", "function_call", "function_call"]
    assert [event.item for event in events if event.type == "response.output_item.done"] == done.output
    assert done.usage.input_tokens > 0


async def test_response_that_is_cut_off_is_incomplete(site: Site) -> None:
    made = await respond(site, "Seven is the sum.", max_output_tokens=5)
    assert (made.status, made.output_text) == ("incomplete", "Seven")
    assert made.incomplete_details.reason == "max_output_tokens"
    events = [event async for event in await respond(site, "Seven is the sum.", max_output_tokens=5, stream=True)]
    assert events[-1].type == "response.incomplete"


async def test_answer_without_text_is_an_empty_message_streamed_or_not(site: Site) -> None:
    site.answer([0], [0])
    made = await respond(site)
    streamed = [event async for event in await respond(site, stream=True)][-1].response
    for response in (made, streamed):
        assert [(item.type, item.content[0].text) for item in response.output] == [("message", "")]


async def test_agent_loop_continues_with_its_session(site: Site) -> None:
    items: list[Any] = [{"role": "user", "content": "3+4?"}]
    odd = '<tool_call>{"arguments":{"b":4,  "a":3},"name":"add"}</tool_call>'
    session = {"X-Session-ID": "s"}
    first = await respond(site, odd, input=items, tools=[TOOL], extra_headers=session)
    items += [item.model_dump() for item in first.output]
    items += [{"type": "function_call_output", "call_id": item.call_id, "output": "7"} for item in first.output]
    second = await respond(site, "Seven.", input=items, tools=[TOOL], extra_headers=session)
    assert site.files.tokenizer is not None
    between = "\n<|im_start|>tool\n7<|im_end|>\n<|im_start|>assistant\n"
    n_between = len(site.files.tokenizer.encode(between, add_special_tokens=False))
    assert second.usage.input_tokens == first.usage.total_tokens + n_between


@pytest.mark.parametrize(
    ("more", "text", "param"),
    [
        ({"store": True}, "store: not supported, except for false: .*: set store to false", "store"),
        ({"previous_response_id": "resp_1"}, "give all items as input", "previous_response_id"),
        ({"include": ["message.output_text.logprobs"]}, "include: not supported", "include"),
        ({"background": True}, "background: not supported", "background"),
        ({"text": {"verbosity": "low"}}, "only its format is supported", "text"),
        ({"text": {"format": {"type": "json_schema", "name": "a", "schema": 1}}}, "should be a JSON schema", "text"),
        ({"reasoning": {"effort": 1}}, "reasoning", "reasoning"),
        ({"reasoning": {"budget": 1}}, "only its effort and summary are known", "reasoning"),
        ({"tools": [{"type": "web_search"}]}, "entry 0 has the type 'web_search'", "tools"),
        ({"tool_choice": "required"}, "tools has no function that it allows", "tool_choice"),
        ({"tool_choice": "some"}, "should be 'none', 'auto', 'required'", "tool_choice"),
        ({"input": []}, "input: give text", "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "item 0 is .*: set store to false", "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "item 0: content: part 0", "input"),
        ({"input": [{"role": "user", "content": "a", "x": 1}]}, "unknown key 'x'", "input"),
        ({"input": [{"role": "user", "content": ""}, {"role": "wizard", "content": "a"}]}, "wizard", "input"),
        ({"max_output_tokens": 0}, "max_output_tokens", "max_output_tokens"),
        ({"temperature": 9}, "temperature", "temperature"),
    ],
)
async def test_invalid_request_names_the_field_of_this_api(
    site: Site, more: dict[str, Any], text: str, param: str
) -> None:
    with pytest.raises(BadRequestError, match=text) as caught:
        await respond(site, **more)
    assert caught.value.param == param


def test_field_that_changes_no_answer_is_accepted() -> None:
    asked = {"model": "j", "input": "a"}
    for more in (
        {"include": ["reasoning.encrypted_content"]},
        {"metadata": {"a": "b"}, "prompt_cache_key": "k", "stream_options": {"include_obfuscation": False}},
        {"store": False, "truncation": "disabled", "text": {"format": {"type": "text"}}, "reasoning": {}},
        {"previous_response_id": None, "top_logprobs": 0, "background": False},
        {"reasoning": {"effort": None, "summary": "auto"}, "client_metadata": {"session_id": "a"}},
    ):
        assert chat_of_response({**asked, **more}) == chat_of_response(asked)


async def test_error_in_a_stream_is_raised_by_the_client(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlboost.services.rollout_manager.serving.completion.Choice.add", None)
    with pytest.raises(APIError, match="the stream failed"):
        [event async for event in await respond(site, "ok", stream=True)]


async def test_base_url_without_version_gets_a_hint(site: Site) -> None:
    answer = await site.http.post("/responses", headers=BEARER, json={})
    assert "end the client's base_url with /v1" in answer.json()["error"]["message"]
