"""An agent by Anthropic's Messages API over HTTP, against a real manager and workers with a random model.

The tokens of the model are whole calls, words and ends of turns, so that its random answers have calls.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.support.service_process import TOKEN
from tests.support.serving_system import CALLS, WAIT_S, System, calling_system
from tests.support.tool_model import ADD

TOOL = {"name": "add", "description": "Add.", "input_schema": ADD["function"]["parameters"]}
SESSION = {"X-Session-ID": "messages"}


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    with calling_system(tmp_path_factory.mktemp("messages")) as system:
        yield system


@pytest.fixture
def client(system: System) -> Iterator[httpx.Client]:
    headers = {"x-api-key": TOKEN, "anthropic-version": "2023-06-01"}
    with httpx.Client(base_url=system.manager.url, headers=headers, timeout=WAIT_S) as client:
        yield client


def read(stream: str) -> dict[str, Any]:
    """Return the message of a stream, built from its events as Anthropic's library does."""
    message: dict[str, Any] = {}
    arguments = ""
    for line in stream.splitlines():
        if not line.startswith("data: "):
            continue
        event: dict[str, Any] = json.loads(line.removeprefix("data: "))
        match event["type"]:
            case "message_start":
                message = event["message"]
            case "content_block_start":
                assert event["index"] == len(message["content"])
                message["content"].append(event["content_block"])
                arguments = ""
            case "content_block_delta" if event["delta"]["type"] == "text_delta":
                message["content"][event["index"]]["text"] += event["delta"]["text"]
            case "content_block_delta":
                arguments += event["delta"]["partial_json"]
            case "content_block_stop" if arguments:
                message["content"][event["index"]]["input"] = json.loads(arguments)
            case "message_delta":
                message |= event["delta"]
                message["usage"] |= event["usage"]
    assert stream.rstrip().endswith('{"type": "message_stop"}')
    return message


def test_agent_continues_with_its_session_streamed_or_not(client: httpx.Client) -> None:
    messages: list[Any] = [{"role": "user", "content": "t3 t4"}]
    asked = {"model": "tiny", "max_tokens": 24, "messages": messages, "tools": [TOOL]}
    n_before, n_calls = 0, 0
    for turn in range(12):
        response = client.post("/v1/messages", json=asked | {"stream": turn % 2 == 0}, headers=SESSION)
        assert response.status_code == 200, response.text
        made = response.json() if turn % 2 else read(response.text)
        assert made["usage"]["input_tokens"] > n_before
        n_before = made["usage"]["input_tokens"] + made["usage"]["output_tokens"]
        calls = [block for block in made["content"] if block["type"] == "tool_use"]
        assert {call["input"]["a"] for call in calls} <= set(CALLS)
        assert made["stop_reason"] == ("tool_use" if calls else "end_turn")
        n_calls += len(calls)
        results = [{"type": "tool_result", "tool_use_id": call["id"], "content": "t5"} for call in calls]
        messages.append({"role": "assistant", "content": made["content"]})
        messages.append({"role": "user", "content": results or "t6"})
    assert n_calls > 2


def test_counted_tokens_are_those_of_the_message(client: httpx.Client) -> None:
    asked: dict[str, Any] = {"model": "tiny", "system": "t3", "messages": [{"role": "user", "content": "t4 t5"}]}
    counted = client.post("/v1/messages/count_tokens", json=asked).json()
    made = client.post("/v1/messages", json=asked | {"max_tokens": 8}).json()
    assert counted == {"input_tokens": made["usage"]["input_tokens"]}


def test_errors_have_the_format_of_this_api(client: httpx.Client) -> None:
    asked: dict[str, Any] = {"model": "tiny", "max_tokens": 8, "messages": [{"role": "user", "content": "t4"}]}
    wrong: list[tuple[dict[str, Any], int, str, str]] = [
        ({"model": "none"}, 404, "not_found_error", "there is no job 'none'"),
        ({"thinking": {"type": "enabled"}}, 400, "invalid_request_error", "thinking: not supported"),
        ({"max_tokens": 1 << 20}, 400, "invalid_request_error", "maximum context length"),
    ]
    for more, status, kind, text in wrong:
        response = client.post("/v1/messages", json=asked | more)
        error = response.json()["error"]
        assert (response.status_code, error["type"]) == (status, kind)
        assert text in error["message"]
