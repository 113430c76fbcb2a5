"""What a row of data for `kind: sft` says: a prompt, and the completion that is to be imitated."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from rlboost.shared.data.rows import is_messages
from rlboost.shared.errors import ConfigError

MESSAGES = "messages"
"""The column of whole conversations in most chat data; `data.prompt_key` may name another."""
ASSISTANT = "assistant"

TOOLS = "tools"
"""The column of JSON schemas of tools, as in TRL: a list, or its JSON text."""

_NULLABLE = ("default", "const")
"""Keys of a JSON schema that may be null."""

Messages = list[dict[str, Any]]
Tools = Sequence[dict[str, Any]]


class TextExample(NamedTuple):
    """A text and what follows it."""

    prompt: str
    completion: str


class ChatExample(NamedTuple):
    """Messages and what the assistant answers."""

    prompt: Messages
    completion: Messages
    tools: Tools = ()
    """JSON schemas of the tools, for the chat template."""


Example = TextExample | ChatExample


def example_of(values: dict[str, Any], prompt_key: str, completion_key: str) -> Example:
    """Return the example in a row.

    A row has a prompt and a completion; or only a conversation whose last messages are the assistant's, which are then
    the completion. A column `tools` has the schemas of the tools that the chat template shows to the model.

    Raises:
        ConfigError: it has neither; the text says what is wrong, not where.

    """
    example = _example(values, prompt_key, completion_key)
    tools = _tools(values.get(TOOLS))
    if isinstance(example, ChatExample):
        return example._replace(tools=tools)
    if tools:
        raise ConfigError(f"{TOOLS!r} needs a chat template: give prompt and completion as chat messages")
    return example


def _example(values: dict[str, Any], prompt_key: str, completion_key: str) -> Example:
    if completion_key in values:
        if prompt_key not in values:
            raise ConfigError(f"no key {prompt_key!r} ({_keys(values)}): correct it, or set data.prompt_key")
        return _pair(values[prompt_key], values[completion_key], prompt_key, completion_key)
    conversation = values.get(prompt_key, values.get(MESSAGES))
    if is_messages(conversation) and conversation[-1]["role"] == ASSISTANT:
        return _split(without_nulls(conversation))
    raise ConfigError(
        f"no key {completion_key!r}, nor chat messages that end with the assistant's ({_keys(values)}): correct it, "
        "or set data.completion_key"
    )


def without_nulls(messages: Messages) -> Messages:
    """Return messages without keys that are null: a table has every key in every message."""
    return [{name: value for name, value in message.items() if value is not None} for message in messages]


def _tools(given: object) -> Tools:
    """Return the schemas of a column."""
    if isinstance(given, str):
        try:
            given = json.loads(given or "[]")
        except ValueError as error:
            raise ConfigError(f"{TOOLS!r} is not JSON: {error}") from error
    if given is None:
        return ()
    if not isinstance(given, list) or not all(isinstance(tool, dict) for tool in given):
        raise ConfigError(f"{TOOLS!r} is not a list of JSON schemas: give ToolEnvironment.tools, or their JSON text")
    if _has_nulls(given):
        raise ConfigError(f"{TOOLS!r} has keys that are null, as tables add them: give the schemas as JSON text")
    return given


def _has_nulls(value: Any) -> bool:
    if isinstance(value, dict):
        return any(_has_nulls(inner) or (inner is None and name not in _NULLABLE) for name, inner in value.items())
    return isinstance(value, list) and any(map(_has_nulls, value))


def _pair(prompt: object, completion: object, prompt_key: str, completion_key: str) -> Example:
    if isinstance(prompt, str):
        if not isinstance(completion, str):
            raise ConfigError(f"{completion_key!r} is not text, but {prompt_key!r} is: give both as text or messages")
        return TextExample(prompt, completion)
    if not is_messages(prompt):
        raise ConfigError(f"{prompt_key!r} is neither text nor a list of chat messages with a role")
    if isinstance(completion, str):
        return ChatExample(without_nulls(prompt), [{"role": ASSISTANT, "content": completion}])
    if is_messages(completion) and all(message["role"] == ASSISTANT for message in completion):
        return ChatExample(without_nulls(prompt), without_nulls(completion))
    raise ConfigError(f"{completion_key!r} is neither text nor a list of chat messages of the assistant")


def _split(messages: Messages) -> Example:
    start = len(messages)
    while start and messages[start - 1]["role"] == ASSISTANT:
        start -= 1
    if not start:
        raise ConfigError("all messages are the assistant's: there is nothing to answer")
    return ChatExample(messages[:start], messages[start:])


def _keys(values: dict[str, Any]) -> str:
    return f"keys: {', '.join(values) or 'none'}"
