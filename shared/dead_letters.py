"""Reports entries that a service moves to the dead letters: one log event at error level, and a metric."""

from __future__ import annotations

import structlog
from prometheus_client import Counter

log = structlog.get_logger(__name__)

_COUNT = Counter("rlboost_dead_letters", "Entries of streams that this process could not use")


def report_dead_letter(stream: str, entry_id: str, reason: str) -> None:
    """Log and count one entry."""
    log.error("dead_lettered", stream=stream, entry=entry_id, reason=reason)
    _COUNT.inc()
