"""Jobs to start from, a folder each, which `rlboost init --recipe NAME` copies."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
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
