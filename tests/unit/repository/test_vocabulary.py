"""Words of an earlier vocabulary that must not come back in identifiers; docs/concepts.md uses the present terms."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
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
TEST_WORDS = WORDS | {"beside", "goes_on", "nobody", "whoever"}
"""Words within the names of test functions; `goes_on` is a sequence of two."""
PHRASES = re.compile(r"\b(whoever|nobody|somebody|in the mean(?! time)|made again)\b|\ATell whether\b", re.IGNORECASE)
"""Phrases within docstrings, also those of attributes."""
MAX_TEST_NAME = 80
"""Characters of the name of a test function."""
SOURCES = sorted(
    path.relative_to(ROOT)
    for top in ("services", "shared", "rlboost", "examples", "tests/support")
    for path in (ROOT / top).rglob("*.py")
)
TESTS = sorted(path.relative_to(ROOT) for path in (ROOT / "tests").rglob("test_*.py"))


@cache
def parsed(path: Path) -> ast.Module:
    """Return the syntax tree of a file, by its path in the repository."""
    return ast.parse((ROOT / path).read_text(encoding="utf-8"))


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


def docstrings(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Yield every string that is a statement, with its line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield " ".join(node.value.value.split()), node.lineno


def words(identifier: str) -> set[str]:
    """Return the words of a name in snake case, camel case or capitals."""
    return {word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", identifier)}


def test_identifiers_use_no_retired_word() -> None:
    found = [
        f"{path}:{line}: {name}"
        for path in SOURCES
        for name, line in [(path.stem, 1), *identifiers(parsed(path))]
        if words(name) & WORDS
    ]
    assert not found, "use the terms of docs/concepts.md:\n" + "\n".join(found)


def test_docstrings_use_no_retired_phrase() -> None:
    found = [
        f"{path}:{line}: {match[0]}"
        for path in SOURCES
        for text, line in docstrings(parsed(path))
        if (match := PHRASES.search(text))
    ]
    assert not found, "write plain technical English:\n" + "\n".join(found)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Whoever waits clears it.", True),
        ("What it took in the\nmean over its time.", True),
        ("Tell whether it runs.", True),
        ("Return True, and tell whether it runs.", False),
        ("Weight in the mean time of a startup.", False),
    ],
)
def test_retired_phrases_are_found_across_lines(text: str, expected: bool) -> None:
    ((found, _),) = docstrings(ast.parse(f'"""{text}"""'))
    assert bool(PHRASES.search(found)) is expected


def problem(name: str) -> str:
    """Return why the name of a test is rejected, or an empty string."""
    if len(name) > MAX_TEST_NAME:
        return f"{len(name)} characters, the limit is {MAX_TEST_NAME}"
    found = sorted(word for word in TEST_WORDS if f"_{word}_" in f"_{name}_")
    return f"retired: {', '.join(found)}" if found else ""


def test_test_names_are_short_and_use_no_retired_word() -> None:
    found = [
        f"{path}:{line}: {name}: {problem(name)}"
        for path in TESTS
        for name, line in [(path.stem, 1), *identifiers(parsed(path))]
        if name.startswith("test_") and problem(name)
    ]
    assert not found, "name tests test_<unit>_<condition>_<result>:\n" + "\n".join(found)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("test_job_of_nobody_is_refused", "retired: nobody"),
        ("test_job_goes_on", "retired: goes_on"),
        ("test_job_goes_online", ""),
        ("test_" + "x" * 76, "81 characters, the limit is 80"),
    ],
)
def test_problem_names_the_fault_of_a_test_name(name: str, expected: str) -> None:
    assert problem(name) == expected


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
