"""An environment whose tools are plain functions, or have a schema of their own, called as the chat template writes."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

from pydantic import TypeAdapter, ValidationError
from pydantic_core import ArgsKwargs

from rlboost.shared.errors import leaves
from rlboost.shared.job.environment import Message, Step, ToolUnavailable, run_plain
from rlboost.shared.model.tool_calls import Call, CallStyle, guessed_style, read_calls
from rlboost.shared.user_code import describe_error

MAX_RESULT_CHARACTERS = 1 << 20
"""The longest results that a model gets for the calls of one turn: more fit no context, and tokenizing them takes
hundreds of bytes for each character."""


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool that has its schema already, such as one of an MCP server."""

    name: str
    description: str
    parameters: dict[str, Any]
    """JSON schema of an object."""
    call: Callable[[dict[str, Any]], Awaitable[str]]
    """Returns the result for the model. What it raises is shown to the model, except `ToolUnavailable`."""
    misnamed: str = ""
    """What is wrong with its description, for the user."""

    @property
    def schema(self) -> dict[str, Any]:
        """Return the tool as a chat template takes it."""
        described = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": described}


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

    call_style: CallStyle | None = None
    """How the model writes calls. A job sets it to what the chat template of its model does; None: any known format."""
    in_thought = False
    """Whether the turn begins inside of a thought that the prompt opened. A job sets it before each turn."""

    def __init__(self, functions: Sequence[Callable[..., Any] | Tool]) -> None:
        """Register functions whose parameters are typed and can be passed by name, and tools.

        Args:
            functions: may be async, so that other conversations continue meanwhile. The docstring describes the tool
                up to its first section, and the parameters under `Args:`, as for TRL; `Annotated[int,
                Field(description=...)]` describes a parameter, too.

        Raises:
            TypeError: a function has no name, a duplicate name, or a positional-only parameter.

        """
        self._tools: dict[str, Tool] = {}
        for function in functions:
            tool = function if isinstance(function, Tool) else _tool_of(function)
            if tool.name in self._tools:
                raise TypeError(f"{tool.name}: two tools have this name: rename one of the functions")
            self._tools[tool.name] = tool
        self.tools = [tool.schema for tool in self._tools.values()]
        self._misnamed = "; ".join(tool.misnamed for tool in self._tools.values() if tool.misnamed)
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
        raw = text if text_raw is None else text_raw
        style = self.call_style or guessed_style(raw, self.tools)
        calls = read_calls(raw, style, self.tools, in_thought=self.in_thought)
        if not calls:
            return Step(reward=await run_plain(partial(self.score, text)), done=True)
        self.n_calls += len(calls)
        self._warning = self._misnamed
        answers, left = list[dict[str, Any]](), MAX_RESULT_CHARACTERS
        for call in calls:
            answer = await self._answer(call, style)
            if (n := len(answer["content"])) > left:
                answer = _message(call, f"error: the result has {n} characters, and {left} are left: ask for less")
            answers.append(answer)
            left -= n if n <= left else 0
        return Step(answers, warning=self._warning)

    def score(self, text: str) -> float:
        """Return the reward of a conversation that ends with this turn; 0 unless overridden."""
        del text
        return 0.0

    async def _answer(self, call: Call, style: CallStyle) -> dict[str, Any]:
        name = call.name
        if call.problem:
            return _message(call, f"error: the call cannot be read: {call.problem}; write it as {style.example}")
        if name not in self._tools:
            return _message(call, f"error: there is no tool {name!r}, only {', '.join(self._tools)}")
        try:
            return _message(call, await self._tools[name].call(call.arguments))
        except ValidationError as error:
            wrong = "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors())
            return _message(call, f"error: {wrong}")
        except Exception as error:  # a tool that fails is something for the model to learn from
            if any(isinstance(leaf, ToolUnavailable) for leaf in leaves(error)):
                raise
            self._warning = f"the tool {name} raised {describe_error(error, {'arguments': call.arguments})}"
            return _message(call, f"error: {type(error).__name__}: {error}")


def _tool_of(function: Any) -> Tool:
    name = getattr(function, "__name__", None)
    if name is None:
        raise TypeError(f"{function!r}: a tool is called by its function's name: wrap this in a function with def")
    arguments: TypeAdapter[Any] = TypeAdapter(function)
    parameters = arguments.json_schema()
    if parameters.get("type") != "object":
        raise TypeError(f"{name}: a tool's parameters are given by name: let none be positional only")
    about = _documentation_of(function)
    known = parameters.get("properties") or {}
    for parameter, text in about.parameters.items():
        if parameter in known:
            _describe(known[parameter], text)
    unknown = sorted(set(about.parameters) - set(known))
    misnamed = f"the docstring of the tool {name} describes {', '.join(unknown)}: no such parameter"
    is_async = inspect.iscoroutinefunction(function)

    async def call(given: dict[str, Any]) -> str:
        validated = partial(arguments.validate_python, ArgsKwargs((), given))
        result = validated() if is_async else await run_plain(validated)
        if inspect.isawaitable(result):
            result = await result
        return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=str)

    is_misnamed = unknown and parameters.get("additionalProperties") is False
    return Tool(name, about.text, parameters, call, misnamed if is_misnamed else "")


def _describe(schema: dict[str, Any], text: str) -> None:
    """Add a docstring's text about a parameter to its schema, unless its annotation has said it."""
    choices = _CHOICES.search(text)
    try:
        values = json.loads(choices[1]) if choices else None
    except ValueError:
        choices, values = None, None
    if choices and isinstance(values, list):
        schema.setdefault("enum", values)
        text = text[: choices.start()]
    schema.setdefault("description", text.strip())


class _Documentation(NamedTuple):
    text: str
    """What the tool does."""
    parameters: dict[str, str]
    """Name of a parameter -> its description."""


_SECTION = re.compile(r"(Args|Arguments|Parameters|Params|Returns?|Raises|Yields?):\s*")
_RULED = re.compile(r"(Parameters|Other Parameters|Returns|Raises|Yields|Examples?|Notes?|See Also)\s*\n\s*-{3,}\s*")
_FIELD = re.compile(r"[:@](param|parameter|arg|argument|returns?|rtype|type|raises?)\b\s*([^:]*):\s*(.*)")
_ENTRY = re.compile(r"\*{0,2}(\w+)\s*(?:\(.*?\))?\s*:\s*(.*)")
_RULED_ENTRY = re.compile(r"\*{0,2}(\w+)\s*(?::.*)?")
_CHOICES = re.compile(r"\(choices:\s*(\[.*?\])\s*\)\s*\Z", re.DOTALL)
_OF_PARAMETERS = ("Arg", "Param", "Other Param", "param", "arg")


def _documentation_of(function: Any) -> _Documentation:
    """Return what a docstring says, in the style of Google (as transformers reads it), numpy or Sphinx."""
    lines = (inspect.getdoc(function) or "").splitlines()
    starts = list(_sections(lines))
    text = "\n".join(lines[: starts[0][0] if starts else len(lines)]).strip()
    found = dict[str, str]()
    for (start, kind, heading), (end, _, _) in pairwise([*starts, (len(lines), "", "")]):
        if not heading.startswith(_OF_PARAMETERS):
            continue
        if kind == "field":
            match = _FIELD.match(lines[start].strip())
            words = match[2].split() if match else []
            if match and words:
                rest = (line.strip() for line in lines[start + 1 : end])
                found[words[-1]] = " ".join(filter(None, [match[3].strip(), *rest]))
            continue
        is_ruled = kind == "ruled"
        found.update(_entries(lines[start + (2 if is_ruled else 1) : end], _RULED_ENTRY if is_ruled else _ENTRY))
    return _Documentation(text, found)


def _sections(lines: Sequence[str]) -> Iterator[tuple[int, str, str]]:
    """Yield the line, style and heading of each section."""
    for i, line in enumerate(lines):
        if match := _SECTION.fullmatch(line.strip()):
            yield i, "google", match[1]
        elif match := _RULED.fullmatch("\n".join(lines[i : i + 2])):
            yield i, "ruled", match[1]
        elif match := _FIELD.match(line.strip()):
            yield i, "field", match[1]


def _entries(lines: Sequence[str], entry: re.Pattern[str]) -> Iterator[tuple[str, str]]:
    """Yield the names of a section and their texts; lines that are indented further continue a text."""
    name, parts, margin = "", list[str](), -1
    for line in filter(str.strip, lines):
        indent = len(line) - len(line.lstrip())
        margin = indent if margin < 0 else margin
        if indent < margin:
            break
        match = entry.fullmatch(line.strip()) if indent == margin else None
        if match is None:
            parts.append(line.strip())
            continue
        if name:
            yield name, " ".join(filter(None, parts))
        name, parts = match[1], [match[2].strip()] if entry.groups > 1 else []
    if name:
        yield name, " ".join(filter(None, parts))


def _message(call: Call, content: str) -> dict[str, Any]:
    message = {"role": "tool", "name": _sayable(call.name), "content": _sayable(content)}
    return {**message, "tool_call_id": _sayable(call.id)} if call.id else message


def _sayable(text: str) -> str:
    # JSON can spell a lone surrogate, which no encoding accepts.
    return text.encode(errors="backslashreplace").decode()
