"""Importing large libraries."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_collector() -> Iterator[None]:
    """Leave cyclic garbage lying while torch and the like are imported, which takes a sixth less time then.

    They make a million objects that all stay, and the collector would look through them again and again.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@contextmanager
def without(*names: str) -> Iterator[None]:
    """Have what is imported find these modules missing, unless they are there already; afterwards they can be had."""
    missing = [name for name in names if name not in sys.modules]
    for name in missing:
        sys.modules[name] = None  # type: ignore[assignment]  # Python's own way to say so
    try:
        yield
    finally:
        for name in missing:
            del sys.modules[name]
