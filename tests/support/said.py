"""What the processes of a program say to its test, each in a file of its own: lines in one pipe can be divided."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

FOLDER = "SAID"
"""The environment's variable with the folder of the files."""


def say(**line: Any) -> None:
    """Append a line to this process' file."""
    with Path(os.environ[FOLDER], os.environ.get("RANK", "0")).open("a") as file:
        file.write(json.dumps(line) + "\n")


def said(folder: Path) -> list[dict[str, Any]]:
    """Return the whole lines of all files, those of one process in order."""
    return [
        json.loads(line)
        for file in sorted(folder.iterdir())
        for line in file.read_text().splitlines(keepends=True)
        if line.endswith("\n")
    ]
