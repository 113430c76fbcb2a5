"""Generated blocks of the documentation: find, compare and rewrite what lies between two markers of a page."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[2]


def read_block(page: Path, name: str) -> str:
    """Return the text between `<!-- begin NAME -->` and `<!-- end NAME -->`, without blank lines at either end.

    Raises:
        ValueError: The page lacks the markers.
    """
    found = _pattern(name).search(page.read_text(encoding="utf-8"))
    if found is None:
        raise ValueError(f"{page}: no block {name!r} between <!-- begin {name} --> and <!-- end {name} -->")
    return found[2].strip("\n")


def write_block(page: Path, name: str, text: str) -> None:
    """Replace the block with `text`."""
    read_block(page, name)
    old = page.read_text(encoding="utf-8")
    page.write_text(_pattern(name).sub(lambda found: f"{found[1]}\n\n{text}\n\n{found[3]}", old), encoding="utf-8")


def run(page: Path, name: str, generate: Callable[[], str]) -> None:
    """Command line of a generator: print the block, or with `--write` put it into the page."""
    if sys.argv[1:] == ["--write"]:
        write_block(page, name, generate())
    else:
        print(generate())


def _pattern(name: str) -> re.Pattern[str]:
    return re.compile(rf"(<!-- begin {name} -->)(.*?)(<!-- end {name} -->)", re.DOTALL)
