"""OpenAI's Responses API as a translation to and from chat completions."""

from __future__ import annotations

import reprlib
from collections.abc import Iterator, Mapping
from typing import Any

from rlboost.services.rollout_manager.serving.completion import KEEP_ALIVE
from rlboost.services.rollout_manager.serving.schemas import IGNORED, error_object, invalid_value, require_defaults
from rlboost.shared.http.problem import Problem

# --- requests ---------------------------------------------------------------------------------------------------------


_SAME = ("model", "stream", "temperature", "top_p", "parallel_tool_calls")
"""Fields that chat completions have, too."""
_DEFAULTS: Mapping[str, tuple[Any, ...]] = {
    "background": (False,),
    "include": ([], ["reasoning.encrypted_content"]),  # of reasoning items, which no answer here has
    "store": (False,),
    "top_logprobs": (0,),
    "truncation": ("disabled",),
}
"""Unsupported field -> its values that are accepted."""
_IGNORED = (IGNORED - {"store"}) | {"client_metadata", "stream_options"}
_TEXT_PARTS = ("input_text", "output_text", "text")
CHAT_NAMES = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "response_format": "text",
    "reasoning_effort": "reasoning",
}
"""Field of a chat -> its name here."""


def chat_of_response(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return the body of the chat that a request stands for.

    Raises:
        Problem: 400, naming the first field or item that is not supported.

    """
    given = {name: value for name, value in raw.items() if value is not None and name not in _IGNORED}
    body: dict[str, Any] = {name: given.pop(name) for name in _SAME if name in given}
    if body.get("stream"):
        body["stream_options"] = {"include_usage": True}
    if "max_output_tokens" in given:
        body["max_tokens"] = given.pop("max_output_tokens")
    for name, translated in (("tools", _tools), ("tool_choice", _tool_choice)):
        if name in given:
            body[name] = translated(given.pop(name))
    for name, read in (("text", _format), ("reasoning", _reasoning)):
        if name in given:
            body |= read(given.pop(name))
    messages = _messages(given.pop("input", []))
    if (instructions := given.pop("instructions", None)) is not None:
        messages.insert(0, {"role": "system", "content": _text(instructions, "instructions", "instructions")})
    if not messages:
        raise invalid_value("input", "input: give text or a list of items that is not empty")
    require_defaults(given, _DEFAULTS, _ADVICE)
    return {**body, "messages": messages}


_SEND_ITEMS = "responses are not stored: set store to false in the client, which then sends the items themselves"
_ADVICE = {
    "store": _SEND_ITEMS,
    "previous_response_id": "responses are not stored: give all items as input",
    "conversation": "conversations are not stored: give all items as input, and the header X-Session-ID",
}


def _messages(given: Any) -> list[dict[str, Any]]:
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    if not isinstance(given, list):
        raise invalid_value("input", f"input: {reprlib.repr(given)} should be text or a list of items")
    messages: list[dict[str, Any]] = []
    for i, one in enumerate(given):
        item = {name: value for name, value in one.items() if value is not None} if isinstance(one, dict) else {}
        place, kind = f"input: item {i}", item.get("type", "message")
        if kind == "message" and isinstance(item.get("role"), str):
            _known(item, place, {"type", "role", "content", "id", "status", "phase"})
            messages.append({"role": item["role"], "content": _text(item.get("content"), f"{place}: content", "input")})
        elif kind == "function_call":
            _known(item, place, {"type", "call_id", "name", "arguments", "id", "status"})
            function = {"name": item.get("name"), "arguments": item.get("arguments", "{}")}
            call = {"id": item.get("call_id"), "type": "function", "function": function}
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": ""})
            messages[-1].setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            _known(item, place, {"type", "call_id", "output", "id", "status"})
            content = _text(item.get("output"), f"{place}: output", "input")
            messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": content})
        else:
            advice = (
                _SEND_ITEMS if kind == "item_reference" else "give a message with a role, a function_call or its output"
            )
            detail = f"{place} is {reprlib.repr(one)}: {advice}"
            raise invalid_value("input", detail)
    return messages


def _known(item: Mapping[str, Any], place: str, names: set[str]) -> None:
    if unknown := sorted(item.keys() - names):
        raise invalid_value("input", f"{place} has the unknown key {unknown[0]!r}: remove it")


def _text(given: Any, place: str, param: str) -> str:
    if isinstance(given, str):
        return given
    if not isinstance(given, list):
        raise invalid_value(param, f"{place} is {reprlib.repr(given)}: should be text")
    texts = []
    for i, part in enumerate(given):
        text = part.get("text") if isinstance(part, dict) and part.get("type") in _TEXT_PARTS else None
        if not isinstance(text, str):
            raise invalid_value(param, f"{place}: part {i} is {reprlib.repr(part)}: only parts of text are supported")
        texts.append(text)
    return "".join(texts)


def _tools(given: Any) -> Any:
    """Return tools as chats have them, where a function is an object of its own; other forms as they are."""
    if not isinstance(given, list):
        return given
    return [
        {"type": "function", "function": {name: value for name, value in tool.items() if name != "type"}}
        if isinstance(tool, dict) and tool.get("type") == "function"
        else tool
        for tool in given
    ]


def _tool_choice(given: Any) -> Any:
    """Return the choice as chats have it, where a function is an object of its own."""
    if isinstance(given, dict) and given.get("type") == "function":
        return {"type": "function", "function": {"name": given.get("name")}}
    return given


def _format(given: Any) -> dict[str, Any]:
    """Return the form of the answer as chats have it, where a schema is in an object of its own."""
    text = {name: value for name, value in given.items() if value is not None} if isinstance(given, dict) else None
    if text is None or text.keys() - {"format"}:
        raise invalid_value("text", f"text is {reprlib.repr(given)}: only its format is supported")
    form = text.get("format", {"type": "text"})
    if isinstance(form, dict) and form.get("type") == "json_schema":
        form = {"type": "json_schema", "json_schema": {name: value for name, value in form.items() if name != "type"}}
    return {} if form == {"type": "text"} else {"response_format": form}


def _reasoning(given: Any) -> dict[str, Any]:
    """Return the effort as chats have it. How to summarize the reasoning changes nothing: no answer has a summary."""
    config = {name: value for name, value in given.items() if value is not None} if isinstance(given, dict) else None
    if config is None or config.keys() - {"effort", "summary", "generate_summary"}:
        raise invalid_value("reasoning", f"reasoning is {reprlib.repr(given)}: only its effort and summary are known")
    return {"reasoning_effort": config["effort"]} if "effort" in config else {}


# --- responses --------------------------------------------------------------------------------------------------------


class ResponseWriter:
    """Writes one response: whole, or as the events of a stream."""

    def __init__(self, raw: Mapping[str, Any]) -> None:
        """Take the request, some of whose fields a response repeats."""
        self._raw = raw
        self._head: dict[str, Any] = {}
        self._id = ""
        self._text = ""
        self._has_message = False
        self._output: list[dict[str, Any]] = []
        self._finish = ""
        self._usage: dict[str, Any] | None = None
        self._n_events = 0

    def whole(self, chat: Mapping[str, Any]) -> dict[str, Any]:
        """Return the response to a request whose chat completion is given."""
        self._begin(chat)
        (choice,) = chat["choices"]
        message = choice["message"]
        calls = message.get("tool_calls") or []
        if message["content"] or not calls:
            self._output.append(self._message(message["content"] or "", "completed"))
        self._output += [self._call(i, call) for i, call in enumerate(calls)]
        self._finish, self._usage = choice["finish_reason"], chat["usage"]
        return self._response(self._status)

    def add(self, chunk: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield the events of a chunk of the chat completion."""
        if not self._head:
            self._begin(chunk)
            for name in ("created", "in_progress"):
                yield self._event(f"response.{name}", response=self._response("in_progress"))
        self._usage = chunk.get("usage") or self._usage
        for choice in chunk["choices"]:
            self._finish = choice["finish_reason"] or self._finish
            delta = choice["delta"]
            if text := delta.get("content"):
                yield from self._add_text(text)
            for call in delta.get("tool_calls") or ():
                yield from self._end_text()
                yield from self._add_call(call)

    def end(self) -> Iterator[dict[str, Any]]:
        """Yield the last events."""
        if not self._output and not self._has_message:
            yield from self._begin_text()  # an answer without text
        yield from self._end_text()
        yield self._event(f"response.{self._status}", response=self._response(self._status))

    def failed(self, problem: Problem) -> dict[str, Any]:
        """Return the event of an error, which the library raises."""
        error = error_object(problem)
        return self._event("error", code=error["code"], message=error["message"], param=error["param"], error=error)

    @property
    def keep_alive(self) -> str:
        """Return an event without content."""
        return KEEP_ALIVE

    @property
    def _status(self) -> str:
        return "incomplete" if self._finish == "length" else "completed"

    def _begin(self, chat: Mapping[str, Any]) -> None:
        self._id = str(chat["id"]).rpartition("-")[2]
        self._head = {"created_at": chat["created"], "model": chat["model"]}

    def _add_text(self, text: str) -> Iterator[dict[str, Any]]:
        if not self._has_message:
            yield from self._begin_text()
        self._text += text
        place = {"item_id": f"msg_{self._id}", "output_index": 0, "content_index": 0}
        yield self._event("response.output_text.delta", **place, delta=text, logprobs=[])

    def _begin_text(self) -> Iterator[dict[str, Any]]:
        self._has_message = True
        item = {**self._message("", "in_progress"), "content": []}
        yield self._event("response.output_item.added", output_index=0, item=item)
        place = {"item_id": item["id"], "output_index": 0, "content_index": 0}
        yield self._event("response.content_part.added", **place, part=_part(""))

    def _end_text(self) -> Iterator[dict[str, Any]]:
        if not self._has_message or self._output:
            return
        item = self._message(self._text, "completed")
        self._output.append(item)
        place = {"item_id": item["id"], "output_index": 0, "content_index": 0}
        yield self._event("response.output_text.done", **place, text=self._text, logprobs=[])
        yield self._event("response.content_part.done", **place, part=_part(self._text))
        yield self._event("response.output_item.done", output_index=0, item=item)

    def _add_call(self, call: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        at, item = len(self._output), self._call(call["index"], call)
        self._output.append(item)
        started = {**item, "arguments": "", "status": "in_progress"}
        place = {"item_id": item["id"], "output_index": at}
        yield self._event("response.output_item.added", output_index=at, item=started)
        yield self._event("response.function_call_arguments.delta", **place, delta=item["arguments"])
        yield self._event(
            "response.function_call_arguments.done", **place, name=item["name"], arguments=item["arguments"]
        )
        yield self._event("response.output_item.done", output_index=at, item=item)

    def _message(self, text: str, status: str) -> dict[str, Any]:
        return {
            "id": f"msg_{self._id}",
            "type": "message",
            "status": status,
            "role": "assistant",
            "content": [_part(text)],
        }

    def _call(self, number: int, call: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "id": f"fc_{self._id}_{number}",
            "type": "function_call",
            "status": "completed",
            "call_id": call["id"],
            "name": call["function"]["name"],
            "arguments": call["function"]["arguments"],
        }

    def _response(self, status: str) -> dict[str, Any]:
        raw = {name: value for name, value in self._raw.items() if value is not None}
        return {
            "id": f"resp_{self._id}",
            "object": "response",
            **self._head,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "output": list(self._output),
            "instructions": raw.get("instructions"),
            "max_output_tokens": raw.get("max_output_tokens"),
            "metadata": raw.get("metadata", {}),
            "parallel_tool_calls": raw.get("parallel_tool_calls", True),
            "previous_response_id": None,
            "store": False,
            "temperature": raw.get("temperature", 1.0),
            "text": {"format": (raw.get("text") or {}).get("format") or {"type": "text"}},
            "tool_choice": raw.get("tool_choice", "auto"),
            "tools": raw.get("tools", []),
            "top_p": raw.get("top_p", 1.0),
            "truncation": "disabled",
            "usage": None if status == "in_progress" else _usage(self._usage),
        }

    def _event(self, kind: str, **content: Any) -> dict[str, Any]:
        self._n_events += 1
        return {"type": kind, "sequence_number": self._n_events - 1, **content}


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _usage(usage: Mapping[str, Any] | None) -> dict[str, Any] | None:
    if usage is None:
        return None
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage["total_tokens"],
    }
