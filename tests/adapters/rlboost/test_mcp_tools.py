"""Tools of MCP servers, against servers of the official package in processes of their own."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from contextlib import suppress
from typing import Any

import pytest

from rlboost.environments import ToolEnvironment
from rlboost.environments import mcp as adapter
from rlboost.environments.mcp import McpServer
from rlboost.environments.tools import Tool
from rlboost.shared.job.environment import ToolUnavailable
from tests.support.eventually import eventually
from tests.support.ports import reserve_port

COMMAND = [sys.executable, "-m", "tests.support.mcp_server"]
ENVIRONMENT = {"PYTHONPATH": os.pathsep.join(sys.path)}
SERVER = McpServer(COMMAND, env=ENVIRONMENT, timeout_s=60)
"""What a test breaks is started again by the next one."""


def call(name: str, **arguments: Any) -> str:
    return f'<tool_call>{{"name": "{name}", "arguments": {json.dumps(arguments)}}}</tool_call>'


async def answer(environment: ToolEnvironment, name: str, **arguments: Any) -> str:
    messages: Any = (await environment.step(call(name, **arguments))).observation
    return str(messages[0]["content"])


async def test_tools_of_a_server_are_called_with_their_schemas() -> None:
    environment = ToolEnvironment(SERVER.tools())
    (add,) = (tool["function"] for tool in environment.tools if tool["function"]["name"] == "add")
    assert add["description"] == "Add two numbers."
    assert add["parameters"]["required"] == ["a", "b"]
    assert await answer(environment, "add", a=3, b=4) == "7"
    assert await asyncio.gather(*(SERVER.call("add", {"a": i, "b": 1}) for i in range(50))) == [
        str(i + 1) for i in range(50)
    ]


async def test_error_of_a_tool_is_a_result_for_the_model() -> None:
    environment = ToolEnvironment(SERVER.tools())
    assert (await answer(environment, "fail")).startswith("error: Error executing tool fail")
    wrong = await answer(environment, "add", a="three")
    assert wrong.startswith("error: ")
    assert "b" in wrong
    hasty = ToolEnvironment(McpServer(COMMAND, env=ENVIRONMENT, timeout_s=1).tools())
    assert await answer(hasty, "wait", seconds=30) == "error: TimeoutError: no answer within 1 s"


@pytest.mark.parametrize(("fault", "limit_s"), [("hang", 3), ("die", 60)])
async def test_server_that_fails_loses_its_calls_and_is_started_again(
    monkeypatch: pytest.MonkeyPatch, fault: str, limit_s: float
) -> None:
    monkeypatch.setattr(adapter, "PING_LIMIT_S", 1)
    server = McpServer(COMMAND, env=ENVIRONMENT, timeout_s=limit_s)
    environment = ToolEnvironment(server.tools())
    before = await answer(environment, "pid")
    other = asyncio.create_task(server.call("wait", {"seconds": 0.9 * limit_s}))
    with pytest.raises(ToolUnavailable, match=r"the MCP server .* has failed"):
        await environment.step(call(fault))
    with pytest.raises(ToolUnavailable):
        await other
    assert await answer(environment, "pid") != before


@pytest.mark.parametrize(("limit", "value"), [("MAX_TOOLS", 5), ("MAX_PAGES", 0)])
def test_server_whose_list_of_tools_does_not_end_is_unavailable(
    monkeypatch: pytest.MonkeyPatch, limit: str, value: int
) -> None:
    monkeypatch.setattr(adapter, limit, value)
    with pytest.raises(ToolUnavailable, match="lists more than"):
        McpServer(COMMAND, env=ENVIRONMENT).tools()


async def test_server_that_has_died_unused_is_started_again() -> None:
    before = int(await SERVER.call("pid", {}))
    os.kill(before, 9)
    with suppress(ToolUnavailable):  # the first call may notice it
        await SERVER.call("pid", {})
    assert int(await SERVER.call("pid", {})) != before


async def test_call_that_is_cancelled_leaves_the_server_usable() -> None:
    calling = asyncio.create_task(SERVER.call("wait", {"seconds": 30}))
    await asyncio.sleep(0)
    calling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await calling
    assert await SERVER.call("add", {"a": 1, "b": 2}) == "3"


async def test_server_over_http_is_called_and_its_end_noticed() -> None:
    port = reserve_port(SERVER)
    process = await asyncio.create_subprocess_exec(*COMMAND, str(port), env={**os.environ, **ENVIRONMENT})
    server = McpServer(url=f"http://127.0.0.1:{port}/mcp", headers={"Authorization": "Bearer x"}, timeout_s=5)
    try:

        async def listed() -> list[Tool]:
            with suppress(ToolUnavailable):
                return server.tools(["add"])
            return []

        tools = await eventually(listed)
        assert [tool.name for tool in tools] == ["add"]
        assert await tools[0].call({"a": 3, "b": 4}) == "7"
    finally:
        process.kill()
        await process.wait()
    with pytest.raises(ToolUnavailable):
        await server.call("add", {"a": 3, "b": 4})


@pytest.mark.parametrize(
    ("command", "why"),
    [(["/no/such/program"], "FileNotFoundError"), ([sys.executable, "-c", "1"], "cannot be started")],
)
def test_server_that_cannot_be_started_is_unavailable(command: list[str], why: str) -> None:
    with pytest.raises(ToolUnavailable, match=why):
        McpServer(command).tools()


def test_wrong_use_of_a_server_is_rejected() -> None:
    with pytest.raises(ValueError, match="has no tool multiply, but add, fail"):
        SERVER.tools(["multiply"])
    for wrong in ({}, {"command": ["a"], "url": "http://b"}, {"command": "a b"}):
        with pytest.raises(ValueError, match="give either a command"):
            McpServer(**wrong)
