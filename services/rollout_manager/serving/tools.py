"""Tools of a chat: their form in a request, and the calls in an answer."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import Any, NamedTuple

from rlboost.shared.model.tool_call_formats import FORMATS
from rlboost.shared.model.tool_calls import Call, CallStyle, read_calls

# --- in a request -----------------------------------------------------------------------------------------------------


def tools_of_request(value: object) -> list[dict[str, Any]]:
    """Return the tools of a request in the form in which `ToolEnvironment` gives them to the chat template.

    Raises:
        ValueError: the value is no list of functions with names of their own; the text names the entry.

    """
    if not isinstance(value, list):
        raise ValueError(f"{reprlib.repr(value)} should be a list of functions")  # noqa: TRY004 - pydantic's contract
    tools = [_tool(tool, f"entry {i}") for i, tool in enumerate(value)]
    seen: dict[str, int] = {}
    for i, tool in enumerate(tools):
        name = tool["function"]["name"]
        if name in seen:
            raise ValueError(f"entry {i} has the name {name!r}, as entry {seen[name]} has: give each function its own")
        seen[name] = i
    return tools


def _tool(value: Any, entry: str) -> dict[str, Any]:
    tool = _mapping(value, entry, '{"type": "function", "function": {"name", "description", "parameters"}}')
    if tool.get("type") != "function":
        raise ValueError(f"{entry} has the type {reprlib.repr(tool.get('type'))}: only 'function' is supported")
    if unknown := sorted(tool.keys() - {"type", "function"}):
        raise ValueError(f"{entry} has the unknown key {unknown[0]!r}: remove it")
    function = _mapping(tool.get("function"), f"{entry}: function", "an object with name and parameters")
    if unknown := sorted(function.keys() - {"name", "description", "parameters", "strict"}):
        raise ValueError(f"{entry}: function has the unknown key {unknown[0]!r}: remove it")
    name, description = function.get("name"), function.get("description", "")
    if not isinstance(name, str) or not name.strip():
        raise ValueError(f"{entry}: function.name is {reprlib.repr(name)}: should be text")
    if not isinstance(description, str):
        raise ValueError(f"{entry}: function.description is {reprlib.repr(description)}: should be text")  # noqa: TRY004 - as above
    parameters = _mapping(
        function.get("parameters", {"type": "object", "properties": {}}),
        f"{entry}: function.parameters",
        "the JSON schema of an object",
    )
    if parameters.setdefault("type", "object") != "object":
        raise ValueError(
            f"{entry}: function.parameters has the type {reprlib.repr(parameters['type'])}: should be 'object'"
        )
    if not isinstance(parameters.setdefault("properties", {}), dict):
        raise ValueError(f"{entry}: function.parameters.properties should be an object")  # noqa: TRY004 - as above
    if not isinstance(function.get("strict", False), bool):
        raise ValueError(f"{entry}: function.strict should be true or false")  # noqa: TRY004 - as above
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


def _mapping(value: Any, place: str, form: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{place} is {reprlib.repr(value)}: should be {form}")  # noqa: TRY004 - as above
    return {key: inner for key, inner in value.items() if inner is not None}


# --- in an answer -----------------------------------------------------------------------------------------------------


class ToolCall(NamedTuple):
    """One call of an answer."""

    id: str
    name: str
    arguments: str
    """A JSON object."""

    def public(self) -> dict[str, Any]:
        """Return it as OpenAI's API has it."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


NewId = Callable[[int], str]
"""Number of a call in its answer -> an id."""
_ID_CHARACTERS = "abcdefghijklmnopqrstuvwxyz0123456789"
_ID_LENGTH = 9
"""With letters and digits only, as templates of Mistral need."""
_MAX_OPENING = 64
"""Characters after which an opening bracket without a name is text."""


def call_ids(answer: str) -> NewId:
    """Return the ids of an answer's calls: the same for the same answer, so that a repeated request has the same."""

    def new_id(number: int) -> str:
        value = int.from_bytes(blake2b(f"{answer}/{number}".encode(), digest_size=8).digest(), "little")
        digits = []
        for _ in range(_ID_LENGTH):
            value, digit = divmod(value, len(_ID_CHARACTERS))
            digits.append(_ID_CHARACTERS[digit])
        return "".join(digits)

    return new_id


class CallReader:
    """Reads the tool calls of one answer; text before the first of them is returned at once, the rest at the end.

    Calls are read from the text with special tokens, by the reader that `ToolEnvironment` uses. A call that cannot be
    read stays text.
    """

    def __init__(
        self,
        style: CallStyle,
        tools: Sequence[Mapping[str, Any]],
        new_id: NewId,
        *,
        in_thought: bool = False,
        only_first: bool = False,
    ) -> None:
        """Start an answer.

        Args:
            style: how the model's chat template writes calls.
            tools: their schemas.
            new_id: makes ids of calls.
            in_thought: whether the answer begins inside of a thought that the prompt opened.
            only_first: whether calls after the first one stay text.

        """
        self._style, self._tools, self._new_id = style, tools, new_id
        self._in_thought, self._only_first = in_thought, only_first
        self._begin = FORMATS[style.format].begin
        found = self._begin.search(style.example)
        written = found[0].strip() if found else ""
        self._tag = (written.partition("NAME")[0].split() or [""])[0]
        """What the template begins a call with, in most formats."""
        self._opening = "" if written else style.example.strip()[:1]
        """The bracket that begins a call where no tag does."""
        self._pieces: list[str] = []
        self._n_returned = 0
        """Characters of the text, with special tokens, whose text has been returned."""
        self._tail = ""
        """The text after them, until a call may have begun."""
        self._has_begun = False
        self._special = set[str]()
        """The special tokens of this answer, which are not part of its text."""

    def add(self, text: str, special: Collection[str] = ()) -> str:
        """Add new text with special tokens and return text, without them, that is certainly outside of calls.

        Args:
            text: follows the text before.
            special: the texts of the special tokens among its tokens.

        """
        self._special.update(special)
        self._pieces.append(text)
        if self._has_begun:
            return ""
        self._tail += text
        end = self._n_certain()
        certain, self._tail = self._tail[:end], self._tail[end:]
        self._n_returned += end
        return self._plain(certain)

    def finish(self, end: str) -> tuple[str, list[ToolCall]]:
        """Return the rest of the text outside of calls, and the calls.

        Args:
            end: the stop token that the model has generated, which ends calls in some formats; empty if there is none.

        """
        text = "".join(self._pieces)
        found = read_calls(text + end, self._style, self._tools, in_thought=self._in_thought)
        read = [(call, given) for call in found if (given := _json(call)) is not None]
        if self._only_first:
            read = read[:1]
        calls, taken = list[ToolCall](), set[str]()
        for i, (call, arguments) in enumerate(read):
            own = call.id if call.id and call.id not in taken else self._new_id(i)
            taken.add(own)
            calls.append(ToolCall(_encodable(own), _encodable(call.name), arguments))
        kept = [call for call, _ in read]
        # Calls in one pair of tags share their place: it is left out of the text if all of them are returned.
        spans = dict.fromkeys((call.start, call.end) for call in kept)
        whole = [span for span in spans if sum((call.start, call.end) == span for call in found) == _count(kept, span)]
        rest = self._plain("".join(_outside(text, self._n_returned, whole)))
        return (rest.rstrip() if calls else rest), calls

    def _n_certain(self) -> int:
        """Return how many characters of the tail are before any call and any beginning of one."""
        tail = self._tail
        if found := self._begin.search(tail):
            self._has_begun = True
            return len(tail[: found.start()].rstrip())
        end = len(tail) - max((overlap(tail, tag) for tag in (self._tag, *self._special)), default=0)
        if self._opening and (at := tail.rfind(self._opening, max(0, len(tail) - _MAX_OPENING))) >= 0:
            end = min(end, at)
        return len(tail[:end].rstrip())  # space before a call is left out

    def _plain(self, text: str) -> str:
        for special in self._special:
            text = text.replace(special, "")
        return text


def overlap(text: str, tag: str) -> int:
    """Return how many characters at the end of the text could begin the tag."""
    return next((n for n in range(min(len(tag) - 1, len(text)), 0, -1) if text.endswith(tag[:n])), 0)


def _count(calls: Sequence[Call], span: tuple[int, int]) -> int:
    return sum((call.start, call.end) == span for call in calls)


def _outside(text: str, at: int, spans: Sequence[tuple[int, int]]) -> Iterator[str]:
    for start, end in spans:
        yield text[at : max(at, start)]
        at = max(at, end)
    yield text[at:]


def _json(call: Call) -> str | None:
    """Return a call's arguments as JSON text; None if they cannot be read, or JSON has no number for one."""
    if call.problem:
        return None
    try:
        text = json.dumps(call.arguments, ensure_ascii=False, allow_nan=False)
    except ValueError:
        return None
    # JSON can spell half of a character, which no encoding accepts.
    return text if _encodable(text) == text else json.dumps(call.arguments)


def _encodable(text: str) -> str:
    return text.encode(errors="backslashreplace").decode()
