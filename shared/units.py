"""Units of measurement."""

from __future__ import annotations

HOUR_S = 3600.0
"""Seconds in one hour."""
