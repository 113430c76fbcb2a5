"""Chat messages, tools and template arguments of data rows, environments and clients, in the form of chat templates."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rlboost.shared.data.rows import parse_json
from rlboost.shared.data.vision import FAMILIES
from rlboost.shared.errors import ConfigError

ASSISTANT = "assistant"
TOOLS = "tools"
"""The column of JSON schemas of tools, as in TRL: a list, or its JSON text."""
TEMPLATE_KWARGS = "chat_template_kwargs"
"""The column of arguments of the chat template, as in TRL, such as `{"enable_thinking": false}`."""
MEDIA = ("image", "images", "video", "videos", "audio", "audios")
"""Columns of what a text model cannot see."""

THINKING_KEY = re.compile("think|reason|thought", re.IGNORECASE)
"""Keys of messages such as `reasoning_content`, `reasoning` and `thinking`."""

TRAIN_KEYS = ("weight", "train", "training", "trainable", "loss", "loss_scale", "loss_mask", "loss_weight")
"""Keys of messages with which other formats say which ones are trained: OpenAI's, axolotl's, and others."""

Messages = list[dict[str, Any]]
Tools = Sequence[dict[str, Any]]

_NULLABLE = ("default", "const")
"""Keys of a JSON schema that may be null."""
_NOT_CONTENT = (
    *(*MEDIA, "text", "value", "parts", "image_url", "input_audio", "file", "files"),
    *("function_call", "tool_responses", "refusal"),
)
"""Keys of a message that hold its content in other formats; chat templates ignore them."""
_ROLES = ("system", "developer", "user", ASSISTANT, "tool", "function", "human", "gpt")
_PRINTED = re.compile(
    rf"""\s*\[?\s*\{{(?=\s*'(?:role|content|from|value)':).*?'(?:role|from)':\s*'(?:{"|".join(_ROLES)})'""", re.S
)
"""The beginning of messages as Python prints them, the role anywhere."""
_CALL_KEYS = frozenset({"id", "type", "function", "index"})
_FUNCTION_KEYS = frozenset({"name", "arguments", "content_type"})
_TEMPLATE_OWN = frozenset(
    {"messages", "conversation", "conversations", "tools", "documents", "chat_template", "add_generation_prompt"}
    | {"continue_final_message", "tokenize", "padding", "truncation", "max_length", "return_tensors", "return_dict"}
    | {"return_assistant_tokens_mask", "tokenizer_kwargs", "bos_token", "eos_token", "pad_token", "unk_token"}
    | {"strftime_now", "raise_exception"}
)
"""Arguments that neither a row nor a client can set, because RLBoost does."""


def clean_messages(messages: Sequence[Any], *, of_row: bool = False) -> Messages:
    """Return messages as every chat template takes them.

    Keys that are null are left out, since a table has every key in every message. Text parts become one text. Arguments
    of tool calls become mappings, and calls have `type` and `function`.

    Args:
        messages: of a row, an environment or a client; or what this function has returned.
        of_row: True for those of a row, where text of the user and the assistant is expected, and where null in the
            arguments of a call may come from a table.

    Raises:
        ConfigError: a message has content that is no text, or none at all; the text names the message, from 1.

    """
    return [_clean(message, number, of_row=of_row) for number, message in enumerate(messages, 1)]


def parsed_messages(given: object) -> object:
    """Return the messages in a JSON text of messages, as tables have them; anything else as it is.

    No prompt means such a text to be read by the model: it would see braces and quotes in place of its template. Other
    JSON, also with a key `role` whose value is no role of chats, is text.

    Raises:
        ConfigError: it is a text of messages in another form, or a list of those of ShareGPT.

    """
    if isinstance(given, list) and given and all(isinstance(m, dict) and _is_sharegpt(m) for m in given):
        raise ConfigError(
            "its messages have 'from' and 'value', as ShareGPT's: give them 'role' and 'content', with the roles "
            "system, user, assistant and tool"
        )
    if not isinstance(given, str) or not given.lstrip().startswith(("[", "{")):
        return given
    try:
        value = parse_json(given)
    except (ValueError, RecursionError):
        value = None
    found = value if isinstance(value, list) else [value]
    objects = bool(value) and all(isinstance(one, dict) for one in found)
    if objects and all(one.get("role") in _ROLES and {"content", "tool_calls"} & one.keys() for one in found):
        return found
    if _PRINTED.match(given) or (objects and all(one.get("from") in _ROLES and "value" in one for one in found)):
        raise ConfigError(f"{given!r:.60} is a text of chat messages: give a list of them with role and content")
    return given


def _is_sharegpt(message: Mapping[str, Any]) -> bool:
    return message.get("role") is None and "from" in message and "value" in message


def is_to_train(message: Mapping[str, Any], where: str) -> bool | None:
    """Return whether a message says that it is to be trained, by a key such as `weight`; None if it says nothing.

    Raises:
        ConfigError: it says something between.

    """
    flags = {name: message[name] for name in TRAIN_KEYS if message.get(name) is not None}
    if isinstance(flags.get("loss"), float):  # a logged value
        del flags["loss"]
    for name, value in flags.items():
        if isinstance(value, str | list | dict) or value not in (0, 1):
            raise ConfigError(f"{where} has {name} {value!r:.60}: give 0 or 1, or remove it")
    return all(flags.values()) if flags else None


def without_train_keys(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message without what `is_to_train` reads."""
    return {name: value for name, value in message.items() if name not in TRAIN_KEYS}


def tools_of(given: object) -> Tools:
    """Return the schemas in a column `tools`.

    Raises:
        ConfigError: it is no list of schemas.

    """
    if isinstance(given, str):
        given = _from_json(given or "[]", TOOLS)
    if given is None:
        return ()
    if not isinstance(given, list) or not all(isinstance(tool, dict) for tool in given):
        raise ConfigError(f"{TOOLS!r} is not a list of JSON schemas: give ToolEnvironment.tools, or their JSON text")
    if _has_schema_nulls(given):
        raise ConfigError(f"{TOOLS!r} has keys that are null, as tables add them: give the schemas as JSON text")
    return given


def template_kwargs_of(given: object) -> dict[str, Any]:
    """Return the arguments in a column `chat_template_kwargs`, without those that are null, as tables add them.

    Raises:
        ConfigError: it is no mapping, or names an argument that is RLBoost's own.

    """
    if isinstance(given, str):
        given = _from_json(given or "{}", TEMPLATE_KWARGS)
    if given is None:
        return {}
    if not isinstance(given, dict):
        raise ConfigError(f"{TEMPLATE_KWARGS!r} is {given!r:.60}: give a mapping such as {{'enable_thinking': false}}")
    if own := next((name for name in given if name in _TEMPLATE_OWN), None):
        raise ConfigError(f"{TEMPLATE_KWARGS!r} has {own!r}, which is set for every prompt: remove it")
    for name, value in given.items():
        if isinstance(value, str) and value.strip().lower() in ("true", "false"):
            raise ConfigError(f"{TEMPLATE_KWARGS!r} has {name}: {value!r}, which is text: remove the quotes")
    return {name: value for name, value in given.items() if value is not None}


def require_no_media(columns: Mapping[str, Any], prompt_key: str) -> None:
    """Refuse a row with images, videos or sound next to its prompt.

    Raises:
        ConfigError: it has such a column that is not empty.

    """
    for name in MEDIA:
        if name != prompt_key and columns.get(name) not in (None, [], "", {}):
            raise ConfigError(
                f"the column {name!r} is not shown to the model, which is trained on text only: leave out the row, or "
                f"rename the column if only the reward uses it; models of {', '.join(FAMILIES)} see images"
            )


def _clean(given: Any, number: int, *, of_row: bool) -> dict[str, Any]:
    if not isinstance(given, dict) or not isinstance(given.get("role"), str) or not given["role"]:
        raise ConfigError(f"message {number} is {given!r:.60}: give a mapping with role and content")
    where = f"message {number} ({given['role']})"
    message = {name: value for name, value in given.items() if value is not None}
    if not message.get("tool_calls", True):
        del message["tool_calls"]
    for name in _NOT_CONTENT:
        if message.get(name) not in (None, [], "", {}):
            use = "tool_calls" if name == "function_call" else "content"
            raise ConfigError(f"{where} has a key {name!r}, which the model does not see: give its text as {use!r}")
        message.pop(name, None)
    if "tool_calls" in message:
        message["tool_calls"] = _calls(message["tool_calls"], where, of_row=of_row)
    for name in filter(THINKING_KEY.search, message):
        message[name] = _text(message[name], name, where)
    message["content"] = _content(message, where)
    is_spoken = message["role"] in ("user", ASSISTANT) and "tool_calls" not in message
    if of_row and is_spoken and not message["content"].strip():
        raise ConfigError(f"{where} is empty: give it text, or leave it out")
    return message


def _content(message: Mapping[str, Any], where: str) -> str:
    content = message.get("content")
    if content is None and "tool_calls" in message:
        return ""
    if content is None or content == []:
        others = ", ".join(name for name in message if name not in ("role", "content")) or "none"
        raise ConfigError(f"{where} has no content (other keys: {others}): give it text, or leave out the message")
    return _text(content, "content", where)


def _text(given: Any, name: str, where: str) -> str:
    if isinstance(given, str):
        return given
    if not isinstance(given, list):
        raise ConfigError(f"{where} has the {name} {given!r:.60}, which is no text: give it as text, such as JSON")
    return "".join(_part(part, n, f"{where} has {name}") for n, part in enumerate(given, 1))


def _part(given: Any, number: int, where: str) -> str:
    part = {name: value for name, value in given.items() if value is not None} if isinstance(given, dict) else {}
    if set(part) == {"type", "text"} and part["type"] == "text" and isinstance(part["text"], str):
        return part["text"]
    kind = f"of type {part['type']!r}" if part.get("type", "text") != "text" else f"{given!r:.60}"
    raise ConfigError(
        f"{where} whose part {number} is {kind}: only parts with type 'text' and a text are shown to the "
        "model: replace it by text, or leave out the row"
    )


def _calls(given: Any, where: str, *, of_row: bool) -> list[dict[str, Any]]:
    if not isinstance(given, list):
        raise ConfigError(f"{where} has tool_calls {given!r:.60}: give a list")
    return [_call(call, f"{where}, tool call {number}", of_row=of_row) for number, call in enumerate(given, 1)]


def _call(given: Any, where: str, *, of_row: bool) -> dict[str, Any]:
    call = {name: value for name, value in given.items() if value is not None} if isinstance(given, dict) else {}
    if "name" in call and "function" not in call:  # without the wrapper of OpenAI
        inner = {name: call.pop(name) for name in ("name", "arguments") if name in call}
        call["function"] = inner
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
        raise ConfigError(f"{where} is {given!r:.80}: give it a function with name and arguments")
    function = {name: value for name, value in function.items() if value is not None}
    if unknown := [*(call.keys() - _CALL_KEYS), *(function.keys() - _FUNCTION_KEYS)]:
        raise ConfigError(f"{where} has the unknown key {min(unknown)!r}: give a function with name and arguments")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        # What a model has written, which clients and environments repeat, may be less than strict JSON.
        arguments = _from_json(arguments or "{}", f"{where}: arguments", parse_json if of_row else json.loads)
    elif of_row and _has(lambda value: value is None, arguments):
        raise ConfigError(f"{where} has arguments that are null, as tables add them: give the arguments as JSON text")
    if not isinstance(arguments, dict):
        raise ConfigError(f"{where} has the arguments {arguments!r:.60}: give a mapping, or the JSON text of one")
    if of_row and _has(lambda value: isinstance(value, float) and not math.isfinite(value), arguments):
        raise ConfigError(f"{where} has an argument that is no finite number, which JSON does not have: correct it")
    return {"type": "function", **call, "function": {**function, "arguments": arguments}}


def _from_json(text: str, name: str, parse: Callable[[str], Any] = parse_json) -> Any:
    try:
        return parse(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{name!r} is not JSON: {error}") from error


def _has(what: Callable[[Any], bool], value: Any) -> bool:
    """Return True if a mapping or list has such a value, at any depth."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return any(what(one) or _has(what, one) for one in inner)


def _has_schema_nulls(value: Any) -> bool:
    if isinstance(value, dict):
        return any(
            _has_schema_nulls(inner) or (inner is None and name not in _NULLABLE) for name, inner in value.items()
        )
    return isinstance(value, list) and any(map(_has_schema_nulls, value))
