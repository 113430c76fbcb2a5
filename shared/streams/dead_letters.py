"""Dead letters: entries that a service cannot use, with the reason. Each is logged at error level and counted."""

from __future__ import annotations

import structlog
from prometheus_client import Counter

from rlboost.shared.messages import DeadLetter
from rlboost.shared.streams import names
from rlboost.shared.streams.bus import Append

log = structlog.get_logger(__name__)

MAX_DEAD_LETTERS = 10_000
"""The newest that are retained."""
_COUNT = Counter("rlboost_dead_letters", "Entries of streams that this process could not use")


def report_dead_letter(stream: str, entry_id: str, reason: str) -> None:
    """Log and count one entry."""
    log.error("dead_lettered", stream=stream, entry=entry_id, reason=reason)
    _COUNT.inc()


def dead_letter_op(
    stream: str, entry_id: str, consumer: str, reason: str, body: bytes, at: float, to: str = names.DEAD_LETTERS
) -> Append:
    """Return the operation that stores an entry among the dead letters.

    Args:
        stream: where the entry was read.
        entry_id: the entry's id there.
        consumer: the service that cannot use it.
        reason: why it cannot.
        body: the entry's bytes.
        at: the time, in Unix seconds.
        to: the stream of dead letters, or one from which they are relayed to it.

    """
    letter = DeadLetter(stream=stream, entry_id=entry_id, consumer=consumer, reason=reason, body=body, at=at)
    return Append(to, letter, MAX_DEAD_LETTERS if to == names.DEAD_LETTERS else None)
