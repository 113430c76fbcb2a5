"""A job file as a mapping: read from YAML, TOML or JSON, with overrides; `spec.parse` validates it."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml

from rlboost.shared.errors import ConfigError
from rlboost.shared.job.spec import NO_MAPPING
from rlboost.shared.validation import DuplicateKey, parse_json, read_yaml

MAX_BYTES = 1 << 20
"""Of a job file, as of a request to the manager: PyYAML takes minutes for tens of megabytes."""
# YAML would parse JSON's 1e-06 as text.
_READERS: Mapping[str, Callable[[str], object]] = {".toml": tomllib.loads, ".json": parse_json}


def load(path: str, overrides: list[str] | None = None) -> dict[str, Any]:
    """Return the mapping in a YAML, TOML or JSON job file with `a.b=v` overrides applied, not validated.

    Raises:
        ConfigError: the file is missing or does not parse, or an override is not of the form `a.b=v`.

    """
    file = Path(path)
    try:
        with file.open("rb") as opened:
            content = opened.read(MAX_BYTES + 1)
        if len(content) > MAX_BYTES:
            raise ConfigError(f"job file {path} has more than {MAX_BYTES} bytes: put data into files that it names")
        text = content.decode("utf-8-sig")
    except OSError as error:
        raise ConfigError(f"job file {path}: {error.strerror or error}: name a file that can be read") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"job file {path} is not UTF-8: {error}") from error
    try:
        raw = _READERS.get(file.suffix.lower(), read_yaml)(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"job file {path} does not parse: {error}") from error
    if not isinstance(raw, dict):
        raise ConfigError(f"job file {path}: {NO_MAPPING}")
    for override in overrides or []:
        set_by_override(raw, override)
    return raw


def set_by_override(raw: dict[str, Any], override: str) -> None:
    """Set one value of a job file, in place.

    Args:
        raw: the job file as a mapping.
        override: `a.b=v`, where `v` is read as YAML.

    Raises:
        ConfigError: it is not of that form, or `a` is no section.

    """
    (*parents, leaf), value = read_override(override)
    node = raw
    for parent in parents:
        if (child := node.get(parent)) is None:
            child = node[parent] = {}
        if not isinstance(child, dict):
            raise ConfigError(f"override {override!r}: {parent} is not a section")
        node = child
    node[leaf] = value


def read_override(override: str) -> tuple[list[str], object]:
    """Return the names of an override, from the outermost section to the key, and its value.

    A value that is not YAML is text, such as `*.jsonl`, unless it starts like a section or a list.

    Raises:
        ConfigError: it is not of the form `a.b=v`, or `v` is a section or list that does not parse.

    """
    key, separator, text = override.partition("=")
    if not separator or not all(names := key.split(".")):
        raise ConfigError(f"override {override!r} is not of the form a.b=value")
    try:
        return names, read_yaml(text)
    except (yaml.YAMLError, ValueError) as error:
        if isinstance(error, DuplicateKey):
            raise ConfigError(f"override {override!r}: {error.problem}") from error
        # A pattern may begin with a bracket and close it.
        if text.startswith("{") or (text.startswith("[") and "]" not in text):
            why = error.problem if isinstance(error, yaml.MarkedYAMLError) else error
            raise ConfigError(
                f"override {override!r} does not parse: {why}: close every bracket, and quote the whole override"
            ) from error
        return names, text
