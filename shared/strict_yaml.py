"""YAML that rejects duplicate keys in a mapping, where PyYAML would keep the last one."""

from __future__ import annotations

from typing import Any

import yaml
from yaml.constructor import ConstructorError

_MERGE = "tag:yaml.org,2002:merge"


class DuplicateKey(ConstructorError):
    """A mapping has the same key twice."""


class _Loader(yaml.SafeLoader):
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


# Libraries replace it in PyYAML's own class for the whole process, such as the grammars of vLLM.
_Loader.add_constructor("tag:yaml.org,2002:timestamp", _Loader.construct_timestamp)


def read(text: str) -> object:
    """Parse a document into plain values.

    Raises:
        DuplicateKey: a mapping has a key twice.
        yaml.YAMLError: the text is not YAML.

    """
    return yaml.load(text, _Loader)  # noqa: S506 - derived from SafeLoader
