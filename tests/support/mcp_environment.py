"""An environment with a tool of an MCP server."""

from __future__ import annotations

import sys

from rlboost.environments import ToolEnvironment
from rlboost.environments.mcp import McpServer

SERVER = McpServer([sys.executable, "-m", "tests.support.mcp_server"], timeout_s=10)


class Adds(ToolEnvironment):
    """Rewards a call of the tool with 1/2, and an even digit at the end with 1/2."""

    def __init__(self) -> None:
        super().__init__(SERVER.tools(["add"]))

    def score(self, text: str) -> float:
        """Return the reward of the last turn."""
        return 0.5 * (self.n_calls > 0) + 0.5 * (text.isdigit() and int(text) % 2 == 0)
