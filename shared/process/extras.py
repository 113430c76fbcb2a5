"""Optional libraries of this package: whether they are installed, and how to install them."""

from __future__ import annotations

from importlib.util import find_spec


def pip_install(extra: str) -> str:
    """Return the command that installs an extra of this package, which is on no package index."""
    return f"pip install -c constraints.txt -e '.[{extra}]' in the clone of rlboost"


def is_installed(*modules: str) -> bool:
    """Return True if all these modules can be found; none of them is imported."""
    try:
        return all(find_spec(module) is not None for module in modules)
    except ModuleNotFoundError:  # a package that would contain one
        return False
