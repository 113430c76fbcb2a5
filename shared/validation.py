"""Sections of files that users write, and what pydantic found wrong in them, in words for people."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError
from pydantic_core import ErrorDetails

_WORD = "literal["
"""So begins the last part of a place where a value is none of the words that a field takes beside a number."""
_SHOULD = "Input should be "
_NAMED = re.compile(r"([a-z_]+(?:\.[a-z_]+)+): ")
"""How a rule about several fields begins that blames one of them."""


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


def describe(error: ValidationError) -> list[str]:
    """Return one line a wrong field: `data.train: Field required`."""
    items = error.errors()
    either = {item["loc"][:-1] for item in items if item["loc"] and str(item["loc"][-1]).startswith(_WORD)}
    found: dict[tuple[int | str, ...], list[ErrorDetails]] = {}
    for item in items:
        found.setdefault(item["loc"][:-1] if item["loc"][:-1] in either else item["loc"], []).append(item)
    lines = []
    for place, wrong in found.items():
        texts = [_alternatives(wrong)] if place in either else map(_text, wrong)
        lines += [_line(".".join(map(str, place)), text) for text in texts]
    return lines


def off_is_no_boolean(value: object) -> object:
    """Return what was meant where a field takes the word off: YAML reads a bare one as false."""
    # A bare on means nothing here.
    return {False: "off", True: "on"}[value] if isinstance(value, bool) else value


def _line(place: str, text: str) -> str:
    """Put the place before the text, unless it begins with one that is more exact."""
    named = _NAMED.match(text)
    return text if named and named[1].startswith(place) else f"{place or 'job'}: {text}"


def _text(item: ErrorDetails) -> str:
    if item["type"] == "extra_forbidden":
        return "unknown key: remove it or mend its spelling"
    text = item["msg"].removeprefix("Value error, ")
    return f"{text}; nothing else is supported" if item["type"] == "literal_error" else text


def _alternatives(items: Sequence[ErrorDetails]) -> str:
    """Say in one sentence what each kind of value should have been."""
    texts = [item["msg"].removeprefix(_SHOULD).partition(", unable to parse")[0] for item in items]
    return _SHOULD + ", or ".join(texts)
