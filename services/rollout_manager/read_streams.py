"""The streams that the manager reads: in which order it applies the entries of one turn, and which of them it trims."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from rlboost.services.rollout_manager.domain.apply_order import Order
from rlboost.shared.streams import names
from rlboost.shared.streams.entries import Entry, RawEntry


class ReadStream(NamedTuple):
    """How the manager reads one stream."""

    order: Order
    is_trimmed_when_read: bool
    """True if nothing needs its entries after the manager has applied them."""


SHARED_STREAMS = {
    names.JOB_COMMANDS: ReadStream(Order.JOBS, is_trimmed_when_read=False),  # trainers read it too
    names.JOB_REPORTS: ReadStream(Order.JOBS, is_trimmed_when_read=True),
    names.WEIGHTS_COMMITTED: ReadStream(Order.JOBS, is_trimmed_when_read=False),  # all read it, from its beginning
    names.TOKEN_LOG: ReadStream(Order.TOKEN_LOG, is_trimmed_when_read=False),  # as far as `compact` allows
    names.WORKER_HEARTBEATS: ReadStream(Order.WORKERS, is_trimmed_when_read=True),
}
"""Streams that are read for all jobs, by name."""
JOB_STREAM = ReadStream(Order.REQUESTS, is_trimmed_when_read=True)
"""The requests of each active job: the only other streams that the manager reads."""


def apply_order(entry: Entry) -> Order:
    """Return when to apply an entry."""
    return SHARED_STREAMS.get(entry.stream, JOB_STREAM).order


def is_trimmed_when_read(stream: str) -> bool:
    """Return True if the manager trims the stream up to what it has read."""
    return SHARED_STREAMS.get(stream, JOB_STREAM).is_trimmed_when_read


def are_below(count: int, entries: Sequence[Entry] | Sequence[RawEntry]) -> bool:
    """Return True if a read of at most `count` entries of each stream has read every stream to its end."""
    return len(entries) < count or max(Counter(entry.stream for entry in entries).values()) < count
