"""How a job ended."""

from __future__ import annotations

from typing import NamedTuple

import structlog

from rlboost.shared.errors import Conflict, Retryable, RLBoostError, leaves
from rlboost.shared.messages import JobState

log = structlog.get_logger(__name__)


class Ending(NamedTuple):
    """How a job ended."""

    state: JobState
    error: str = ""


def ending_with(error: BaseException) -> Ending:
    """Return the job's failure; re-raise an error that is not the job's fault."""
    found = leaves(error)
    for leaf in found:
        if isinstance(leaf, RLBoostError) and not isinstance(leaf, Retryable | Conflict):
            return Ending("failed", str(leaf))
    for leaf in found:
        if not isinstance(leaf, RLBoostError):
            log.error("job_crashed", exc_info=leaf)
            return Ending("failed", f"unexpected {type(leaf).__name__}: {leaf}; the trainer's log has the traceback")
    raise found[0]
