"""An agent of `openai-agents` with a function tool, as its documentation has it."""

from __future__ import annotations

from typing import Any

from agents import (
    Agent,
    MaxTurnsExceeded,
    ModelBehaviorError,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from agents.items import ToolCallItem
from openai import AsyncOpenAI, DefaultAsyncHttpxClient

from rlboost.agents import Session

HTTP = DefaultAsyncHttpxClient()

set_tracing_disabled(disabled=True)


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


async def run(session: Session, row: dict[str, Any]) -> float:
    """Return 1/2 for a call of the tool, and 1/2 for an even digit at the end."""
    client = AsyncOpenAI(base_url=session.base_url, api_key=session.key, http_client=HTTP, max_retries=10)
    adder = Agent(
        name="adder", instructions="Use add.", tools=[function_tool(add)], model=OpenAIResponsesModel("policy", client)
    )
    try:
        result = await Runner.run(adder, row["prompt"], max_turns=3)
    except (MaxTurnsExceeded, ModelBehaviorError):  # which the model causes, such as an answer that is cut off
        return 0.0
    has_called = any(isinstance(item, ToolCallItem) for item in result.new_items)
    text = str(result.final_output)
    return 0.5 * has_called + 0.5 * (text.isdigit() and int(text) % 2 == 0)
