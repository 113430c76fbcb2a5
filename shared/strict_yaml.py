"""YAML as its specification has it: no key twice in one mapping, of which PyYAML would take the last."""

from __future__ import annotations

from typing import Any

import yaml
from yaml.constructor import ConstructorError

_MERGE = "tag:yaml.org,2002:merge"


class GivenTwice(ConstructorError):
    """A mapping has a key twice."""


class _Loader(yaml.SafeLoader):
    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[tuple[str, str]] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag == _MERGE:
                continue
            if (key.tag, key.value) in seen:
                raise GivenTwice(None, None, f"{key.value!r} is given twice: remove one", key.start_mark)
            seen.add((key.tag, key.value))
        return super().construct_mapping(node, deep)


def read(text: str) -> object:
    """Return what a document says, in plain values.

    Raises:
        GivenTwice: a key is given twice.
        yaml.YAMLError: it is no YAML.

    """
    return yaml.load(text, _Loader)  # noqa: S506 - a safe one
