"""How a model writes tool calls, and how they are read.

The chat template decides: `call_style` renders one known call through it and accepts the format whose reader returns
exactly that call. Pure: needs neither torch nor a tokenizer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rlboost.shared.model.tool_call_formats import FORMATS, TYPE_NAMES, Tools, Unreadable

Messages = list[dict[str, Any]]
Render = Callable[[Messages, list[dict[str, Any]], bool], str]
"""Renders messages and tools through a chat template, with or without the generation prompt. May raise anything."""


@dataclass(frozen=True, slots=True)
class CallStyle:
    """How the chat template of a model writes tool calls."""

    format: str = "hermes"
    """A key of `FORMATS`; empty if no reader reads the calls."""
    example: str = '<tool_call>\n{"name": "NAME", "arguments": {"KEY": "VALUE"}}\n</tool_call>'
    """A call as the template writes it."""
    as_text: bool = False
    """Whether the template takes a call's arguments as JSON text rather than as a mapping."""
    problem: str = ""
    """Why no reader reads the calls, and what to do; empty if one does."""


HERMES = CallStyle()


@dataclass(frozen=True, slots=True)
class Call:
    """A tool call in a turn of the model."""

    name: str
    arguments: dict[str, Any]
    start: int
    """Position of its first character in the turn."""
    end: int
    """Position after its last character. Calls in one pair of tags share their positions."""
    id: str = ""
    """As the model wrote it; empty in most formats."""
    problem: str = ""
    """Why it cannot be read; empty if it can. Then `name` and `arguments` are empty."""


def read_calls(text: str, style: CallStyle, tools: Tools = (), *, in_thought: bool = False) -> list[Call]:
    """Return the tool calls of a turn in their order; what a thought quotes is no call.

    Args:
        text: the turn, with special tokens.
        style: how the chat template writes calls.
        tools: schemas of the tools; formats without types of their own take the types of arguments from them.
        in_thought: whether the turn begins inside of a thought.

    Returns:
        The calls up to the `_MAX_PROBLEMS`-th that cannot be read.

    """
    form, found = FORMATS[style.format], list[Call]()
    at = _after_thought(text, 0) if in_thought else 0
    begin, n_problems = None, 0
    while at is not None and n_problems < _MAX_PROBLEMS:
        if begin is None or begin.start() < at:
            begin = form.begin.search(text, at)
        if begin is None:
            break
        thought = _THOUGHT.search(text, at, begin.start())
        if thought is not None:
            at = _after_thought(text, thought.end(), thought[0])
            continue
        start = begin.start()
        try:
            calls, end = form.read(text, begin, tools)
            found += [Call(name, arguments, start, end, given) for name, arguments, given in calls]
        except (Unreadable, RecursionError) as error:
            end = form.skip(text, begin)
            reason = str(error) if isinstance(error, Unreadable) else "it is nested too deeply"
            found.append(Call("", {}, start, end, problem=reason))
            n_problems += 1
        at = max(end, begin.end(), start + 1)
    return found


_MAX_PROBLEMS = 16
"""Each call that cannot be read may be tried to the end of the turn, which takes time."""


def opens_thought(text: str) -> bool:
    """Return True if the text before a turn, a prompt or an observation, opens a thought in which the turn begins."""
    return text.rstrip().endswith(tuple(_THOUGHTS))


def guessed_style(text: str, tools: Tools = ()) -> CallStyle:
    """Return a style in which a turn has calls that can be read, for use without a model; else that of Hermes."""
    styles = map(CallStyle, FORMATS)
    found = (
        style for style in styles if (calls := read_calls(text, style, tools)) and not any(c.problem for c in calls)
    )
    return next(found, HERMES)


def call_style(render: Render) -> CallStyle:
    """Return how a chat template writes tool calls, with a `problem` if no reader reads them.

    A format is accepted only if what it reads in a rendered call is the call that was rendered: names, values, types.
    """
    shown, failed = _after_question(render, [], before=True)
    if _KNOWN_NAME not in shown:
        why = f" ({failed})" if failed else ""
        return CallStyle("", problem=f"the model's chat template does not show tools to the model{why}: {_REMEDY}")
    pieces = list[str]()
    for as_text in (False, True):
        piece, failed = _after_question(render, [called([(_KNOWN_NAME, _KNOWN)], as_text=as_text)])
        pieces.append(piece or failed)
        for name in FORMATS:
            style = CallStyle(name, as_text=as_text)
            if _same([(call.name, call.arguments) for call in read_calls(piece, style, [_KNOWN_TOOL])]):
                return _completed(style, render)
    if not any(_KNOWN_NAME in piece for piece in pieces):
        wrong = f"the model's chat template does not write tool calls (of one it makes {pieces[0][:200]!r})"
    else:
        piece = next(piece for piece in pieces if _KNOWN_NAME in piece)
        wrong = f"the model's chat template writes calls as {piece[:400]!r}, which no reader reads"
    return CallStyle("", problem=f"{wrong}: {_REMEDY}")


def style_of_turns(
    render: Render, end_ids: Collection[int], encode: Callable[[str], Sequence[int]], decode: Callable[[list[int]], str]
) -> CallStyle:
    """Return the `call_style` of a model, with a `problem` if a turn of the model could not end with a call.

    Args:
        render: renders through the model's chat template.
        end_ids: the tokens that end a turn.
        encode: text to token ids, without tokens that a tokenizer adds.
        decode: token ids to text, with special tokens.

    """
    style = call_style(render)
    if style.problem:
        return style
    after = text_to_result(render, style)
    if not after:
        return replace(style, format="", problem="the model's chat template leaves out the results of tool calls")
    ends = [decode([token]) for token in sorted(end_ids)]
    if set(end_ids).isdisjoint(encode(after)):
        problem = (
            f"a turn with a tool call would not end: the model's chat template writes {after!r} up to the result, "
            f"and the tokens that end a turn are only {', '.join(map(repr, ends))}: add the one that follows a "
            "call to eos_token_id in the model's generation_config.json"
        )
        return replace(style, format="", problem=problem)
    for end in ends:
        style = replace(style, example=style.example.removesuffix(end))
    return style


def text_to_result(render: Render, style: CallStyle) -> str:
    """Return what a template writes from a call to its result; empty if it leaves out the result."""
    messages = [called([("NAME", {"KEY": "VALUE"})], as_text=style.as_text), result(0, "NAME", _ASKED["content"] * 2)]
    try:
        piece = render([_ASKED, *messages], [_KNOWN_TOOL], True).partition(_ASKED["content"])[2]
    except Exception:  # noqa: BLE001 - a template is a program, which may raise anything
        return ""
    before, found, _ = piece.partition(_ASKED["content"])
    calls = read_calls(before, style)
    return before[calls[0].start :] if found and calls else ""


def end_of_call(text: str, at: int, style: CallStyle) -> int | None:
    """Return the position after the call, or the calls in one pair of tags, that a position is in; None if in none."""
    form = FORMATS[style.format]
    *_, begin = [None, *form.begin.finditer(text, 0, at)]
    try:
        end = form.read(text, begin, ())[1] if begin is not None else -1
    except Unreadable:
        return None
    return end if end > at else None


def called(calls: Sequence[tuple[str, dict[str, Any]]], *, as_text: bool) -> dict[str, Any]:
    """Return an assistant's message with calls, as chat templates take it; see `CallStyle.as_text`."""
    given = [(name, json.dumps(arguments, ensure_ascii=False) if as_text else arguments) for name, arguments in calls]
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"id": call_id(i), "type": "function", "function": {"name": name, "arguments": arguments}}
            for i, (name, arguments) in enumerate(given)
        ],
    }


def result(i: int, name: str, content: str) -> dict[str, Any]:
    """Return the message with the result of a turn's call `i`."""
    return {"role": "tool", "name": name, "tool_call_id": call_id(i), "content": content}


def call_id(i: int) -> str:
    """Return an id for a turn's call `i`: nine letters and digits, as templates of Mistral need."""
    return f"call{i:05d}"


# --- the known call ---

_ASKED = {"role": "user", "content": "\ue001asked\ue001"}
_KNOWN_NAME = "known_call"
_KNOWN = {
    "text": 'a "b" é <c>\nd',
    "digits": "12",
    "count": 42,
    "ratio": 2.5,
    "flag": True,
    "inner": {"key": [1, 2.5, "x", False, None]},
    "items": ["y", {"z": 1}],
}
_KNOWN_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": _KNOWN_NAME,
        "description": "Do nothing.",
        "parameters": {
            "type": "object",
            "properties": {
                key: {
                    "type": TYPE_NAMES[type(value)],
                    "description": key,
                    **({"items": {"type": "string"}} if isinstance(value, list) else {}),
                }
                for key, value in _KNOWN.items()
            },
            "required": list(_KNOWN),
        },
    },
}
_REMEDY = (
    "use a model or a chat_template.jinja that writes them in a known format (docs/environments.md lists them), or "
    "write an environment of your own, whose step reads the calls"
)


def _same(found: list[tuple[str, dict[str, Any]]]) -> bool:
    # As JSON text, since True == 1 == 1.0 in Python.
    return json.dumps(found, sort_keys=True) == json.dumps([(_KNOWN_NAME, _KNOWN)], sort_keys=True)


def _completed(style: CallStyle, render: Render) -> CallStyle:
    """Return a style whose format is known with what else the template says."""
    calls = [called([("NAME", {"KEY": "VALUE"})], as_text=style.as_text)]
    piece, _ = _after_question(render, calls)
    example = next((piece[call.start : call.end].strip() for call in read_calls(piece, style)), "")
    return replace(style, example=example)


def _after_question(render: Render, messages: Messages, *, before: bool = False) -> tuple[str, str]:
    """Return what a template writes for messages after a user's, or `before` it too, and why it cannot."""
    try:
        rendered = render([_ASKED, *messages], [_KNOWN_TOOL], False)
    except Exception as error:  # noqa: BLE001 - a template is a program, which may raise anything
        return "", f"{type(error).__name__}: {error}"
    return rendered if before else rendered.rpartition(_ASKED["content"])[2], ""


# --- thoughts ---

_THOUGHTS = {
    "<think>": "</think>",
    "[THINK]": "[/THINK]",
    "<|channel>thought": "<channel|>",
    "<seed:think>": "</seed:think>",
    "<|START_THINKING|>": "<|END_THINKING|>",
    " to=self<|message|>": "<|eom|>",
}
"""Tags that open a thought -> those that close it."""
_THOUGHT = re.compile("|".join(map(re.escape, _THOUGHTS)))


def _after_thought(text: str, at: int, opened: str = "") -> int | None:
    """Return the position after the thought that a position is in, None if it does not end."""
    closing = [_THOUGHTS[opened]] if opened else list(_THOUGHTS.values())
    ends = [place + len(tag) for tag in closing if (place := text.find(tag, at)) >= 0]
    return min(ends, default=None)
