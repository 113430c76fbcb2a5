"""The times of REST documents as ISO 8601 text."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

_TIMES = ("created_at", "started_at", "finished_at", "joined_at", "last_heartbeat_at", "since")


def iso_times(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields with their Unix seconds as ISO 8601 text, those of a phase or wait in them too."""
    shown = dict(fields)
    for name in ("phase", "waiting"):
        if shown.get(name):
            shown[name] = iso_times(shown[name])
    for name in _TIMES:
        if isinstance(shown.get(name), float | int):
            shown[name] = datetime.fromtimestamp(shown[name], UTC).isoformat()
    return shown
