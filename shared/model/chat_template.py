"""Renders conversations with a chat template, and verifies that the model sees every message as it was given.

A template is a program. It may leave out a message whose role or form it does not expect, or print a list as Python
does. So each conversation is rendered twice: as it is, and with each text replaced by a marker. All markers must appear
in the second, and putting the texts in their place must give the first. Conversations of the same form share the
second.
"""

from __future__ import annotations

import json
import re
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from functools import cache, cached_property
from itertools import chain
from typing import Any, Literal, NamedTuple

from rlboost.shared.data.messages import ASSISTANT, THINKING_KEY, Messages, Tools
from rlboost.shared.errors import ConfigError

ANSWER_PLACEHOLDER = "\ue000answer\ue000"
"""Takes the place of an answer in a template; uses a private-use character that no text contains."""
_VERBATIM_KEYS = ("role", "content", "tool_calls", "name", "tool_call_id", "id")
"""Keys that are not replaced by markers, or in a way of their own."""
_MAX_FORMS = 4096
_MAX_KEY = 10_000
"""Characters of a form that is worth memory; others are rendered each time."""
_MARKERS = re.compile(r"qzm(\d+)mzq|910000(\d{4})(?:\.5)?")
_TAGS = re.compile(r"""(['"])(?=[^'"\\\s]*[<\[/])([^'"\\\s]{3,60})\1""")
"""Texts of a template such as '</think>', which it may look for in a message."""
THINKING_TAG = re.compile("think|channel|reason", re.IGNORECASE)
"""Tags of thoughts, which the content of a message may have."""
_PROBE = "qzm9999mzq"


@cache
def template_extensions() -> tuple[Any, ...]:
    """Return the extensions of Jinja that chat templates may use, as in transformers."""
    from jinja2.ext import Extension, loopcontrols  # noqa: PLC0415 - only for chats
    from jinja2.nodes import Scope  # noqa: PLC0415 - likewise

    class Generation(Extension):
        """`{% generation %}` around what the assistant has generated, which transformers reads for masks."""

        tags = {"generation"}  # noqa: RUF012 - as Jinja declares it

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            return Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)

    return (Generation, loopcontrols)


def text_after_answer(rendered: str, end: str) -> str | None:
    """Return the text after the answer in a rendered conversation; None if the answer is not rendered exactly once.

    Args:
        rendered: the conversation, with `ANSWER_PLACEHOLDER` as the answer.
        end: the stop token that the model has generated, as text; it is not repeated. Empty if there is none.

    """
    _, *suffixes = rendered.split(ANSWER_PLACEHOLDER)
    if len(suffixes) != 1:
        return None
    return without_end(suffixes[0], end)


def without_end(suffix: str, end: str) -> str:
    """Return the text after an answer without the stop token that the model has generated; see `text_after_answer`."""
    stripped = suffix.lstrip()
    return stripped.removeprefix(end) if end and stripped.startswith(end) else suffix


class Rendered(NamedTuple):
    """A rendered conversation."""

    text: str
    end: int
    """Where the last text of the messages ends in it."""


class _Text(NamedTuple):
    """A text, or number, of a message that the model has to see."""

    message: int
    role: str
    key: str
    kind: Literal["content", "thinking", "call", "other"]
    value: str | int | float
    is_optional: bool = False
    """True for the thinking of a turn before the last message of the user, which many templates leave out."""


class _Form(NamedTuple):
    """A rendered conversation of markers."""

    literals: list[str]
    """What the template writes before, between and after the texts, without white space around them."""
    order: list[int]
    """Which text follows each of them."""
    problem: tuple[int, str] | None
    """A text, and what is wrong with it."""
    ignored: frozenset[str]


class ChatTemplate:
    """A chat template that refuses what it would not show to the model as it is."""

    def __init__(self, source: str, render: Callable[..., str]) -> None:
        """Take the template.

        Args:
            source: its text, or those of several.
            render: renders messages with the keyword arguments `tools` and `add_generation_prompt`, and others by name;
                may raise anything.

        """
        self._source = source
        self._render = render
        tags = sorted({tag for _, tag in _TAGS.findall(source)}, key=len, reverse=True)
        self._tags = re.compile("(" + "|".join(map(re.escape, tags)) + ")") if tags else None
        self._forms: OrderedDict[str, _Form] = OrderedDict()
        self._abilities: dict[str, bool] = {}
        self._has_text_arguments = False
        self.ignored_keys: set[str] = set()
        """Keys of messages that the template has left out, such as an id."""

    def render(
        self, messages: Messages, *, tools: Tools = (), kwargs: Mapping[str, Any] | None = None, is_prompt: bool = True
    ) -> Rendered:
        """Return a conversation as text; a prompt ends where the assistant's next turn begins.

        Args:
            messages: as `clean_messages` returns them.
            tools: JSON schemas of tools.
            kwargs: further arguments of the template.
            is_prompt: False for a conversation that is complete.

        Raises:
            ConfigError: the template raises, or does not show all of it as it was given.

        """
        options = {"add_generation_prompt": is_prompt, **self.require_known(kwargs or {})}
        self._require_tools(tools, options)
        try:
            text = self._call(messages, tools, options)
        except MemoryError:  # the caller's limit
            raise
        except Exception as error:  # a template is a program, which may raise anything
            why = str(error) or type(error).__name__
            raise ConfigError(f"the chat template cannot render the messages: {why}") from error
        copy, texts = self._with_markers(messages)
        key = repr((copy, tools, sorted(options.items())))
        is_cached = key in self._forms
        form = self._form(key, copy, texts, tools, options)
        end = _end_of_texts(text, form, texts)
        if end is None and is_cached:  # a template may print the date
            self._forms.pop(key, None)
            form = self._form(key, copy, texts, tools, options)
            end = _end_of_texts(text, form, texts)
        if form.problem is not None:
            index, what = form.problem
            raise ConfigError(_describe(texts[index], what))
        if end is None:
            raise ConfigError(
                "the chat template changes the texts of these messages: correct the messages, or give the prompt as "
                f"text (rendered: {text[-200:]!r})"
            )
        self.ignored_keys |= form.ignored | self._unused_keys(messages)
        return Rendered(text, end)

    def render_prefill(
        self, messages: Messages, *, tools: Tools = (), kwargs: Mapping[str, Any] | None = None
    ) -> Rendered:
        """Return a conversation whose last message is the beginning of the assistant's turn, which the model continues.

        Raises:
            ConfigError: see `render`; or the template does not let the last message be continued.

        """
        start = str(messages[-1]["content"])
        if "tool_calls" in messages[-1] or any(map(THINKING_KEY.search, messages[-1])) or not start.strip():
            raise ConfigError(
                f"message {len(messages)} (assistant) is the last of the prompt, so the model would continue it, but "
                "it is not only text: give its beginning as content, or leave it out"
            )
        opened = self.render(messages[:-1], tools=tools, kwargs=kwargs).text
        try:
            closed = self.render(messages, tools=tools, kwargs=kwargs, is_prompt=False).text
        except ConfigError:
            if not start.lstrip().startswith("<think>"):
                raise
            closed = ""
        if start.lstrip().startswith("<think>"):
            before, _, _ = closed.removeprefix(opened).partition(start.strip())
            if closed.startswith(opened) and not before.strip():
                text = opened + before + start.lstrip()
                return Rendered(text, len(text))
            # Many templates write an empty thought before, or open one themselves.
            before = opened.rstrip()
            if before.endswith("</think>"):
                raise ConfigError(
                    f"message {len(messages)} (assistant) begins a thought, but the chat template ends it before: "
                    "remove '<think>' and what follows from the message, or set enable_thinking"
                )
            text = (before.removesuffix("<think>") if before.endswith("<think>") else opened) + start
            return Rendered(text, len(text))
        try:
            text = self._render(messages, tools=list(tools) or None, continue_final_message=True, **(kwargs or {}))
        except Exception as error:  # a template is a program, which may raise anything
            raise ConfigError(f"the chat template cannot continue the last message: {error}") from error
        if not text.rstrip().endswith(start.strip()) or not closed.startswith(text.rstrip()):
            raise ConfigError("the chat template does not let the model continue the last message: leave it out")
        return Rendered(text, len(text))

    def _unused_keys(self, messages: Messages) -> set[str]:
        """Return the keys with numbers and other values that are no text, and that the template does not name."""
        names = {
            name
            for message in messages
            for name, value in message.items()
            if name not in _VERBATIM_KEYS and not isinstance(value, str)
        }
        return {name for name in names if name not in self._source}

    def require_known(self, kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return arguments of the template.

        Raises:
            ConfigError: it does not use one of them.

        """
        for name in kwargs:
            if name not in self._names:
                raise ConfigError(f"the chat template has no argument {name!r}: remove it from chat_template_kwargs")
        return kwargs

    def arguments_among(self, hints: Mapping[str, Any]) -> dict[str, Any]:
        """Return those of some arguments that the template reads."""
        return {name: value for name, value in hints.items() if name in self._names}

    @cached_property
    def _names(self) -> AbstractSet[str]:
        """The names that the template reads from its arguments; all words if jinja2 does not know one of its tags."""
        from jinja2 import Environment, TemplateSyntaxError, meta  # noqa: PLC0415 - only for rows with arguments

        environment = Environment(autoescape=True, extensions=template_extensions())  # it renders nothing
        try:
            return meta.find_undeclared_variables(environment.parse(self._source))
        except TemplateSyntaxError:
            return set(re.findall(r"\w+", self._source))

    def _call(self, messages: Messages, tools: Tools, options: Mapping[str, Any]) -> str:
        """Render, with arguments of tool calls as a mapping, or as text for templates that expect it."""
        has_calls = any("tool_calls" in message for message in messages)
        if has_calls and self._has_text_arguments:
            return self._render(_with_text_arguments(messages), tools=list(tools) or None, **options)
        try:
            text = self._render(messages, tools=list(tools) or None, **options)
            if not has_calls or not any(str(call) in text for call in _arguments(messages) if call):
                return text
        except Exception:
            if not has_calls:
                raise
            text = ""
        try:
            other = self._render(_with_text_arguments(messages), tools=list(tools) or None, **options)
        except Exception:  # noqa: BLE001 - as above
            if text:
                return text
            # The first error is the one of the form that transformers documents.
            return self._render(messages, tools=list(tools) or None, **options)
        self._has_text_arguments = True
        return other

    def _form(
        self, key: str, copy: Messages, texts: Sequence[_Text], tools: Tools, options: Mapping[str, Any]
    ) -> _Form:
        if (form := self._forms.get(key)) is not None:
            return form
        try:
            text = self._call(copy, tools, options)
        except Exception as error:  # as above
            raise ConfigError(
                f"the chat template depends on the texts of the messages in a way that cannot be checked ({error}): "
                "give the prompt as text"
            ) from error
        pieces = _MARKERS.split(text)
        literals = [piece.strip() for piece in pieces[::3]]
        order = [int(one or other) for one, other in zip(pieces[1::3], pieces[2::3], strict=True)]
        ignored = frozenset(one.key for i, one in enumerate(texts) if one.kind == "other" and i not in order)
        problems = chain(
            self._lost(texts, order),
            _misplaced(texts, order),
            self._changed(text, copy, texts, order, lambda other: self._call(other, tools, options)),
        )
        form = _Form(literals, order, next(problems, None), ignored)
        for name in (str(name).strip() for tool in tools for name in _names_of_tool(tool)):
            if not _is_in(name, text):
                raise ConfigError(f"the chat template does not show all of the tools ({name[:60]!r} is missing)")
        if len(key) <= _MAX_KEY:
            self._forms[key] = form
            if len(self._forms) > _MAX_FORMS:
                self._forms.popitem(last=False)
        return form

    def _lost(self, texts: Sequence[_Text], order: Sequence[int]) -> Iterator[tuple[int, str]]:
        shown = set(order)
        for i, one in enumerate(texts):
            if i not in shown and one.kind != "other" and not (one.is_optional and self._shows(one.key)):
                yield i, "does not show the model"

    def _changed(
        self,
        text: str,
        copy: Messages,
        texts: Sequence[_Text],
        order: Sequence[int],
        render: Callable[[Messages], str],
    ) -> Iterator[tuple[int, str]]:
        """Yield messages without a tag that the template looks for, and calls without a name or with Python's None."""
        for i in dict.fromkeys(order):
            one, message = texts[i], copy[texts[i].message]
            if one.kind == "content":
                tags = self._tags.findall(message["content"]) if self._tags else []
                has_thoughts = one.role == ASSISTANT and any(map(THINKING_TAG.search, tags))
                if tags and not has_thoughts and not _is_in(message["content"].strip(), text):
                    yield i, "changes"
            if one.kind == "call" and one.key == "name":
                names = [name for call in message["tool_calls"] for name in _keys(call["function"]["arguments"])]
                if not all(_is_in(name, text) for name in names):
                    yield i, "does not show the model all arguments of"
                if "None" in text and text.count("None") > render(_with_zeros(copy)).count("None"):
                    yield i, "writes None for a null in the arguments of"

    def _shows(self, key: str) -> bool:
        """Return True if the template shows the thinking of a last turn that is given in a key."""
        if key == "content":
            return True
        return self._can(key, lambda: self._probes_of(key))

    def _can(self, ability: str, probes: Callable[[], Iterator[str]]) -> bool:
        if ability not in self._abilities:
            self._abilities[ability] = any(_PROBE in text for text in probes())
        return self._abilities[ability]

    def _probes_of(self, key: str) -> Iterator[str]:
        call = {"type": "function", "function": {"name": "f", "arguments": {"a": "b"}}}
        answers = ({"content": "c"}, {"content": "", "tool_calls": [call]})
        for answer in answers:
            messages: Messages = [{"role": "user", "content": "u"}, {"role": ASSISTANT, **answer, key: _PROBE}]
            yield from self._try(messages, (), {"add_generation_prompt": False})

    def _require_tools(self, tools: Tools, options: Mapping[str, Any]) -> None:
        def probes() -> Iterator[str]:
            schema = {"type": "object", "properties": {"a": {"type": "string", "description": "d"}}, "required": ["a"]}
            tool = {"type": "function", "function": {"name": _PROBE, "description": "d", "parameters": schema}}
            user = {"role": "user", "content": "u"}
            yield from self._try([user], [tool], options)
            yield from self._try([{"role": "system", "content": "s"}, user], [tool], options)

        if tools and not self._can("tools", probes):
            raise ConfigError(
                "the chat template does not show tools to the model: leave out the tools, or use a model "
                "whose template does"
            )

    def _try(self, messages: Messages, tools: Tools, options: Mapping[str, Any]) -> Iterator[str]:
        try:
            yield self._call(messages, tools, options)
        except Exception:  # noqa: BLE001 - a template that cannot render it does not show it
            return

    def _with_markers(self, messages: Messages) -> tuple[Messages, list[_Text]]:
        """Return messages with markers in place of their texts, and the texts."""
        texts: list[_Text] = []
        last_user = max((i for i, message in enumerate(messages) if message["role"] == "user"), default=-1)
        copies = []
        for number, message in enumerate(messages):
            role, is_past = message["role"], message["role"] == ASSISTANT and number < last_user

            def mark(
                key: str, kind: Any, value: Any, *, optional: bool = False, i: int = number, by: str = role
            ) -> Any:
                texts.append(_Text(i, by, key, kind, value, optional))
                if isinstance(value, str):
                    return f"qzm{len(texts) - 1}mzq"
                marker = 9_100_000_000 + len(texts) - 1
                return marker if isinstance(value, int) else marker + 0.5

            copy = dict(message)
            copy["content"] = self._marked_content(message["content"], is_past, mark)
            for key, value in message.items():
                is_name = key == "name" and role not in ("tool", "function")  # theirs belong to calls
                if (is_name or key not in _VERBATIM_KEYS) and isinstance(value, str) and value.strip():
                    kind = "thinking" if THINKING_KEY.search(key) else "other"
                    copy[key] = mark(key, kind, value, optional=is_past)
            if "tool_calls" in message:
                copy["tool_calls"] = [_marked_call(call, mark) for call in message["tool_calls"]]
            copies.append(copy)
        return copies, texts

    def _marked_content(self, content: str, is_past: bool, mark: Callable[..., Any]) -> str:
        if self._tags is None or not (pieces := self._tags.split(content))[1:]:
            return mark("content", "content", content) if content.strip() else content
        marked = []
        for i, piece in enumerate(pieces):
            if i % 2 or not piece.strip():
                marked.append(piece)
                continue
            ends = next(iter(pieces[i + 1 : i + 2]), "")
            is_thought = is_past and bool(THINKING_TAG.search(ends)) and ends.startswith(("</", "<c", "[/"))
            marked.append(mark("content", "content", piece, optional=is_thought))
        return "".join(marked)


def _misplaced(texts: Sequence[_Text], order: Sequence[int]) -> Iterator[tuple[int, str]]:
    """Yield texts that the template repeats, or shows after those of a later message."""
    counts = Counter(order)
    last = last_piece = -1
    for i, count in counts.items():  # in the order of their first places
        one = texts[i]
        if count > 1 and one.kind in ("content", "thinking"):
            yield i, "repeats"
        if one.message == 0 and one.role in ("system", "developer"):
            continue  # some templates put it before the last message of the user
        if one.message < last or (one.kind == "content" and i < last_piece):
            yield i, "does not show in its place"
        last = one.message
        last_piece = i if one.kind == "content" else last_piece


def _is_in(part: str, text: str) -> bool:
    return part in text or _escaped(part) in text


def _marked_call(call: dict[str, Any], mark: Callable[..., Any]) -> dict[str, Any]:
    def marked(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: marked(inner) for name, inner in value.items()}
        if isinstance(value, list):
            return [marked(inner) for inner in value]
        is_text = isinstance(value, str) and value.strip()
        return mark("arguments", "call", value) if is_text or type(value) in (int, float) else value

    function = call["function"]
    name = mark("name", "call", function["name"])
    return {**call, "function": {**function, "name": name, "arguments": marked(function["arguments"])}}


def _with_zeros(value: Any) -> Any:
    """Return messages, or a part of them, with 0 in place of each null: only arguments of calls have any."""
    if isinstance(value, dict):
        return {name: _with_zeros(inner) for name, inner in value.items()}
    return list(map(_with_zeros, value)) if isinstance(value, list) else 0 if value is None else value


def _end_of_texts(rendered: str, form: _Form, texts: Sequence[_Text]) -> int | None:
    """Return where the last text ends if a conversation is its form with the texts in their places, else None.

    White space around a text may differ: most templates remove some.
    """
    position = end = 0
    for literal, index in zip(form.literals, [*form.order, None], strict=True):
        position = _skip_space(rendered, position)
        if not rendered.startswith(literal, position):
            return None
        position += len(literal)
        if index is None:
            break
        position = _skip_space(rendered, position)
        found = next((one for one in _spellings(texts[index]) if rendered.startswith(one, position)), None)
        if found is None:
            return None
        position += len(found)
        end = position
    return end if not rendered[position:].strip() else None


def _spellings(text: _Text) -> Iterator[str]:
    """Yield the ways in which a template may write a text or number: as it is, in JSON, or a call in Python."""
    value = text.value
    if isinstance(value, str):
        yield value.strip()
        yield _escaped(value).strip()
        yield json.dumps(value)[1:-1].strip()
        if text.kind == "call":
            yield repr(value)[1:-1].strip()
    else:
        yield json.dumps(value)
        yield str(value)


def _skip_space(text: str, position: int) -> int:
    while position < len(text) and text[position].isspace():
        position += 1
    return position


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _keys(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        yield from value
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _keys(inner)


def _names_of_tool(tool: Mapping[str, Any]) -> Iterator[object]:
    function = tool.get("function", tool)
    if isinstance(function, Mapping):
        yield from (function[key] for key in ("name", "description") if function.get(key))
        parameters = function.get("parameters")
        yield from (parameters.get("properties") or {}) if isinstance(parameters, Mapping) else ()


def _arguments(messages: Messages) -> Iterator[dict[str, Any]]:
    for message in messages:
        for call in message.get("tool_calls", ()):
            yield call["function"]["arguments"]


def _with_text_arguments(messages: Messages) -> Messages:
    def with_text(call: dict[str, Any]) -> dict[str, Any]:
        function = call["function"]
        text = json.dumps(function["arguments"], ensure_ascii=False)
        return {**call, "function": {**function, "arguments": text}}

    return [
        {**message, "tool_calls": list(map(with_text, message["tool_calls"]))} if "tool_calls" in message else message
        for message in messages
    ]


def _describe(text: _Text, what: str) -> str:
    part = f"the tool call's {text.key}" if text.kind == "call" else f"{text.key}"
    return (
        f"message {text.message + 1} ({text.role}): the chat template {what} {part} {text.value!r:.80}: correct the "
        "message, or give the prompt as text"
    )
