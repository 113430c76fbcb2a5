"""The formats of tool calls of chat models, each with its reader. Pure: needs neither torch nor a tokenizer.

Models write what they like, so each pattern has to take linear time: one that is searched for begins with a literal,
no repeat can match what follows it, and what `begin` repeats after its literal ends before the next such literal.
"""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

Tools = Sequence[Mapping[str, Any]]
TYPE_NAMES: dict[type, str] = {
    str: "string",
    int: "integer",
    float: "number",
    bool: "boolean",
    dict: "object",
    list: "array",
    type(None): "null",
}
"""Type of a JSON value -> its name in schemas."""

_Found = tuple[list[tuple[str, dict[str, Any], str]], int]
"""The name, arguments and id of calls, and the position after them."""


class Unreadable(Exception):
    """A call is malformed; the text says how, to the model."""


class Format(NamedTuple):
    """A format of tool calls."""

    begin: re.Pattern[str]
    """What a call begins with; without a group `name` if only the rest says which call."""
    read: Callable[[str, re.Match[str], Tools], _Found]
    """Reads the call that begins with a match; raises `Unreadable`."""
    close: re.Pattern[str] | None
    """What ends a call, also one that cannot be read, after any space; None: the turn."""

    def skip(self, text: str, begin: re.Match[str]) -> int:
        """Return the position after a call that cannot be read."""
        end = self.close.search(text, begin.end()) if self.close is not None else None
        return len(text) if end is None else end.end()


_ONLY_TAGS = re.compile(r"(?:\s|<[^<>\s]{1,40}>|\[/?[A-Z_]{1,40}\])*+\Z")
"""What may follow the last call of a turn that lacks its closing tag: the tokens that end a turn."""


def _closed(text: str, at: int, close: re.Pattern[str] | None) -> int:
    if close is None:
        return at
    if (end := close.match(text, _after_space(text, at))) is not None:
        return end.end()
    if _ONLY_TAGS.match(text, at):
        return at
    raise Unreadable(f"the call continues with {text[at : at + 40]!r} after its JSON")


def _json_value(text: str, at: int) -> tuple[Any, int]:
    try:
        return _JSON.raw_decode(text, _after_space(text, at))
    except ValueError as error:
        raise Unreadable(f"it is no JSON: {error}") from error


_JSON = json.JSONDecoder()
_SPACE = re.compile(r"\s*+")


def _after_space(text: str, at: int) -> int:
    space = _SPACE.match(text, at)
    return space.end() if space else at


def _arguments(given: Any) -> dict[str, Any]:
    if given is None:
        return {}
    if not isinstance(given, dict):
        raise Unreadable("the arguments are to be a JSON object")
    return given


def _named(value: Any) -> tuple[str, dict[str, Any], str]:
    if not isinstance(value, dict):
        raise Unreadable("it is to be a JSON object with a name and arguments")
    name = next((value[key] for key in ("name", "tool_name") if key in value), None)
    if not isinstance(name, str):
        raise Unreadable("its name is missing" if name is None else "its name is to be text")
    given = next((value[key] for key in ("arguments", "parameters") if key in value), None)
    call_id = next((value[key] for key in ("id", "tool_call_id") if isinstance(value.get(key), str)), "")
    return name, _arguments(given), call_id


def _json_format(begin: str, close: str | None) -> Format:
    """Return a format of a JSON object, or a list of them, with name and arguments, between tags."""
    end = None if close is None else re.compile(close)

    def read(text: str, match: re.Match[str], tools: Tools) -> _Found:
        del tools
        value, at = _json_value(text, match.end())
        calls = value if isinstance(value, list) else [value]
        return [_named(one) for one in calls], _closed(text, at, end)

    return Format(re.compile(begin), read, end)


def _read_bare_json(text: str, match: re.Match[str], tools: Tools) -> _Found:
    """Read JSON that no tags enclose; an object that has other keys than a call's is an answer."""
    del tools
    value, at = _json_value(text, match.end())
    if not match[0] and not (isinstance(value, dict) and "name" in value and set(value) <= _KEYS_OF_CALLS):
        return [], at
    return [_named(value)], at


_KEYS_OF_CALLS = {"type", "name", "parameters", "arguments", "id"}


def _after_name(begin: str, close: str | None) -> Format:
    """Return a format that gives the name in a head, and the arguments as a JSON object."""
    end = None if close is None else re.compile(close)

    def read(text: str, match: re.Match[str], tools: Tools) -> _Found:
        del tools
        if match["name"] is None:
            raise Unreadable("its name is missing")
        value, at = _json_value(text, match.end())
        groups = match.groupdict()
        return [(match["name"].strip(), _arguments(value), groups.get("id") or "")], _closed(text, at, end)

    return Format(re.compile(begin), read, end)


def _tagged(begin: str, parameter: str, close: str) -> Format:
    """Return a format that has each argument in tags, as plain text whose type only the schema knows."""
    one, end = re.compile(parameter, re.DOTALL), re.compile(close)

    def read(text: str, match: re.Match[str], tools: Tools) -> _Found:
        if match["name"] is None:
            raise Unreadable("its name is missing")
        name, at, arguments = match["name"].strip(), _after_space(text, match.end()), dict[str, Any]()
        types = _argument_types(name, tools)
        while (found := one.match(text, at)) is not None:
            key = found["key"].strip()
            arguments[key] = _typed(found["value"], types.get(key, frozenset()))
            at = _after_space(text, found.end())
        closing = end.match(text, at)
        if closing is None:
            raise Unreadable(f"after {len(arguments)} arguments it continues with {text[at : at + 40]!r}")
        return [(name, arguments, "")], closing.end()

    return Format(re.compile(begin), read, end)


def _python_format(begin: str, close: str | None) -> Format:
    """Return a format of Python calls with keyword arguments, in a list or one per line."""
    end = None if close is None else re.compile(close)

    def read(text: str, match: re.Match[str], tools: Tools) -> _Found:
        del tools
        closing = end.search(text, match.end()) if end is not None else None
        code = text[match.end() : closing.start() if closing else len(text)]
        if closing is None:
            code = _without_last_tags(code)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", SyntaxWarning)  # about what the model wrote
                # Some templates write line breaks in text as they are.
                tree = ast.parse(_PYTHON_TEXT.sub(lambda found: found[0].replace("\n", "\\n"), code.strip()))
        except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
            raise Unreadable(f"it is no Python: {error}") from error
        return [(*_python_call(node), "") for node in _python_calls(tree)], closing.end() if closing else len(text)

    return Format(re.compile(begin), read, end)


_PYTHON_TEXT = re.compile(r"'(?:\\.|[^'\\])*+(?:'|\\?\Z)|\"(?:\\.|[^\"\\])*+(?:\"|\\?\Z)", re.DOTALL)
"""Text in quotes, also without the last one: else each quote behind would be tried to the end."""


def _without_last_tags(text: str) -> str:
    """Return a text less the tags and the space at its end."""
    found = _LAST_TAGS_REVERSED.match(text[::-1])
    return text[: len(text) - found.end()] if found else text


_LAST_TAGS_REVERSED = re.compile(r"(?:\s|>[^<>\s]{1,40}<)*+")


def _python_calls(tree: ast.Module) -> Iterator[ast.expr]:
    for statement in tree.body:
        if not isinstance(statement, ast.Expr):
            raise Unreadable("it is to be a list of calls")
        value = statement.value
        yield from value.elts if isinstance(value, ast.List | ast.Tuple) else [value]


def _python_call(node: ast.expr) -> tuple[str, dict[str, Any]]:
    if not isinstance(node, ast.Call):
        raise Unreadable("it is to be a list of calls")
    if node.args or any(keyword.arg is None for keyword in node.keywords):
        raise Unreadable("arguments are to be given by name")
    return ast.unparse(node.func), {str(keyword.arg): _python_value(keyword.value) for keyword in node.keywords}


def _python_value(node: ast.expr) -> Any:
    match node:
        case ast.Dict(keys=keys, values=values):
            texts = [key.value if isinstance(key, ast.Constant) else None for key in keys]
            if not all(isinstance(key, str) for key in texts):
                raise Unreadable("keys are to be text")
            return {str(key): _python_value(value) for key, value in zip(texts, values, strict=True)}
        case ast.List() | ast.Tuple():
            return [_python_value(one) for one in node.elts]
        case ast.Name(id=name) if name in _WORDS:
            return _WORDS[name]
    try:
        value = ast.literal_eval(node)
    except (ValueError, TypeError) as error:
        raise Unreadable(f"{ast.unparse(node)[:40]} is no value") from error
    if not isinstance(value, str | int | float | None):
        raise Unreadable(f"{ast.unparse(node)[:40]} is no JSON value")
    return value


_WORDS = {"true": True, "false": False, "null": None, "True": True, "False": False, "None": None}


def _braced(begin: str, quote: str, close: str) -> Format:
    """Return Gemma's format: braces, keys without quotes, and text between tokens that serve as quotes."""
    end = re.compile(re.escape(close))

    def read(text: str, match: re.Match[str], tools: Tools) -> _Found:
        del tools
        if match["name"] is None:
            raise Unreadable("its name is missing")
        value, at = _braced_value(text, match.end(), quote)
        return [(match["name"].strip(), _arguments(value), "")], _closed(text, at, end)

    return Format(re.compile(begin), read, end)


def _braced_value(text: str, at: int, quote: str) -> tuple[Any, int]:
    if text.startswith(quote, at):
        return _quoted(text, at, quote)
    if text[at : at + 1] == "[":
        items, at = list[Any](), at + 1
        while text[at : at + 1] != "]":
            value, at = _braced_value(text, at, quote)
            items.append(value)
            at = _after_comma(text, at, "]")
        return items, at + 1
    if text[at : at + 1] == "{":
        pairs, at = dict[str, Any](), at + 1
        while text[at : at + 1] != "}":
            key, at = _braced_key(text, at, quote)
            pairs[key], at = _braced_value(text, at, quote)
            at = _after_comma(text, at, "}")
        return pairs, at + 1
    found = _PLAIN.match(text, at)
    plain = found[0].strip() if found else ""
    if not plain:
        raise Unreadable(f"a value is missing before {text[at : at + 40]!r}")
    at += len(found[0]) if found else 0
    if plain in _WORDS:
        return _WORDS[plain], at
    try:
        return json.loads(plain), at
    except ValueError:
        return plain, at


_PLAIN = re.compile(r"[^,\]}<]+")
_BARE_KEY = re.compile(r"\s*+([^:{}\[\],]++):\s*")
_COMMA = re.compile(r"\s*(,\s*)?")


def _quoted(text: str, at: int, quote: str) -> tuple[str, int]:
    start = at + len(quote)
    end = text.find(quote, start)
    if end < 0:
        raise Unreadable(f"text is to end with {quote}")
    return text[start:end], end + len(quote)


def _braced_key(text: str, at: int, quote: str) -> tuple[str, int]:
    if text.startswith(quote, at):
        key, at = _quoted(text, at, quote)
        if text[at : at + 1] == ":":
            return key, at + 1
    elif (found := _BARE_KEY.match(text, at)) is not None:
        return found[1].strip(), found.end()
    raise Unreadable(f"a key and a colon are missing before {text[at : at + 40]!r}")


def _after_comma(text: str, at: int, close: str) -> int:
    found = _COMMA.match(text, at)
    at = found.end() if found else at
    if text[at : at + 1] != close and not (found and found[1]):
        raise Unreadable(f"a comma or {close} is missing before {text[at : at + 40]!r}")
    return at


# --- types of arguments ---


def _argument_types(name: str, tools: Tools) -> dict[str, frozenset[str]]:
    """Return a tool's argument -> the JSON types that its schema allows."""
    for tool in tools:
        function = tool.get("function", tool)
        if function.get("name") == name:
            root = function.get("parameters") or {}
            return {key: frozenset(_types(one, root, 0)) for key, one in (root.get("properties") or {}).items()}
    return {}


def _types(schema: Any, root: Mapping[str, Any], depth: int) -> Iterator[str]:
    if not isinstance(schema, dict) or depth > _MAX_REFERENCES:
        return
    kind = schema.get("type")
    yield from [kind] if isinstance(kind, str) else kind or ()
    if kind is None:
        for value in [*schema.get("enum", ()), *([schema["const"]] if "const" in schema else ())]:
            yield TYPE_NAMES[type(value)]
    for choice in ("anyOf", "oneOf", "allOf"):
        for one in schema.get(choice, ()):
            yield from _types(one, root, depth + 1)
    if isinstance(reference := schema.get("$ref"), str):
        yield from _types((root.get("$defs") or {}).get(reference.rpartition("/")[2]), root, depth + 1)


_MAX_REFERENCES = 8


def _typed(text: str, types: frozenset[str]) -> Any:
    """Return the value of an argument's text: text, unless the schema allows another type that the text has."""
    if not types or types == {"string"}:
        return text
    plain = text.strip()
    value: Any
    if plain.lower() in {"null", "none", "true", "false"}:
        value = _WORDS[plain.lower() if plain.lower() == "null" else plain.capitalize()]
    else:
        try:
            value = json.loads(plain)
        except (ValueError, RecursionError):
            return text
    kind = TYPE_NAMES[type(value)]
    return value if kind in types or (kind == "integer" and "number" in types) else text


# --- the formats ---

_PREFIX = r"(?:[A-Za-z]\w*:|\uff5cDSML\uff5c)?"
_CALLS_BEGIN, _CALLS_END, _CALL_BEGIN, _CALL_END, _CALL_SEP = (
    f"<\uff5ctool▁{part}\uff5c>" for part in ("calls▁begin", "calls▁end", "call▁begin", "call▁end", "sep")
)
"""DeepSeek's tags."""

FORMATS: dict[str, Format] = {
    # Qwen2.5, Qwen3, Hermes, Granite 4
    "hermes": _json_format("<tool_call>", "</tool_call>"),
    # Qwen3-Coder, Qwen3.5 and later, Nemotron 3, Seed-OSS
    "qwen3_coder": _tagged(
        r"(?:<(?:seed:)?tool_call>\s*)?<function=(?P<name>[^<>\n]+)>|<(?:seed:)?tool_call>",
        r"<parameter=(?P<key>[^>\n]+)>\n?(?P<value>.*?)\n?</parameter>(?=\s*(?:<parameter=|</function>))",
        r"(?:</function>(?:\s*</(?:seed:)?tool_call>)?|</(?:seed:)?tool_call>)",
    ),
    # GLM 4.5 and later
    "glm": _tagged(
        r"<tool_call>\s*(?P<name>[^\s<{]+)?",
        r"<arg_key>(?P<key>[^<]*)</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>(?=\s*(?:<arg_key>|</tool_call>))",
        "</tool_call>",
    ),
    # MiniMax M2, Muse Glimmer, DeepSeek V3.2
    "invoke": _tagged(
        rf'(?:<{_PREFIX}(?:function_calls|tool_call)>\s*)?<{_PREFIX}invoke name="(?P<name>[^"]+)">',
        rf'<{_PREFIX}parameter name="(?P<key>[^"]+)"[^>]*>(?P<value>.*?)</{_PREFIX}parameter>'
        rf"(?=\s*(?:<{_PREFIX}parameter |</{_PREFIX}invoke>))",
        rf"</{_PREFIX}invoke>(?:\s*</{_PREFIX}(?:function_calls|tool_call)>)?",
    ),
    "gemma4": _braced(r"<\|tool_call>(?:\s*call:(?P<name>[^<{\s]+)(?=\{))?", '<|"|>', "<tool_call|>"),
    "functiongemma": _braced(
        r"<start_function_call>(?:\s*call:(?P<name>[^<{\s]+)(?=\{))?", "<escape>", "<end_function_call>"
    ),
    # gpt-oss
    "harmony": _after_name(
        r"to=functions\.(?P<name>[\w.-]{1,200}+)(?:[^<]|<\|(?:channel|constrain)\|>){0,200}+<\|message\|>",
        r"<\|(?:call|end)\|>",
    ),
    "deepseek_v3": _after_name(
        rf"(?:{_CALLS_BEGIN}\s*)?{_CALL_BEGIN}(?:\s*function\s*{_CALL_SEP}(?P<name>[^\n<]+)\n+```json\n?)?",
        rf"```\s*{_CALL_END}(?:\s*{_CALLS_END})?",
    ),
    "deepseek_v31": _after_name(
        rf"(?:{_CALLS_BEGIN}\s*)?{_CALL_BEGIN}(?:(?P<name>[^<{{\n]+){_CALL_SEP})?", rf"{_CALL_END}(?:\s*{_CALLS_END})?"
    ),
    "kimi_k2": _after_name(
        r"(?:<\|tool_calls_section_begin\|>\s*)?<\|tool_call_begin\|>\s*"
        r"(?:(?P<id>(?:functions\.)?(?P<name>[^:<\s]+)(?::\d+)?)\s*<\|tool_call_argument_begin\|>)?",
        r"<\|tool_call_end\|>(?:\s*<\|tool_calls_section_end\|>)?",
    ),
    "mistral": _json_format(r"\[TOOL_CALLS\]", None),
    # Mistral's tokenizers from version 11 on
    "mistral_args": _after_name(
        r"\[TOOL_CALLS\](?:\s*(?P<name>[^\[{\s]+)(?:\[CALL_ID\](?P<id>\w+))?(?:\[ARGS\])?(?=\s*\{))?", None
    ),
    # Command R7B and later
    "cohere": _json_format(r"<\|START_ACTION\|>", r"<\|END_ACTION\|>"),
    # Nemotron Nano 2
    "toolcall": _json_format("<TOOLCALL>", "</TOOLCALL>"),
    "jamba": _json_format("<tool_calls>", "</tool_calls>"),
    # Granite 3, Phi-4 mini
    "granite": _json_format(r"<\|tool_call\|>", r"(?:<\|/tool_call\|>)?"),
    "functools": _json_format(r"functools(?=\[)", None),
    "lfm2": _python_format(r"<\|tool_call_start\|>", r"<\|tool_call_end\|>"),
    "olmo3": _python_format("<function_calls>", "</function_calls>"),
    # Llama 3.1 to 3.3. Without tags of their own: after all that have some.
    "llama3_json": Format(
        re.compile(r'<\|python_tag\|>\s*|(?=\{\s*"(?:type|name|parameters|arguments)"\s*:)'), _read_bare_json, None
    ),
    # Llama 4
    "pythonic": _python_format(r"(?:\A|(?<=\|>))\s*(?:<\|python_start\|>)?(?=\[\s*[A-Za-z_][\w.]*\()", None),
}
"""Name of a format -> how it is read, in the order in which they are tried; most names are those of vLLM's parsers."""
