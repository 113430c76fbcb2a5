"""The inference engines and the optional libraries: which are installed, and how to install the others."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from rlboost.shared.errors import ConfigError

EngineName = Literal["torch", "vllm"]
"""Inference engines of workers; `services/rollout_worker/__main__.py` builds them."""

# --- Optional libraries of this package: whether they are installed, and how to install them --------------------------


def pip_install(extra: str) -> str:
    """Return the command that installs an extra of this package, which is on no package index."""
    return f"pip install -c constraints.txt -e '.[{extra}]' in the clone of rlboost"


def is_installed(*modules: str) -> bool:
    """Return True if all these modules can be found; none of them is imported."""
    try:
        return all(importlib.util.find_spec(module) is not None for module in modules)
    except ModuleNotFoundError:  # a package that would contain one
        return False


def require_engine(engine: EngineName) -> None:
    """Check that an inference engine's library is installed.

    Raises:
        ConfigError: it is not; says how to install it.

    """
    if engine == "vllm" and not is_installed("vllm"):
        raise ConfigError(
            "the vllm engine needs vllm: 'make install-vllm' on a machine without a GPU, "
            f"{pip_install('vllm')} on one with"
        )


# --- Hides installed modules from imports -----------------------------------------------------------------------------


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
