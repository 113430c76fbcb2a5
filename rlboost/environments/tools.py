"""An environment of plain functions, which the model calls as Hermes and Qwen do.

A call is `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`. The chat template has to know tools.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Sequence
from typing import Any

from pydantic import TypeAdapter, ValidationError
from pydantic_core import ArgsKwargs

from shared.environment import Said, Step

_MALFORMED = "error: a call is JSON with name and arguments"
_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)


class ToolEnvironment:
    """Answers calls with what the functions return, and is done at the first turn without a call.

    A subclass gives the reward::

        class Sums(ToolEnvironment):
            def __init__(self) -> None:
                super().__init__([add, multiply])

            def score(self, text: str) -> float:
                return float(self.row["answer"] in text)

    A call that cannot be made is answered with what is wrong, for the model to read.
    """

    def __init__(self, functions: Sequence[Callable[..., Any]]) -> None:
        """Offer functions whose parameters have types and can be given by name.

        Args:
            functions: they may be async; a docstring's first paragraph says what one does, and
                `Annotated[int, Field(description=...)]` what a parameter is.

        Raises:
            TypeError: one has no name, or another's, or a parameter that cannot be given by name.

        """
        self._tools: dict[str, _Tool] = {}
        for function in functions:
            tool = _Tool(function)
            if tool.name in self._tools:
                raise TypeError(f"{tool.name}: two tools have this name: give each function one of its own")
            self._tools[tool.name] = tool
        self.tools = [tool.schema for tool in self._tools.values()]
        self.row: dict[str, Any] = {}
        """The row of the data, once the conversation has begun."""
        self.n_calls = 0
        """How many calls were made, successfully or not."""

    def reset(self, row: dict[str, Any], seed: int) -> Said | None:
        """See `Environment.reset`; the conversation begins with the row's prompt."""
        del seed
        self.row = row
        return None

    async def step(self, text: str) -> Step:
        """See `Environment.step`."""
        calls = _CALL.findall(text)
        if not calls:
            return Step(reward=self.score(text), done=True)
        self.n_calls += len(calls)
        return Step([await self._answer(call) for call in calls])

    def score(self, text: str) -> float:
        """Return the reward of a conversation that ends with this turn; 0 unless a subclass says otherwise."""
        del text
        return 0.0

    async def _answer(self, call: str) -> dict[str, Any]:
        try:
            body = json.loads(call)
            name, arguments = body["name"], body.get("arguments") or {}
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            return _message("", f"{_MALFORMED}: {error}")
        if not isinstance(name, str):
            return _message("", f"{_MALFORMED}: the name is to be text")
        if name not in self._tools:
            return _message(name, f"error: there is no tool {name!r}, only {', '.join(self._tools)}")
        try:
            return _message(name, await self._tools[name].call(arguments))
        except ValidationError as error:
            wrong = "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors())
            return _message(name, f"error: {wrong}")
        except Exception as error:  # noqa: BLE001 - a tool that fails is something for the model to learn from
            return _message(name, f"error: {type(error).__name__}: {error}")


class _Tool:
    def __init__(self, function: Any) -> None:
        name = getattr(function, "__name__", None)
        if name is None:
            raise TypeError(f"{function!r}: a tool is called by its function's name: wrap this in a function with def")
        self.name: str = name
        self._call: TypeAdapter[Any] = TypeAdapter(function)
        parameters = self._call.json_schema()
        if parameters.get("type") != "object":
            raise TypeError(f"{name}: a tool's parameters are given by name: let none be positional only")
        about = (inspect.getdoc(function) or "").partition("\n\n")[0]
        described = {"name": name, "description": about, "parameters": parameters}
        self.schema: dict[str, Any] = {"type": "function", "function": described}

    async def call(self, arguments: dict[str, Any]) -> str:
        result = self._call.validate_python(ArgsKwargs((), arguments))
        if inspect.isawaitable(result):
            result = await result
        return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=str)


def _message(name: str, content: str) -> dict[str, Any]:
    return {"role": "tool", "name": _sayable(name), "content": _sayable(content)}


def _sayable(text: str) -> str:
    # JSON that the model writes can spell half a character, which is in no encoding and could not be sent on.
    return text.encode(errors="backslashreplace").decode()
