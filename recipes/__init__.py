"""Jobs to start from, a folder each, which `rlboost init --recipe NAME` copies."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any


def write_rows(file: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write one JSON object per line, and print how many they are."""
    n_rows = 0
    with file.open("w", encoding="utf-8") as out:
        for row in rows:
            out.write(json.dumps(row, ensure_ascii=False) + "\n")
            n_rows += 1
    print(f"{file}: {n_rows} rows")


def distinct(
    rows: Iterable[Mapping[str, Any]], question: Callable[[Mapping[str, Any]], str], seen: set[str] | None = None
) -> Iterator[Mapping[str, Any]]:
    """Yield the first row of each question that is not in `seen`, to which it is added."""
    seen = set() if seen is None else seen
    for row in rows:
        if (asked := question(row)) not in seen:
            seen.add(asked)
            yield row
