"""How to install the optional libraries of this package."""

from __future__ import annotations


def pip_install(extra: str) -> str:
    """Return the command that installs an extra of this package, which is on no package index."""
    return f"pip install -c constraints.txt -e '.[{extra}]' in the clone of rlboost"
