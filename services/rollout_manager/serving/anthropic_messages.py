"""Anthropic's Messages API as a translation to and from chat completions."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from rlboost.services.rollout_manager.serving.completion import KEEP_ALIVE
from rlboost.services.rollout_manager.serving.schemas import (
    code_of,
    error_object,
    invalid_value,
    openai_problem,
    require_defaults,
)
from rlboost.shared.http.problem import Problem

# --- requests ---------------------------------------------------------------------------------------------------------


_SAME = ("model", "max_tokens", "stream", "temperature", "top_p", "top_k")
"""Fields that chat completions have, too."""
_DEFAULTS: Mapping[str, tuple[Any, ...]] = {
    "mcp_servers": ([],),
    "speed": ("standard",),
    "thinking": ({"type": "disabled"}, {"type": "adaptive"}),
}
"""Unsupported field -> its values that are accepted."""
_IGNORED = frozenset({"cache_control", "metadata", "service_tier", "user_profile_id"})
_UNTHREADED = "Thread unsupported request"
"""Title of the error after which tool runners of Anthropic's library send all messages themselves."""
CHAT_NAMES = {
    "stop": "stop_sequences",
    "parallel_tool_calls": "tool_choice",
    "response_format": "output_config",
    "reasoning_effort": "output_config",
}
"""Field of a chat -> its name here."""

_TOOL_DEFAULTS: Mapping[str, tuple[Any, ...]] = {"allowed_callers": (["direct"],), "defer_loading": (False,)}
_TOOL_KEYS = {"type", "name", "description", "input_schema", "strict", "cache_control", "eager_input_streaming"}
_TOOL_CHOICES = {"auto": "auto", "none": "none", "any": "required"}


def chat_of_messages(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return the body of the chat that a request stands for.

    Raises:
        Problem: 400, naming the first field, message or block that is not supported.

    """
    given = {name: value for name, value in raw.items() if value is not None and name not in _IGNORED}
    body: dict[str, Any] = {name: given.pop(name) for name in _SAME if name in given}
    for name in ("model", "max_tokens"):
        if name not in body:
            raise invalid_value(name, f"{name}: missing: give it")
    if body.get("stream"):
        body["stream_options"] = {"include_usage": True}
    if "stop_sequences" in given:
        body["stop"] = _list(given.pop("stop_sequences"), "stop_sequences", "texts")
    if "tools" in given:
        tools = _list(given.pop("tools"), "tools", "tools")
        body["tools"] = [_tool(tool, f"tools: entry {i}") for i, tool in enumerate(tools)]
    for name, read in (("tool_choice", _tool_choice), ("output_config", _output), ("context_management", _edits)):
        if name in given:
            body |= read(given.pop(name))
    messages = _all_messages(given.pop("system", None), given.pop("messages", None))
    if "thread" in given:
        raise openai_problem(
            400, _UNTHREADED, "thread: messages are not stored: send all of them each time", param="thread"
        )
    require_defaults(given, _DEFAULTS)
    return {**body, "messages": messages}


def _all_messages(system: Any, given: Any) -> list[dict[str, Any]]:
    first = [] if system is None else [{"role": "system", "content": _text(system, "system", "system")}]
    messages = list[dict[str, Any]]()
    for i, message in enumerate(_list(given, "messages", "messages")):
        messages += _messages(message, f"messages: entry {i}")
    if not messages or messages[-1]["role"] == "assistant":
        detail = "messages: the last one should be the user's: an answer that was begun is not continued"
        raise invalid_value("messages", detail)
    return [*first, *messages]


def _messages(given: Any, place: str) -> Iterator[dict[str, Any]]:
    """Yield the messages of a chat that one message stands for: a result of a tool has one of its own."""
    message = _object(given, place, "messages", "an object with role and content")
    _known(message, place, "messages", {"role", "content"})
    role, content = message.get("role"), message.get("content")
    if role == "assistant":
        yield _answer(content, f"{place}: content")
    elif role == "system" or (role == "user" and not isinstance(content, list)):
        yield {"role": role, "content": _text(content, f"{place}: content", "messages")}
    elif role == "user":
        yield from _of_user(content, f"{place}: content")
    else:
        detail = f"{place} has the role {reprlib.repr(role)}: should be 'user', 'assistant' or 'system'"
        raise invalid_value("messages", detail)


def _answer(content: Any, place: str) -> dict[str, Any]:
    texts, calls = [], []
    for at, block in _blocks(content, place, "messages"):
        if block["type"] == "tool_use":
            calls.append(_call(block, at))
        else:
            texts.append(_text_of(block, at, "messages"))
    return {"role": "assistant", "content": "".join(texts), **({"tool_calls": calls} if calls else {})}


def _call(block: Mapping[str, Any], place: str) -> dict[str, Any]:
    _known(block, place, "messages", {"type", "id", "name", "input", "cache_control", "caller"})
    if block.get("caller", {}) not in ({}, {"type": "direct"}):
        raise invalid_value(
            "messages", f"{place}: caller is {reprlib.repr(block['caller'])}: only the model calls tools"
        )
    arguments = block.get("input")
    if not isinstance(arguments, dict):
        raise invalid_value("messages", f"{place}: input is {reprlib.repr(arguments)}: should be an object")
    function = {"name": _line(block, "name", place), "arguments": json.dumps(arguments, ensure_ascii=False)}
    return {"id": _line(block, "id", place), "type": "function", "function": function}


def _of_user(content: Any, place: str) -> Iterator[dict[str, Any]]:
    texts: list[str] = []
    n_results = 0
    for at, block in _blocks(content, place, "messages"):
        if block["type"] != "tool_result":
            texts.append(_text_of(block, at, "messages"))
            continue
        if texts:
            yield {"role": "user", "content": "".join(texts)}
            texts = []
        n_results += 1
        yield _result(block, at)
    if texts or not n_results:
        yield {"role": "user", "content": "".join(texts)}


def _result(block: Mapping[str, Any], place: str) -> dict[str, Any]:
    _known(block, place, "messages", {"type", "tool_use_id", "content", "is_error", "cache_control"})
    failed = block.get("is_error", False)
    if not isinstance(failed, bool):
        raise invalid_value("messages", f"{place}: is_error is {reprlib.repr(failed)}: should be true or false")
    text = _text(block.get("content", ""), f"{place}: content", "messages")
    # As `ToolEnvironment` writes errors: a chat has no other place for them.
    return {
        "role": "tool",
        "tool_call_id": _line(block, "tool_use_id", place),
        "content": f"error: {text}" if failed else text,
    }


def _text(given: Any, place: str, param: str) -> str:
    return "".join(_text_of(block, at, param) for at, block in _blocks(given, place, param))


def _blocks(given: Any, place: str, param: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the place of each block of a content, and the block."""
    if isinstance(given, str):
        yield place, {"type": "text", "text": given}
        return
    for i, one in enumerate(_list(given, place, "blocks", param)):
        at = f"{place}: block {i}"
        block = _object(one, at, param, "a block with its type")
        yield at, {**block, "type": block.get("type")}


def _text_of(block: Mapping[str, Any], place: str, param: str) -> str:
    kind, text = block["type"], block.get("text")
    if kind != "text":
        detail = (
            f"{place} has the type {reprlib.repr(kind)}: not supported here: only text, and calls and results of tools"
        )
        raise invalid_value(param, detail)
    _known(block, place, param, {"type", "text", "cache_control"}, {"citations": ([],)})
    if not isinstance(text, str):
        raise invalid_value(param, f"{place}: text is {reprlib.repr(text)}: should be text")
    return text


def _tool(given: Any, place: str) -> dict[str, Any]:
    tool = _object(given, place, "tools", "an object with name, description and input_schema")
    if (kind := tool.get("type", "custom")) != "custom":
        detail = (
            f"{place} has the type {reprlib.repr(kind)}: only tools that the client runs and describes are supported"
        )
        raise invalid_value("tools", detail)
    _known(tool, place, "tools", _TOOL_KEYS, _TOOL_DEFAULTS)
    name = _line(tool, "name", place, "tools")
    schema = _object(tool.get("input_schema"), f"{place}: input_schema", "tools", "the JSON schema of an object")
    if schema.get("type", "object") != "object" or not isinstance(schema.get("properties", {}), dict):
        raise invalid_value(
            "tools", f"{place}: input_schema is {reprlib.repr(schema)}: should be the JSON schema of an object"
        )
    function: dict[str, Any] = {"name": name, "parameters": schema}
    for key, kind in (("description", str), ("strict", bool)):
        if not isinstance(value := tool.get(key, kind()), kind):
            words = "text" if kind is str else "true or false"
            raise invalid_value("tools", f"{place}: {key} is {reprlib.repr(value)}: should be {words}")
        function[key] = value
    return {"type": "function", "function": function}


def _tool_choice(given: Any) -> dict[str, Any]:
    choice = _object(given, "tool_choice", "tool_choice", 'an object such as {"type": "auto"}')
    kind = choice.get("type")
    if kind != "tool" and kind not in _TOOL_CHOICES:
        detail = f"tool_choice: the type is {reprlib.repr(kind)}: should be 'auto', 'none', 'any' or 'tool'"
        raise invalid_value("tool_choice", detail)
    keys = {"type", "disable_parallel_tool_use"} | ({"name"} if kind == "tool" else set())
    _known(choice, "tool_choice", "tool_choice", keys)
    single = choice.get("disable_parallel_tool_use", False)
    if not isinstance(single, bool):
        detail = f"tool_choice: disable_parallel_tool_use is {reprlib.repr(single)}: should be true or false"
        raise invalid_value("tool_choice", detail)
    named = {"type": "function", "function": {"name": choice.get("name")}}
    return {"tool_choice": _TOOL_CHOICES.get(kind, named), "parallel_tool_calls": not single}


def _output(given: Any) -> dict[str, Any]:
    """Return the effort and the form of the answer as chats have them."""
    config = _object(given, "output_config", "output_config", "an object with effort and format")
    _known(config, "output_config", "output_config", {"effort", "format"})
    effort = {"reasoning_effort": config["effort"]} if "effort" in config else {}
    if "format" not in config:
        return effort
    form = _object(config["format"], "output_config: format", "output_config", "an object with type and schema")
    if form.get("type") != "json_schema":
        raise invalid_value(
            "output_config", f"output_config: format is {reprlib.repr(form)}: only 'json_schema' is known"
        )
    schema = {"name": "answer", "schema": form.get("schema")}
    return {**effort, "response_format": {"type": "json_schema", "json_schema": schema}}


def _edits(given: Any) -> dict[str, Any]:
    """Return nothing: of the edits of a context only those of thoughts are accepted, which no message here has."""
    config = _object(given, "context_management", "context_management", "an object with edits")
    _known(config, "context_management", "context_management", {"edits"})
    for i, edit in enumerate(_list(config.get("edits", []), "context_management: edits", "edits")):
        kind = edit.get("type") if isinstance(edit, dict) else edit
        if not str(kind).startswith("clear_thinking_"):
            detail = f"context_management: edits: entry {i} is {reprlib.repr(kind)}: messages are not edited: remove it"
            raise invalid_value("context_management", detail)
    return {}


def _list(given: Any, place: str, what: str, param: str = "") -> list[Any]:
    if not isinstance(given, list):
        wrong = "missing" if given is None else f"{reprlib.repr(given)} is no list"
        raise invalid_value(param or place, f"{place}: {wrong}: give a list of {what}")
    return given


def _object(given: Any, place: str, param: str, form: str) -> dict[str, Any]:
    if not isinstance(given, dict):
        raise invalid_value(param, f"{place} is {reprlib.repr(given)}: should be {form}")
    return {name: value for name, value in given.items() if value is not None}


def _line(given: Mapping[str, Any], key: str, place: str, param: str = "messages") -> str:
    value = given.get(key)
    if not isinstance(value, str) or not value.strip():
        raise invalid_value(param, f"{place}: {key} is {reprlib.repr(value)}: should be text")
    return value


def _known(
    given: Mapping[str, Any],
    place: str,
    param: str,
    keys: Collection[str],
    defaults: Mapping[str, tuple[Any, ...]] | None = None,
) -> None:
    """Refuse keys other than these, unless they have a default."""
    for key in given:
        if key not in keys and given[key] not in (defaults or {}).get(key, ()):
            raise invalid_value(param, f"{place}: the key {key!r} is not supported: remove it")


# --- errors -----------------------------------------------------------------------------------------------------------


_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def is_messages_path(path: str) -> bool:
    """Return True for the paths whose errors have this API's format."""
    return f"{path.rstrip('/')}/".startswith(("/v1/messages/", "/v1/v1/messages/"))


def error_body(status: int, error: Mapping[str, Any]) -> dict[str, Any]:
    """Return the body of an error from that of OpenAI's format."""
    kind = _KINDS.get(status, "invalid_request_error" if status < 500 else "api_error")
    own: dict[str, Any] = {"type": kind, "message": error["message"]}
    if error["code"] == (code := code_of(_UNTHREADED)):
        own["details"] = {"error_code": code, "unsupported": [error["param"]]}
    return {"type": "error", "error": own}


# --- responses --------------------------------------------------------------------------------------------------------


_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class MessageWriter:
    """Writes one message: whole, or as the events of a stream."""

    def __init__(self, n_prompt: int) -> None:
        """Take the number of tokens of the prompt, which a stream begins with."""
        self._n_prompt = n_prompt
        self._started = False
        self._n_blocks = 0
        """Blocks that have ended."""
        self._in_text = False
        self._finish = ""
        self._stop: str | None = None
        self._n_generated = 0

    def whole(self, chat: Mapping[str, Any]) -> dict[str, Any]:
        """Return the message of a chat completion."""
        (message,) = (choice["message"] for choice in self._take(chat))
        calls = message.get("tool_calls") or []
        content = [_text_block(message["content"] or "")] if message["content"] or not calls else []
        content += [{**_call_block(call), "input": json.loads(call["function"]["arguments"])} for call in calls]
        return {**self._head(chat), "content": content, **self._end, "usage": self._usage}

    def add(self, chunk: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield the events of a chunk of the chat completion."""
        if not self._started:
            self._started = True
            message = {**self._head(chunk), "content": [], **self._end, "usage": self._usage}
            yield {"type": "message_start", "message": message}
        for choice in self._take(chunk):
            if text := choice["delta"].get("content"):
                if not self._in_text:
                    yield self._begin(_text_block(""))
                    self._in_text = True
                yield self._delta({"type": "text_delta", "text": text})
            for call in choice["delta"].get("tool_calls") or ():
                yield from self._end_text()
                yield self._begin(_call_block(call))
                yield self._delta({"type": "input_json_delta", "partial_json": call["function"]["arguments"]})
                yield self._end_block()

    def end(self) -> Iterator[dict[str, Any]]:
        """Yield the last events."""
        if not self._n_blocks and not self._in_text:  # an answer without text
            yield self._begin(_text_block(""))
            self._in_text = True
        yield from self._end_text()
        yield {"type": "message_delta", "delta": self._end, "usage": self._usage}
        yield {"type": "message_stop"}

    def failed(self, problem: Problem) -> dict[str, Any]:
        """Return the event of an error, which the library raises."""
        return error_body(problem.status, error_object(problem))

    @property
    def keep_alive(self) -> str:
        """Return an event without content; libraries expect none before the first one of the message."""
        return 'event: ping\ndata: {"type": "ping"}\n\n' if self._started else KEEP_ALIVE

    @property
    def _end(self) -> dict[str, Any]:
        reason = "stop_sequence" if self._finish == "stop" and self._stop else _STOP_REASONS.get(self._finish)
        return {"stop_reason": reason, "stop_sequence": self._stop if reason == "stop_sequence" else None}

    @property
    def _usage(self) -> dict[str, int]:
        cached = {"cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}
        return {"input_tokens": self._n_prompt, **cached, "output_tokens": self._n_generated}

    def _head(self, chat: Mapping[str, Any]) -> dict[str, Any]:
        number = str(chat["id"]).rpartition("-")[2]
        return {"id": f"msg_{number}", "type": "message", "role": "assistant", "model": chat["model"]}

    def _take(self, chat: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
        """Yield the choices of a chat completion or of a chunk of it, and store how it has ended."""
        for choice in chat["choices"]:
            self._finish = choice["finish_reason"] or self._finish
            self._stop = choice.get("stop_reason") or self._stop
            yield choice
        self._n_generated = (chat.get("usage") or {}).get("completion_tokens", self._n_generated)

    def _begin(self, block: Mapping[str, Any]) -> dict[str, Any]:
        return {"type": "content_block_start", "index": self._n_blocks, "content_block": block}

    def _delta(self, delta: Mapping[str, Any]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": self._n_blocks, "delta": delta}

    def _end_block(self) -> dict[str, Any]:
        self._n_blocks += 1
        return {"type": "content_block_stop", "index": self._n_blocks - 1}

    def _end_text(self) -> Iterator[dict[str, Any]]:
        if self._in_text:
            self._in_text = False
            yield self._end_block()


def _text_block(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def _call_block(call: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "tool_use", "id": call["id"], "name": call["function"]["name"], "input": {}}
