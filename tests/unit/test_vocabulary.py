"""Words of an earlier vocabulary that must not come back in identifiers; docs/concepts.md uses the present terms."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WORDS = frozenset(
    {
        "aside",
        "beat",
        "beats",
        "boxes",
        "bury",
        "buried",
        "crew",
        "desk",
        "insist",
        "lied",
        "misbehave",
        "misbehaved",
        "misbehaves",
        "orphan",
        "orphaned",
        "rotten",
        "said",
        "talk",
        "talks",
        "told",
        "wanted",
        "workshop",
    }
)
"""Words within identifiers: `set_aside` and `OrphanJob` are rejected, `keyboard` is not."""
SOURCES = sorted(
    path.relative_to(ROOT)
    for top in ("services", "shared", "rlboost", "examples")
    for path in (ROOT / top).rglob("*.py")
)


def identifiers(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Yield every name that a module defines, with its line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, node.lineno
        elif isinstance(node, ast.arg):
            yield node.arg, node.lineno
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id, node.lineno
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr, node.lineno


def words(identifier: str) -> set[str]:
    """Return the words of a name in snake case, camel case or capitals."""
    return {word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", identifier)}


@pytest.mark.parametrize("path", SOURCES, ids=str)
def test_identifiers_use_no_retired_word(path: Path) -> None:
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    names = [(path.stem, 1), *identifiers(tree)]
    found = [f"{path}:{line}: {name}" for name, line in names if words(name) & WORDS]
    assert not found, "use the terms of docs/concepts.md:\n" + "\n".join(found)


@pytest.mark.parametrize(
    ("identifier", "expected"),
    [
        ("set_aside", {"set", "aside"}),
        ("AsideJob", {"aside", "job"}),
        ("_WANTED_BYTES", {"wanted", "bytes"}),
        ("HTTPDesk", {"http", "desk"}),
        ("keyboard", {"keyboard"}),
    ],
)
def test_words_splits_every_style_of_identifier(identifier: str, expected: set[str]) -> None:
    assert words(identifier) == expected
