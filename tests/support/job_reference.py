"""The tables of `docs/job-keys.md` and of `docs/coming-from.md`, generated from the job file's classes.

python -m tests.support.job_reference --write
"""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap
from collections.abc import Iterator, Mapping
from functools import cache
from itertools import pairwise
from types import NoneType, UnionType
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin

from pydantic import AwareDatetime, BaseModel
from pydantic.fields import FieldInfo

from rlboost.shared.job import offline
from rlboost.shared.job import spec as job_spec
from rlboost.shared.job.algorithm import PRESETS, AlgorithmSpec
from rlboost.shared.job.base import ExternalJob
from rlboost.shared.job.other_trainers import NAMES, Names
from rlboost.shared.validation import Section
from tests.support.generated_docs import ROOT, write_block

PAGE = ROOT / "docs" / "job-keys.md"
OTHERS_PAGE = ROOT / "docs" / "coming-from.md"
BLOCK = "job keys"
OTHERS_BLOCK = "names"
_TYPES = {
    bool: "`true`, `false`",
    int: "whole number",
    float: "number",
    str: "text",
    tuple: "list",
    dict: "mapping",
    AwareDatetime: "time",
}
_KINDS: dict[str, type[BaseModel]] = {
    "rl": job_spec.RlJob,
    "sft": offline.SftJob,
    "dpo": offline.DpoJob,
    "reward": offline.RewardJob,
    "eval": job_spec.EvalJob,
    "external": ExternalJob,
}


class Key(NamedTuple):
    """One key of a job file."""

    path: str
    meaning: str
    default: str
    values: str
    kinds: tuple[str, ...]
    """Kinds of jobs that have it."""
    is_section: bool
    entries: str
    """Written after a section that is a list, or a mapping of names, whose entries have the keys below it."""

    @property
    def shown(self) -> str:
        """The path with `[]` after the sections that are lists, and `.NAME` after those that are mappings."""
        above = [key for key in job_keys() if key.entries and self.path.startswith(f"{key.path}.")]
        return next((f"{key.path}{key.entries}{self.path.removeprefix(key.path)}" for key in above), self.path)


@cache
def job_keys() -> tuple[Key, ...]:
    """Return every key of every kind of job, sections before their keys."""
    found: dict[str, Key] = {}
    for kind, model in _KINDS.items():
        for key in _walk(model, "", kind):
            found[key.path] = _merged(found[key.path], key) if key.path in found else key
    return tuple(found.values())


def _merged(key: Key, other: Key) -> Key:
    """Return a key of several kinds of jobs; `kind` itself has one value in each."""
    values = ", ".join(dict.fromkeys((*key.values.split(", "), *other.values.split(", "))))
    return key._replace(kinds=(*key.kinds, *other.kinds), values=values)


def tables() -> str:
    """Return the top-level keys and one section for each section of a job file."""
    by_section: dict[str, list[Key]] = {"": []}
    for key in job_keys():
        if key.is_section:
            by_section.setdefault(key.path, [])
        by_section[key.path.rpartition(".")[0]].append(key)
    return "\n\n".join(_section_text(path, members) for path, members in by_section.items())


def names() -> str:
    """Return the table of what other trainers call the keys."""
    lines = ["| RLBoost | TRL | verl | OpenRLHF | prime-rl |", "|---|---|---|---|---|"]
    lines += [
        "| " + " | ".join((f"`{key.shown}`", *NAMES[key.path])).strip() + " |"
        for key in job_keys()
        if key.path in NAMES
    ]
    return "\n".join(lines)


def _walk(model: type[BaseModel], prefix: str, kind: str) -> Iterator[Key]:
    for name, field in model.model_fields.items():
        path = prefix + name
        section = _section_of(field.annotation)
        meaning = _docstring(model, name)
        default = "" if section else _default(model, name, field)
        values = "" if section else _values(field.annotation, field.metadata)
        entries = _entries(field.annotation) if section else ""
        yield Key(path, meaning, default, values, (kind,), section is not None, entries)
        if section:
            yield from _walk(section, f"{path}.", kind)


def _section_text(path: str, members: list[Key]) -> str:
    plain = [key for key in members if not key.is_section]
    lines = [f"## `{path}`" if path else "## Top level", ""]
    if path:
        section = next(key for key in job_keys() if key.path == path)
        lines += [_kinds(section) + section.meaning, ""]
    lines += ["| key | default | values | meaning | TRL | verl |", "|---|---|---|---|---|---|"]
    for key in plain:
        called = NAMES.get(key.path, Names())
        cells = (f"`{key.shown}`", key.default, key.values, _kinds(key) + key.meaning, called.trl, called.verl)
        lines.append("| " + " | ".join(cells) + " |")
    sections = [f"[`{key.path}`](#{_anchor(key.path)})" for key in members if key.is_section]
    if sections:
        lines += ["", f"Sections: {', '.join(sections)}."]
    return "\n".join(lines)


def _kinds(key: Key) -> str:
    parent = key.path.rpartition(".")[0]
    possible = next((other.kinds for other in job_keys() if other.path == parent), tuple(_KINDS))
    return "" if key.kinds == possible else f"Only kind {' or '.join(f'`{kind}`' for kind in key.kinds)}. "


def _anchor(path: str) -> str:
    return path.replace(".", "")


@cache
def _docstring(model: type[BaseModel], name: str) -> str:
    """Return the string below a field as one line, of the class that declares it last and has one."""
    return next((text for base in model.__mro__ if (text := _docstrings(base).get(name))), "")


@cache
def _docstrings(model: type) -> dict[str, str]:
    """Return the strings below a class's own fields."""
    if not issubclass(model, Section):
        return {}
    body = ast.parse(textwrap.dedent(inspect.getsource(model))).body[0].body  # type: ignore[attr-defined]
    return {
        getattr(field.target, "id", ""): " ".join(str(after.value.value).split())
        for field, after in pairwise(body)
        if isinstance(field, ast.AnnAssign) and isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
    }


def _default(model: type[BaseModel], name: str, field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if model is AlgorithmSpec and name in PRESETS["grpo"]:
        value = PRESETS["grpo"][name]
    if value is None:
        return ""
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, tuple):
        return f"`[{', '.join(map(str, value))}]`"
    return f"`{value}`" if value != "" else "empty"


def _values(annotation: Any, metadata: list[Any]) -> str:
    """Describe the accepted values."""
    if hasattr(annotation, "__metadata__"):
        return _values(annotation.__origin__, [*metadata, *annotation.__metadata__])
    origin, parts = get_origin(annotation), [part for part in get_args(annotation) if part is not NoneType]
    if origin is Literal:
        return ", ".join(f"`{part}`" for part in parts)
    if origin in (Union, UnionType):
        return " or ".join(dict.fromkeys(_values(part, metadata) for part in parts))
    if annotation == tuple[float, float]:
        return "list of 2 numbers"
    return f"{_TYPES[origin or annotation]} {_bounds(metadata)}".strip()


def _bounds(metadata: list[Any]) -> str:
    signs = {"gt": ">", "ge": "≥", "lt": "<", "le": "≤"}
    items = [part for one in metadata for part in getattr(one, "metadata", [one])]
    return ", ".join(
        f"{sign} {getattr(item, name)}" for item in items for name, sign in signs.items() if hasattr(item, name)
    )


def _entries(annotation: Any) -> str:
    if get_origin(annotation) in (tuple, dict, Mapping):
        return "[]" if get_origin(annotation) is tuple else ".NAME"
    return next(filter(None, map(_entries, get_args(annotation))), "")


def _section_of(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for part in get_args(annotation) if (found := _section_of(part))), None)


if __name__ == "__main__":
    if sys.argv[1:] == ["--write"]:
        write_block(PAGE, BLOCK, tables())
        write_block(OTHERS_PAGE, OTHERS_BLOCK, names())
    else:
        print(tables(), names(), sep="\n\n")
