"""The times of REST documents as ISO 8601 text."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

_TIMES = ("created_at", "started_at", "finished_at", "joined_at", "last_heartbeat_at", "since")


def iso_time(unix_s: float, timespec: str = "auto") -> str:
    """Return a time as ISO 8601 text in UTC; for `timespec` see `datetime.isoformat`."""
    return datetime.fromtimestamp(unix_s, UTC).isoformat(timespec=timespec)


def iso_times(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields with their times as ISO 8601 text instead of Unix seconds, also within a phase or a wait."""
    shown = dict(fields)
    for name in ("phase", "waiting"):
        if shown.get(name):
            shown[name] = iso_times(shown[name])
    for name in _TIMES:
        if isinstance(shown.get(name), float | int):
            shown[name] = iso_time(shown[name])
    return shown
