"""What a row of data says: a prompt, and a completion to imitate (`kind: sft`) or a pair (`kind: dpo`, `reward`)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

from rlboost.shared.data.messages import (
    ASSISTANT,
    TEMPLATE_KWARGS,
    TOOLS,
    Messages,
    Tools,
    clean_messages,
    is_to_train,
    parsed_messages,
    require_no_media,
    template_kwargs_of,
    tools_of,
    without_train_keys,
)
from rlboost.shared.data.rows import is_messages
from rlboost.shared.errors import ConfigError

MESSAGES = "messages"
"""The column of whole conversations in most chat data; `data.prompt_key` may name another."""


MARGIN = "margin"
"""The column of a pair that says by how much the better completion's score is to be higher."""
LABEL = "label"
"""The column that says whether a completion is right."""
_COMPLETION = "completion"
_ALPACA = ("input", "history")
"""Columns of what else an `instruction` is about."""


class TextExample(NamedTuple):
    """A text and what follows it."""

    prompt: str
    completion: str


class ChatExample(NamedTuple):
    """Messages and the message with which the assistant answers."""

    prompt: Messages
    completion: Messages
    tools: Tools = ()
    """JSON schemas of the tools, for the chat template."""
    kwargs: Mapping[str, Any] = {}
    """Arguments of the chat template."""


Example = TextExample | ChatExample


def examples_of(
    values: dict[str, Any], prompt_key: str, completion_key: str, *, every_turn: bool = False
) -> Sequence[Example]:
    """Return the examples in a row: one for each message of the assistant that is trained.

    Those are the completion's; without a completion the last ones of a conversation, or with `every_turn` all. Each
    follows the conversation before it, as the model sees it when it generates that message: many templates leave out
    the thoughts of earlier turns, and what a template writes between two messages is never generated. A key of a
    message such as `weight: 0` leaves it out.

    A column `tools` has the schemas of the tools that the chat template shows to the model, a column
    `chat_template_kwargs` its other arguments. With `every_turn` a completion that is null or an empty list is none.

    Raises:
        ConfigError: there is none; the text says what is wrong, not where.

    """
    require_no_media(values, prompt_key)
    tools, kwargs = tools_of(values.get(TOOLS)), template_kwargs_of(values.get(TEMPLATE_KWARGS))
    find = _turns if every_turn else _last_turns
    found = find(values, prompt_key, completion_key)
    if hidden := hidden_part(values, prompt_key, found.prompt if isinstance(found, TextExample) else found[0]):
        raise ConfigError(f"{hidden}: put it into the prompt, or remove the column")
    if isinstance(found, TextExample):
        _require_no_options(tools, kwargs)
        _require_text(found.prompt, prompt_key)
        _require_text(found.completion, completion_key)
        return [found]
    given, first = found
    flags = [is_to_train(message, f"message {number} ({message['role']})") for number, message in enumerate(given, 1)]
    messages = clean_messages([without_train_keys(message) for message in given], of_row=True)
    turns = [i for i in range(first, len(messages)) if messages[i]["role"] == ASSISTANT]
    trained = [i for i in turns if flags[i] is not False]
    for i in range(len(messages)):
        if flags[i] and i not in turns and not all(flags):  # a key of all messages says nothing about one
            why = "only the assistant's messages are" if messages[i]["role"] != ASSISTANT else _NOT_LAST
            raise ConfigError(f"message {i + 1} ({messages[i]['role']}) is to be trained, but {why}: remove the key")
        if i in turns and not every_turn and flags[i] is False:
            raise ConfigError(
                f"message {i + 1} (assistant) is not to be trained, but without data.assistant_only_loss the last "
                "messages are: set it to true, or leave out the message"
            )
    if not trained:
        raise ConfigError("no message is the assistant's: there is nothing to train" if not turns else _NONE_TRAINED)
    if trained[0] == 0:
        raise ConfigError("the first message is the assistant's: begin with the message that it answers")
    return [ChatExample(messages[:i], messages[i : i + 1], tools, kwargs) for i in trained]


_NOT_LAST = "a completion or the last messages are, and all of a conversation with data.assistant_only_loss"
_NONE_TRAINED = "no message of the assistant is to be trained: leave out the row"

_Turns = tuple[list[dict[str, Any]], int]
"""Messages as they are given, and the number of those at the beginning that are not trained."""


def _turns(values: dict[str, Any], prompt_key: str, completion_key: str) -> _Turns:
    """Return a conversation, all of whose turns are trained: those of its completion if it has one."""
    completion = values.get(completion_key)
    prompt = parsed_messages(values.get(prompt_key, [] if completion else values.get(MESSAGES)))
    if isinstance(completion, str):
        completion = _answers(completion)
    elif completion is None:
        completion = []
    if not is_messages(prompt) or not (completion == [] or is_messages(completion)):
        raise ConfigError(
            f"data.assistant_only_loss needs chat messages ({_keys(values)}): give {prompt_key!r} (and "
            f"{completion_key!r}) as messages, or leave the option out"
        )
    return _joined(prompt, completion) if completion else (prompt, 0)


def _last_turns(values: dict[str, Any], prompt_key: str, completion_key: str) -> _Turns | TextExample:
    """Return a prompt with its completion, or a conversation whose last messages are the assistant's."""
    if completion_key in values:
        if prompt_key not in values:
            raise ConfigError(f"no key {prompt_key!r} ({_keys(values)}): correct it, or set data.prompt_key")
        return _pair(parsed_messages(values[prompt_key]), values[completion_key], prompt_key, completion_key)
    conversation = parsed_messages(values.get(prompt_key, values.get(MESSAGES)))
    if is_messages(conversation) and conversation[-1]["role"] == ASSISTANT:
        start = len(conversation)
        while start and conversation[start - 1]["role"] == ASSISTANT:
            start -= 1
        if not start:
            raise ConfigError("all messages are the assistant's: there is nothing to answer")
        return conversation, start
    other = parsed_messages(values.get(MESSAGES))
    if prompt_key in values and is_messages(other) and other[-1]["role"] == ASSISTANT:
        raise ConfigError(
            f"no key {completion_key!r}, and {prompt_key!r} is no conversation that ends with the assistant "
            f"({_keys(values)}): set data.prompt_key to {MESSAGES}"
        )
    raise ConfigError(
        f"no key {completion_key!r}, nor chat messages that end with the assistant's ({_keys(values)}): correct it, "
        "or set data.completion_key"
    )


def _pair(prompt: object, completion: object, prompt_key: str, completion_key: str) -> _Turns | TextExample:
    if isinstance(prompt, str):
        answers = parsed_messages(completion)
        if not isinstance(completion, str) or (is_messages(answers) and answers[0]["role"] == ASSISTANT):
            raise ConfigError(f"{completion_key!r} is not text, but {prompt_key!r} is: give both as text or messages")
        return TextExample(prompt, completion)
    if not is_messages(prompt):
        raise ConfigError(f"{prompt_key!r} is neither text nor a list of chat messages with a role")
    answers = _answers(completion) if isinstance(completion, str) else completion
    if is_messages(answers) and all(message["role"] == ASSISTANT for message in answers):
        return _joined(prompt, answers)
    raise ConfigError(f"{completion_key!r} is neither text nor a list of chat messages of the assistant")


def _answers(completion: str) -> object:
    """Return a completion of chat messages that is text, which may be the JSON text of messages."""
    found = parsed_messages(completion)
    is_chat = is_messages(found) and all(message["role"] == ASSISTANT for message in found)
    return found if is_chat else [{"role": ASSISTANT, "content": completion}]


def _joined(prompt: list[dict[str, Any]], completion: list[dict[str, Any]]) -> _Turns:
    if prompt[-1]["role"] == ASSISTANT:
        raise ConfigError(
            "the prompt ends with a message of the assistant, which is not trained: move it to the completion"
        )
    return [*prompt, *completion], len(prompt)


def pair_of(values: dict[str, Any], prompt_key: str, chosen_key: str, rejected_key: str) -> tuple[Example, Example]:
    """Return the better and the worse completion in a row, each with the prompt.

    Without a prompt, or with one that is text, both may be conversations: the messages that they begin with are the
    prompt, as with TRL's `DPOTrainer`. Each completion is one message; see `examples_of` for other columns.

    Raises:
        ConfigError: there is no pair; the text says what is wrong, not where.

    """
    keys = chosen_key, rejected_key
    for key, name in zip(keys, ("chosen_key", "rejected_key"), strict=True):
        if key not in values:
            raise ConfigError(f"no key {key!r} ({_keys(values)}): correct the row, or set data.{name}")
    chosen, rejected = (parsed_messages(values[key]) for key in keys)
    if is_messages(chosen) != is_messages(rejected):
        text, chat = reversed(keys) if is_messages(chosen) else keys
        raise ConfigError(f"{chat!r} has chat messages, and {text!r} has none: give both as text or both as messages")
    if chosen == rejected:
        raise ConfigError(f"{chosen_key!r} and {rejected_key!r} are equal, so neither is better: leave out the row")
    prompt = parsed_messages(values.get(prompt_key))
    if is_messages(chosen) and is_messages(rejected) and not is_messages(prompt):
        n_shared = next((i for i, (a, b) in enumerate(zip(chosen, rejected, strict=False)) if a != b), -1)
        values = {**values, **_parted(keys, chosen, rejected, n_shared), prompt_key: chosen[:n_shared]}
        if prompt is not None and prompt not in [message.get("content") for message in chosen[:n_shared]]:
            raise ConfigError(
                f"{prompt_key!r} is none of the messages that {chosen_key!r} and {rejected_key!r} begin with: give it "
                "as chat messages, or remove it"
            )
    elif prompt is None:
        raise ConfigError(
            f"no key {prompt_key!r} ({_keys(values)}), and where a prompt of text ends is unknown: give it a column of "
            "its own (data.prompt_key)"
        )
    return _answer(values, prompt_key, chosen_key), _answer(values, prompt_key, rejected_key)


def margin_of(values: Mapping[str, Any]) -> float | None:
    """Return the margin of a pair, None if it has none.

    Raises:
        ConfigError: it is not a number; the text says what is wrong, not where.

    """
    if (margin := values.get(MARGIN)) is None:
        return None
    if isinstance(margin, bool) or not isinstance(margin, int | float) or not math.isfinite(margin):
        raise ConfigError(f"{MARGIN!r} is {margin!r}, not a number: correct it, or remove the column")
    return float(margin)


def labelled_of(values: dict[str, Any], prompt_key: str, chosen_key: str) -> tuple[Example, float] | None:
    """Return the completion in a row with its label, 1.0 or 0.0; None if the row has a pair.

    Raises:
        ConfigError: the row has no completion, or a label that is none; the text says what is wrong, not where.

    """
    if LABEL not in values or chosen_key in values:
        return None
    label = values[LABEL]
    if label not in (0, 1):
        raise ConfigError(f"{LABEL!r} is {label!r}: give 1 or true for a right completion, 0 or false for a wrong one")
    return _answer(values, prompt_key, _COMPLETION), float(label)


def _parted(
    keys: tuple[str, str], chosen: list[dict[str, Any]], rejected: list[dict[str, Any]], n_shared: int
) -> dict[str, object]:
    """Return what follows the messages that two conversations begin with."""
    if n_shared < 0:
        shorter, longer = keys if len(chosen) < len(rejected) else reversed(keys)
        raise ConfigError(f"{shorter!r} is the beginning of {longer!r}: give it an answer of its own")
    if not n_shared:
        raise ConfigError(
            f"{keys[0]!r} and {keys[1]!r} begin with different messages, so there is no prompt: give it a column of "
            "its own (data.prompt_key)"
        )
    return dict(zip(keys, (chosen[n_shared:], rejected[n_shared:]), strict=True))


def _answer(values: dict[str, Any], prompt_key: str, key: str) -> Example:
    """Return the only completion in a column."""
    try:
        examples = examples_of(values, prompt_key, key)
    except ConfigError as error:
        if any(repr(name) in str(error) for name in (prompt_key, key)):
            raise
        raise ConfigError(f"{key!r}: {error}") from error
    if len(examples) > 1:
        raise ConfigError(
            f"{key!r} has {len(examples)} messages of the assistant, and a pair compares one with another: join them, "
            "or move what comes before the last to the prompt"
        )
    return examples[0]


def hidden_part(values: Mapping[str, Any], prompt_key: str, prompt: str | Messages) -> str:
    """Return what says that a part of the prompt is in a column that the model does not see; empty if none is.

    Such columns are those of a system prompt and, next to an `instruction`, those of Alpaca.
    """
    contents = [prompt] if isinstance(prompt, str) else [one.get("content") for one in prompt]
    parts = chain.from_iterable(content if isinstance(content, list) else [content] for content in contents)
    shown = "\n".join(str(part.get("text") if isinstance(part, dict) else part) for part in parts)
    has_system = not isinstance(prompt, str) and any(one.get("role") in ("system", "developer") for one in prompt)
    names = [*(() if has_system else ("system", "system_prompt")), *(_ALPACA if prompt_key == "instruction" else ())]
    for name in names:
        value = values.get(name)
        is_part = name in _ALPACA and str(value) != "nan"  # as pandas writes an empty text
        given = value.strip() if isinstance(value, str) else value if is_part else None
        if name != prompt_key and given and str(given) not in shown:
            return f"the column {name!r} ({value!r:.60}) is not shown to the model"
    return ""


class RlPrompt(NamedTuple):
    """A prompt for reinforcement learning or evaluation."""

    given: str | Messages
    tools: Tools = ()
    """JSON schemas of the tools, for the chat template."""
    kwargs: Mapping[str, Any] = {}
    """Arguments of the chat template."""


def prompt_of(values: dict[str, Any], prompt_key: str, system_prompt: str | None = None) -> RlPrompt:
    """Return the prompt in a row, with the columns `tools` and `chat_template_kwargs` if there are any.

    Args:
        values: the row.
        prompt_key: the column of the prompt.
        system_prompt: makes text a message of the user, and goes before as a system message; none if it is empty.

    Raises:
        ConfigError: it has none, or the model would not see it as it is; the text says what is wrong, not where.

    """
    if prompt_key not in values:
        raise ConfigError(f"no key {prompt_key!r} ({_keys(values)}): correct the line or set data.prompt_key")
    require_no_media(values, prompt_key)
    given = parsed_messages(values[prompt_key])
    tools, kwargs = tools_of(values.get(TOOLS)), template_kwargs_of(values.get(TEMPLATE_KWARGS))
    if isinstance(given, str):
        _require_text(given, prompt_key)
        if system_prompt is None:
            _require_no_options(tools, kwargs)
            return RlPrompt(given)
        given = [{"role": "user", "content": given}]
    if not is_messages(given):
        raise ConfigError(f"{prompt_key!r} is neither text nor a list of chat messages with a role")
    if system_prompt is not None and any(message["role"] in ("system", "developer") for message in given):
        raise ConfigError("the prompt has a system message of its own: remove it, or remove data.system_prompt")
    if system_prompt:
        given = [{"role": "system", "content": system_prompt}, *given]
    if all(message["role"] == ASSISTANT for message in given):
        raise ConfigError("all messages are the assistant's: begin with the message that it answers")
    return RlPrompt(clean_messages(given, of_row=True), tools, kwargs)


def _require_no_options(tools: Tools, kwargs: Mapping[str, Any]) -> None:
    """Refuse arguments of a chat template next to a prompt that is text."""
    if tools or kwargs:
        name = TOOLS if tools else TEMPLATE_KWARGS
        raise ConfigError(f"{name!r} needs a chat template: give the prompt (and completion) as chat messages")


def _require_text(text: str, key: str) -> None:
    if not text.strip():
        raise ConfigError(f"{key!r} is empty: give it text, or leave out the row")


def _keys(values: dict[str, Any]) -> str:
    return f"keys: {', '.join(values) or 'none'}"
