"""Sections of files that users write, and what pydantic found wrong in them, in words for people."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Sequence
from typing import Annotated, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError
from pydantic_core import ErrorDetails

Place = tuple[int | str, ...]

_ARM = re.compile(r"(?:literal|tuple|list|dict|constrained|function)[\[-].*|str|int|float|bool")
"""What stands in a place for one of several things that a field may be."""
_NAMED = re.compile(r"([a-z_]+(?:\.[a-z_]+)+): ")
"""How a rule about several fields begins that blames one of them."""
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
    "list_type": "a list",
    "tuple_type": "a list",
    "too_short": "a list with {min_length} or more entries",
    "too_long": "a list with {max_length} entries at most",
    "dict_type": "a section",
    "literal_error": "{expected}",
    "enum": "{expected}",
}
"""Type of pydantic's error -> what should have been there."""
_SAID = {
    "missing": "missing: give it",
    "extra_forbidden": "unknown key: remove it or mend its spelling",
    "invalid_key": "a key should be text: put it in quotes",
}


def _function_path(value: str) -> str:
    module, _, name = value.partition(":")
    if not module or not name:
        raise ValueError(f"{value!r} is not of the form package.module:function")
    return value


FunctionPath = Annotated[str, AfterValidator(_function_path)]
"""Where a function of the user's is: `package.module:function`."""


class Section(BaseModel):
    """A part of such a file: unknown keys are refused, and nothing changes it."""

    model_config = ConfigDict(frozen=True, extra="forbid")


def describe(error: ValidationError, of: type[BaseModel] | None = None) -> list[str]:
    """Return one line a wrong field: `data.train: missing: give it`.

    Args:
        error: what pydantic found.
        of: what it looked at, whose keys are suggested in the place of unknown ones that resemble them.

    """
    found: dict[Place, list[ErrorDetails]] = {}
    items = [_with_suggestion(_of_the_key(item), of) for item in error.errors()]
    above = {item["loc"][:depth] for item in items for depth in range(len(item["loc"]))}
    for item in items:
        if item["type"] == "too_short" and item["loc"] in above:
            continue  # only because entries are wrong
        found.setdefault(_field(item), []).append(item)
    told = [one for field, items in found.items() for one in _told(field, items)]
    return [_line(".".join(map(str, place)), text) for place, text in told]


def one_of(*words: str) -> str:
    """Say that a field takes these words alone."""
    *others, last = map(repr, words)
    return f"should be {', '.join(others)} or {last}; nothing else is supported"


def off_is_no_boolean(value: object) -> object:
    """Return what was meant where a field takes the word off: YAML reads a bare one as false."""
    # A bare on means nothing here.
    return {False: "off", True: "on"}[value] if isinstance(value, bool) else value


def _line(place: str, text: str) -> str:
    """Put the place before the text, unless it begins with one that is more exact."""
    named = _NAMED.match(text)
    return text if named and named[1].startswith(place) else f"{place or 'job'}: {text}"


def _of_the_key(item: ErrorDetails) -> ErrorDetails:
    """Return what is wrong with a key of a mapping as pydantic has it of a section's."""
    *place, last = item["loc"] or ("",)
    if item["type"] == "string_type" and last == "[key]":
        return {**item, "type": "invalid_key", "loc": tuple(place)}
    return item


def _with_suggestion(item: ErrorDetails, of: type[BaseModel] | None) -> ErrorDetails:
    """Return an unknown key with the known one that was meant, where there is one."""
    if of is None or item["type"] != "extra_forbidden":
        return item
    near = difflib.get_close_matches(str(item["loc"][-1]), _keys(of, item["loc"][:-1]), 1)
    return {**item, "type": "misspelt", "msg": f"unknown key: did you mean {near[0]}?"} if near else item


def _keys(of: type[BaseModel], place: Place) -> list[str]:
    """Return the keys of the section in a place."""
    sections = [of]
    for name in place:
        # A place also has the indexes of lists, which lead to no other section.
        fields = [one.model_fields[name] for one in sections if isinstance(name, str) and name in one.model_fields]
        sections = [one for field in fields for one in _sections(field.annotation)] or sections
    return [key for one in sections for key in one.model_fields]


def _sections(annotation: object) -> Iterator[type[BaseModel]]:
    """Yield the sections that a field may be, or be a list of."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from _sections(part)


def _field(item: ErrorDetails) -> Place:
    """Return the field: without what pydantic calls the things that it may be, and of its list not what is missing."""
    place = item["loc"]
    if item["type"] == "missing" and isinstance(place[-1], int):
        place = place[:-1]
    arm = next((i for i, part in enumerate(place) if isinstance(part, str) and _ARM.fullmatch(part)), len(place))
    return place[:arm]


def _told(field: Place, items: Sequence[ErrorDetails]) -> Iterator[tuple[Place, str]]:
    """Yield what is wrong with a field, and where in it."""
    depth, last = len(field), items[-1]["loc"]
    if items[-1]["type"] == "missing" and len(last) > depth:
        yield field, f"should be a list with {int(last[-1]) + 1} entries"
    elif len(last) == depth:
        yield from ((field, _text(item)) for item in items)
    elif inner := [item for item in items if len(item["loc"]) > depth + 1]:
        # Of the things that it may be, it is the one that has a wrong part.
        yield from (((*field, *item["loc"][depth + 1 :]), _text(item)) for item in inner)
    else:
        yield field, "should be " + ", or ".join(_expected(item) or _text(item) for item in items)


def _text(item: ErrorDetails) -> str:
    if said := _SAID.get(item["type"]):
        return said
    if expected := _expected(item):
        only = "; nothing else is supported" if item["type"] == "literal_error" else ""
        return f"should be {expected}{only}"
    return item["msg"].removeprefix("Value error, ")


def _expected(item: ErrorDetails) -> str:
    """Return what should have been there, nothing if pydantic's own words say more."""
    context = item.get("ctx", {})
    if item["type"] == "model_type":
        return _section(context["class_name"])
    shown = {name: int(n) if isinstance(n, float) and n.is_integer() else n for name, n in context.items()}
    return _EXPECTED.get(item["type"], "").format(**shown)


def _section(name: str, base: type[BaseModel] = Section) -> str:
    """Describe a section by the name of its class."""
    waiting = [base]
    for one in waiting:
        if one.__name__ == name:
            return f"a section with the keys {', '.join(one.model_fields)}"
        waiting += one.__subclasses__()
    return "a section"
