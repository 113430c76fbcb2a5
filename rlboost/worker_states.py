"""States of workers, as the REST API reports them."""

from __future__ import annotations

GONE = frozenset({"lost", "left"})
"""States of workers that no longer exist."""
