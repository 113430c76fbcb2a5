"""The garbage collector, context managers for importing large libraries, and how to install what is missing."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec


def pip_install(extra: str) -> str:
    """Return the command that installs an extra of this package, which is on no package index."""
    return f"pip install -c constraints.txt -e '.[{extra}]' in the clone of rlboost"


@contextmanager
def gc_paused() -> Iterator[None]:
    """Pause the garbage collector, which makes importing libraries such as torch a sixth faster.

    Such an import creates a million objects that all stay alive, and the collector would scan them repeatedly.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def collect_garbage_rarely() -> None:
    """Let the garbage collector scan all objects only every ten million new ones.

    For a process with many long-lived objects and hardly any reference cycles: with 100,000 samples in flight a full
    scan stops the manager for 100 ms.
    """
    gc.set_threshold(10_000, 10, 100)


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


def is_installed(*modules: str) -> bool:
    """Return True if all these modules can be found; none of them is imported."""
    try:
        return all(find_spec(module) is not None for module in modules)
    except ModuleNotFoundError:  # a package that would contain one
        return False
