"""An MCP server with good and bad tools: `python -m tests.support.mcp_server [PORT]`, over HTTP with a port."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from importlib.metadata import version

if version("mcp").startswith("2."):
    from mcp.server.mcpserver import MCPServer as FastMCP
else:
    from mcp.server.fastmcp import FastMCP

PORT = int(sys.argv[1]) if len(sys.argv) > 1 else 0
server = FastMCP("numbers")


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def fail() -> str:
    """Raise."""
    raise ValueError("no such row")


async def wait(seconds: float) -> str:
    """Wait, and answer pings meanwhile."""
    await asyncio.sleep(seconds)
    return "waited"


async def hang() -> str:
    """Answer nothing any more."""
    time.sleep(3600)  # noqa: ASYNC251 - this is the fault
    return ""


def die() -> str:
    """End the server."""
    os.kill(os.getpid(), signal.SIGKILL)
    return ""


def pid() -> str:
    """Return the server's process."""
    return str(os.getpid())


for tool in (add, fail, wait, hang, die, pid):
    server.add_tool(tool)

if __name__ == "__main__":
    if not PORT:
        server.run()
    elif version("mcp").startswith("2."):
        server.run("streamable-http", port=PORT)
    else:
        server.settings.port = PORT
        server.run("streamable-http")
