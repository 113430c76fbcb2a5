"""Base classes for sections of user-written files, their YAML, and pydantic's errors as readable lines."""

from __future__ import annotations

import difflib
import itertools
import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Container, Iterator, Sequence
from typing import Annotated, Any, get_args

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError, model_validator
from pydantic_core import ErrorDetails
from yaml.constructor import ConstructorError

Place = tuple[int | str, ...]
Advice = Callable[[str, object, bool], str]
"""(dotted key, value, whether it may be misspelt) -> what to write instead."""

_ARM = re.compile(r"(?:literal|tuple|list|dict|constrained|function)[\[-].*|str|int|float|bool")
"""Location parts with which pydantic names one alternative of a union."""
_FIELD_PREFIX = re.compile(r"([a-z_]+(?:\.[\w-]+)*): ")
"""The beginning of an error about several fields that names the one to change."""
_EXPECTED = {
    "string_type": "text",
    "string_too_short": "text with {min_length} or more characters",
    "string_too_long": "text with {max_length} characters at most",
    "string_pattern_mismatch": "text that matches {pattern}",
    "int_type": "a whole number",
    "int_parsing": "a whole number",
    "int_parsing_size": "a smaller number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "float_parsing": "a number",
    "finite_number": "a finite number",
    "greater_than": "above {gt}",
    "greater_than_equal": "{ge} or more",
    "less_than": "below {lt}",
    "less_than_equal": "{le} or less",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    **dict.fromkeys(
        (
            "datetime_type",
            "datetime_parsing",
            "datetime_from_date_parsing",
            "datetime_object_invalid",
            "timezone_aware",
        ),
        "a time with its date and zone, such as 2026-12-01T18:00:00+01:00",
    ),
    "list_type": "a list",
    "tuple_type": "a list",
    "too_short": "a list with {min_length} or more entries",
    "too_long": "a list with {max_length} entries at most",
    "dict_type": "a section",
    "literal_error": "{expected}",
    "enum": "{expected}",
}
"""Type of pydantic's error -> the expected value."""
_NAMES = {
    r"^[A-Za-z0-9][A-Za-z0-9._-]*$": "ASCII letters, digits, '.', '_' and '-' only, with a letter or digit first",
    r"^[A-Za-z0-9][A-Za-z0-9_-]*$": "ASCII letters, digits, '_' and '-' only, with a letter or digit first",
    r"^[A-Za-z0-9._-]*$": "ASCII letters, digits, '.', '_' and '-' only",
}
"""Pattern of a name -> the same in words."""
_SHOWS_VALUE = {
    "int_type",
    "int_parsing",
    "int_parsing_size",
    "int_from_float",
    "float_type",
    "float_parsing",
    "finite_number",
    "greater_than",
    "greater_than_equal",
    "less_than",
    "less_than_equal",
    "literal_error",
    "enum",
}
"""Types of pydantic's errors that show the rejected value; texts may be secrets, but names are not."""
_MAX_SHOWN = 40
"""Characters of a rejected value."""
_MESSAGES = {
    "missing": "missing: give it",
    "extra_forbidden": "unknown key: remove it or fix its spelling",
    "invalid_key": "a key should be text: put it in quotes",
}


def _function_path(value: str) -> str:
    module, _, name = value.partition(":")
    if not module or not name:
        raise ValueError(f"{value!r} is not of the form package.module:function, such as rw:score for score of rw.py")
    if "/" in module or module.endswith(".py"):
        parts = [part for part in module.removesuffix(".py").split("/") if part != "."]
        inner = parts[-1:] if {"", "..", "~"} & {*parts} else parts
        raise ValueError(
            f"{value!r} names a file: name its module, as {'.'.join(inner)}:{name}, which the trainer imports from the "
            "folder in which it was started, or from a folder of PYTHONPATH"
        )
    return value


FunctionPath = Annotated[str, AfterValidator(_function_path)]
"""The path of a user's function: `package.module:function`."""


class Section(BaseModel):
    """A section of a user-written file: frozen; unknown keys, infinities, NaN and truths as numbers are rejected."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _truths_are_no_numbers(cls, section: object) -> object:
        """Reject what pydantic would read as 1 or 0, such as YAML's yes."""
        if not isinstance(section, dict):
            return section
        for key in cls.model_fields.keys() & section.keys():
            given = section[key] if isinstance(section[key], list | tuple) else [section[key]]
            truths = [one for one in given if isinstance(one, bool)]
            parts = {*_parts(cls.model_fields[key].annotation)}
            if truths and {int, float} & parts and not {bool, Any, object, "off"} & parts:
                shown = str(truths[0]).lower()
                raise ValueError(f"{key}: should be a number, not {shown}, as YAML reads yes, no, on and off")
        return section


def _parts(annotation: object) -> Iterator[object]:
    """Yield a field's type and all types and literals within it."""
    yield annotation
    for part in get_args(annotation):
        yield from _parts(part)


def describe(
    error: ValidationError, model: type[BaseModel] | None = None, whole: str = "job", advice: Advice | None = None
) -> list[str]:
    """Return one line per invalid field, such as `data.train: missing: give it`.

    Args:
        error: pydantic's error.
        model: the validated class; an unknown key that resembles one of its keys gets a suggestion.
        whole: names the place of an error about everything.
        advice: returns what to write instead of an unknown key, or an empty text; it takes precedence over a similar
            key, unless the key would have to be misspelt.

    """
    found: dict[Place, list[ErrorDetails]] = {}
    items = [_with_suggestion(_normalize_key_error(item), model, advice) for item in error.errors()]
    above = {item["loc"][:depth] for item in items for depth in range(len(item["loc"]))}
    for item in items:
        if item["type"] == "too_short" and item["loc"] in above:
            continue  # a consequence of invalid entries
        found.setdefault(_field(item), []).append(item)
    problems = [one for field, items in found.items() for one in _problems(field, items)]
    keys = set(model.model_fields) if model else set[str]()
    return [_line(".".join(map(str, place)), text, whole, keys) for place, text in problems]


def first_error(error: ValidationError, whole: str = "the file") -> str:
    """Return where and what the first error is; `whole` stands for the place of an error about everything."""
    first = error.errors()[0]
    return f"{'.'.join(map(str, first['loc'])) or whole}: {first['msg']}"


def one_of(given: object, words: Sequence[str]) -> str:
    """Return the text of an error about a field that takes one of these words, at least two, and was given another."""
    *others, last = map(repr, words)
    choice = f"{', '.join(others)} or {last}"
    if not isinstance(given, str):
        return f"should be {choice}"
    by_lower = {word.lower(): word for word in words}
    similar = [by_lower[word] for word in difflib.get_close_matches(given.lower(), by_lower, 1)]
    hint = f"did you mean {similar[0]!r}? Use" if similar else "use"
    return f"{_shown(given)} is unknown: {hint} {choice}"


def off_is_no_boolean(value: object) -> object:
    """Return the word off for false, as YAML reads a bare off; a bare on becomes text, which the field rejects."""
    return {False: "off", True: "on"}[value] if isinstance(value, bool) else value


def _line(place: str, text: str, whole: str, keys: Container[str]) -> str:
    """Put the field before the text, unless the text begins with a more specific one, such as one of the keys."""
    prefix = _FIELD_PREFIX.match(text)
    is_field = prefix and ("." in prefix[1] or (not place and prefix[1] in keys))
    return text if is_field and text.startswith(place) else f"{place or whole}: {text}"


def _normalize_key_error(item: ErrorDetails) -> ErrorDetails:
    """Return an error about a mapping's key in the form of one about a section's key."""
    *place, last = item["loc"] or ("",)
    if item["type"] == "string_type" and last == "[key]":
        return {**item, "type": "invalid_key", "loc": tuple(place)}
    return item


def _with_suggestion(item: ErrorDetails, model: type[BaseModel] | None, advice: Advice | None) -> ErrorDetails:
    """Add to an error about an unknown key the advice, or else the most similar known key, if there is one."""
    if item["type"] != "extra_forbidden":
        return item
    place, given = ".".join(map(str, item["loc"])), item["input"]
    text = advice(place, given, False) if advice else ""
    known = _keys(model, item["loc"][:-1]) if model else []
    if not text and (similar := difflib.get_close_matches(place.rpartition(".")[2], known, 1)):
        text = f"did you mean {similar[0]}?"
    if not text and advice:
        text = advice(place, given, True)
    return {**item, "type": "misspelt", "msg": f"unknown key: {text}"} if text else item


def _keys(model: type[BaseModel], place: Place) -> list[str]:
    """Return the keys of the section at a location."""
    sections = [model]
    for name in place:
        # A location also contains list indexes, which stay in the same section.
        fields = [one.model_fields[name] for one in sections if isinstance(name, str) and name in one.model_fields]
        sections = [one for field in fields for one in _sections(field.annotation)] or sections
    return [key for one in sections for key in one.model_fields]


def _sections(annotation: object) -> Iterator[type[BaseModel]]:
    """Yield the section classes within a field's type."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from _sections(part)


def _field(item: ErrorDetails) -> Place:
    """Return the field's location, without pydantic's names of union members and without a missing list entry."""
    place = item["loc"]
    if item["type"] == "missing" and isinstance(place[-1], int):
        place = place[:-1]
    arm = next((i for i, part in enumerate(place) if isinstance(part, str) and _ARM.fullmatch(part)), len(place))
    return place[:arm]


def _problems(field: Place, items: Sequence[ErrorDetails]) -> Iterator[tuple[Place, str]]:
    """Yield a field's errors, each with its location."""
    depth, last = len(field), items[-1]["loc"]
    if items[-1]["type"] == "missing" and len(last) > depth:
        yield field, f"should be a list with {int(last[-1]) + 1} entries"
    elif len(last) == depth:
        yield from ((field, _text(item)) for item in items)
    elif inner := [item for item in items if len(item["loc"]) > depth + 1]:
        # The union member with an invalid part is the one that was meant.
        yield from (((*field, *item["loc"][depth + 1 :]), _text(item)) for item in inner)
    else:
        expected = ", or ".join(_expected(item) or _text(item) for item in items)
        yield field, f"should be {expected}{_instead(items[0])}"


def _text(item: ErrorDetails) -> str:
    if message := _MESSAGES.get(item["type"]):
        return message
    words = re.findall(r"'([^']*)'", item["ctx"]["expected"]) if item["type"] in {"literal_error", "enum"} else []
    if len(words) > 1:
        return one_of(item["input"], words)
    if expected := _expected(item):
        return f"should be {expected}{_instead(item)}"
    return item["msg"].removeprefix("Value error, ")


def _instead(item: ErrorDetails) -> str:
    """Return the rejected value as the end of an error about a number or a choice; empty for other values."""
    given = item["input"]
    if item["type"] not in _SHOWS_VALUE and item.get("ctx", {}).get("pattern") not in _NAMES:
        return ""
    if given is None:
        return ", not null: give one, or leave the key out if it has a default"
    is_shown = isinstance(given, int | float | str) and not isinstance(given, bool)
    return f", not {_shown(given)}" if is_shown else ""


def _shown(given: object) -> str:
    """Return a value for an error; a long one is cut."""
    text = repr(given)
    end = text[0] if isinstance(given, str) else ""
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}...{end}"


def _expected(item: ErrorDetails) -> str:
    """Return the expected value; empty if pydantic's own message says more."""
    context = item.get("ctx", {})
    if item["type"] == "model_type":
        return _section(context["class_name"])
    if words := _NAMES.get(context.get("pattern", "")):
        return words
    shown = {name: int(n) if isinstance(n, float) and n.is_integer() else n for name, n in context.items()}
    return _EXPECTED.get(item["type"], "").format(**shown)


def _section(name: str, base: type[BaseModel] = Section) -> str:
    """Describe a section by the name of its class."""
    classes = [base]
    for one in classes:
        if one.__name__ == name:
            return f"a section with the keys {', '.join(one.model_fields)}"
        classes += one.__subclasses__()
    return "a section"


# --- YAML and JSON without what readers of a file would read differently ---------------------------------------------


_MERGE = "tag:yaml.org,2002:merge"
_MAX_VALUES = 1 << 20
"""Of a document with its aliases replaced, above what a file of the largest job has."""
_OTHER_BASE = re.compile(r"[-+]?0[0-9_]+|[^:]+:.*")
"""What YAML 1.1 reads to the base 8 or 60."""


class DuplicateKey(ConstructorError):
    """A mapping has the same key twice."""


class _Loader(yaml.SafeLoader):
    def get_single_node(self) -> yaml.Node | None:
        node: yaml.Node | None = super().get_single_node()
        if node is not None:
            self._count(node, {})
        return node

    def _count(self, node: yaml.Node, counts: dict[yaml.Node, int]) -> int:
        """Return the number of values of a node with its aliases replaced; each node is visited once."""
        if node not in counts:
            counts[node] = _MAX_VALUES  # an alias within itself
            parts = [*itertools.chain(*node.value)] if isinstance(node, yaml.MappingNode) else node.value
            inner = parts if isinstance(node, yaml.CollectionNode) else ()
            counts[node] = 1 + sum(self._count(one, counts) for one in inner)
        if counts[node] > _MAX_VALUES:
            problem = f"with its aliases replaced it has more than {_MAX_VALUES} values: write what is meant"
            raise ConstructorError(None, None, problem, node.start_mark)
        return counts[node]

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[tuple[str, str]] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag == _MERGE:
                continue
            if (key.tag, key.value) in seen:
                raise DuplicateKey(None, None, f"{key.value!r} is given twice: remove one", key.start_mark)
            seen.add((key.tag, key.value))
        return super().construct_mapping(node, deep)

    def construct_timestamp(self, node: yaml.ScalarNode) -> Any:
        return self.construct_yaml_timestamp(node)

    def construct_number(self, node: yaml.ScalarNode) -> int | float:
        if _OTHER_BASE.fullmatch(node.value):
            problem = f"{node.value} is a number to the base 8 or 60 in YAML: write it in decimal, or text in quotes"
            raise ConstructorError(None, None, problem, node.start_mark)
        is_int = node.tag.endswith(":int")
        number: int | float = self.construct_yaml_int(node) if is_int else self.construct_yaml_float(node)
        return number


# Libraries replace it in PyYAML's own class for the whole process, such as the grammars of vLLM.
_Loader.add_constructor("tag:yaml.org,2002:timestamp", _Loader.construct_timestamp)
for _tag in ("int", "float"):
    _Loader.add_constructor(f"tag:yaml.org,2002:{_tag}", _Loader.construct_number)


def read_yaml(text: str) -> object:
    """Parse a document into plain values.

    Raises:
        DuplicateKey: a mapping has a key twice.
        yaml.YAMLError: the text is not YAML, or aliases make it too large.

    """
    try:
        return yaml.load(text, _Loader)  # noqa: S506 - derived from SafeLoader
    except RecursionError as error:
        raise yaml.YAMLError("its lists and sections are nested too deep") from error


def parse_json(text: str | bytes, *, interns: bool = False) -> Any:
    """Return the value of a JSON text.

    Args:
        text: it.
        interns: share the names of keys with those of other texts, as of rows: 920 bytes in place of 1,300 for a
            prompt of 60 words. Not for texts of clients: early releases of Python 3.12 never free them.

    Raises:
        ValueError: it is not JSON, or has an object with two keys of one name: Python would keep the last one.
        RecursionError: it is nested too deep.

    """
    return json.loads(text, object_pairs_hook=_interned if interns else _object)


def _interned(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    return _object([(sys.intern(name), value) for name, value in pairs])


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        (twice, _), *_ = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"the key {twice!r} is there twice: remove one")
    return found
