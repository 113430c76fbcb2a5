"""An environment whose tools are plain functions, called in the Hermes and Qwen format.

A call is `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`. The chat template must support tools.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Sequence
from typing import Any

from pydantic import TypeAdapter, ValidationError
from pydantic_core import ArgsKwargs

from rlboost.shared.job.environment import Message, Step
from rlboost.shared.user_code.errors import describe_error

_MALFORMED = "error: a call is JSON with name and arguments"
_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)


class ToolEnvironment:
    """Answers tool calls with the functions' results; ends at the first turn without a call.

    A subclass defines the reward::

        class Sums(ToolEnvironment):
            def __init__(self) -> None:
                super().__init__([add, multiply])

            def score(self, text: str) -> float:
                return float(self.row["answer"] in text)

    An invalid call is answered with an error message that the model reads.
    """

    def __init__(self, functions: Sequence[Callable[..., Any]]) -> None:
        """Register functions whose parameters are typed and can be passed by name.

        Args:
            functions: may be async; the first paragraph of the docstring describes the tool, and
                `Annotated[int, Field(description=...)]` a parameter.

        Raises:
            TypeError: a function has no name, a duplicate name, or a positional-only parameter.

        """
        self._tools: dict[str, _Tool] = {}
        for function in functions:
            tool = _Tool(function)
            if tool.name in self._tools:
                raise TypeError(f"{tool.name}: two tools have this name: rename one of the functions")
            self._tools[tool.name] = tool
        self.tools = [tool.schema for tool in self._tools.values()]
        self.row: dict[str, Any] = {}
        """The data row, set by `reset`."""
        self.n_calls = 0
        """Number of calls so far, successful or not."""
        self._warning = ""
        """About a function that raised in this turn."""

    def reset(self, row: dict[str, Any], seed: int) -> Message | None:
        """Start the conversation with the row's prompt."""
        del seed
        self.row = row
        return None

    async def step(self, text: str, *, text_raw: str | None = None) -> Step:
        """Answer the tool calls of a turn; see `Environment.step`."""
        # The tags of a call are special tokens in some tokenizers.
        calls = _CALL.findall(text if text_raw is None else text_raw)
        if not calls:
            return Step(reward=self.score(text), done=True)
        self.n_calls += len(calls)
        self._warning = ""
        return Step([await self._answer(call) for call in calls], warning=self._warning)

    def score(self, text: str) -> float:
        """Return the reward of a conversation that ends with this turn; 0 unless overridden."""
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
            self._warning = f"the tool {name} raised {describe_error(error, {'arguments': arguments})}"
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
    # JSON can spell a lone surrogate, which no encoding accepts.
    return text.encode(errors="backslashreplace").decode()
