"""The order in which the entries of one turn are applied."""

from __future__ import annotations

from enum import IntEnum


class Order(IntEnum):
    """When entries that were read together are applied, the lowest first; entries of equal order as they were read."""

    JOBS = 0
    REQUESTS = 1
    TOKEN_LOG = 2
    WORKERS = 3
    """Last: a heartbeat in state "suspended" follows the frames that were flushed before it."""
