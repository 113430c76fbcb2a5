"""Hides installed modules from imports."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def modules_hidden(*names: str) -> Iterator[None]:
    """Make these modules appear as not installed within the block, unless they are imported already."""
    missing = [name for name in names if name not in sys.modules]
    for name in missing:
        sys.modules[name] = None  # type: ignore[assignment]  # Python's way to block an import
    try:
        yield
    finally:
        for name in missing:
            del sys.modules[name]
