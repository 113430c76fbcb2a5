"""The code blocks of the documentation."""

from __future__ import annotations

import re
from pathlib import Path

from tests.support.generated_docs import ROOT

DOCS = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "SECURITY.md",
    ROOT / "CHANGELOG.md",
    ROOT / "deploy/README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "examples").glob("*/README.md")),
    *sorted((ROOT / "recipes").glob("*/README.md")),
]


def blocks_in(doc: Path, language: str) -> list[str]:
    """Return the fenced blocks of a page in one language."""
    return re.findall(rf"^```{language}\n(.*?)^```", doc.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
