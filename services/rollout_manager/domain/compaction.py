"""Keeping log and memory short: they follow the work in flight, not history.

In the log, what runs long is written again at the tail, and all that is older may go.
"""

from __future__ import annotations

from services.rollout_manager.domain.ledger import Ledger
from services.rollout_manager.domain.world import World
from shared.messages import FINISH_NONE

MIN_LOG_TOKENS = 1 << 20
"""The log is not compacted below this many tokens."""
MAX_LOG_RATIO = 4
"""The log is compacted when it holds so many times the tokens in flight."""
AUDIT_OPEN_S = 60.0
"""How long after a job's end late frames of it are still counted: longer than any worker goes on without a word."""
RESTATED_AT_ONCE = 1024
"""Samples that one call restates at most."""
RESTATED_TOKENS_AT_ONCE = 1 << 20
"""About how many tokens one call restates at most: 8 MiB in the log, a few milliseconds of the manager."""

ENDED_JOB_KEPT_S = 7 * 24 * 3600.0
"""How long people find a job that has ended, and everything of it."""


def compact(world: World, read_to: str) -> str:
    """Restate the oldest samples when the log is long; return the oldest entry that a replay needs.

    Amortised, the log carries each token a bounded number of times: a sample is written again only after the log has
    grown by `MAX_LOG_RATIO` times all tokens in flight.
    """
    ledger = world.ledger
    oldest = ledger.oldest(1)
    limit = max(MIN_LOG_TOKENS, MAX_LOG_RATIO * ledger.tokens_live)
    if oldest and ledger.tokens_in_log - oldest[0].first_mark > limit:
        _restate(world, ledger, older_than=ledger.tokens_in_log - limit // 2)
    return oldest[0].first_id if oldest else read_to


def forget_ended(world: World, wall: float) -> None:
    """Forget what nobody needs of jobs that are over.

    The audit goes when no frame of the job can be on its way any more (Redis has it), the job itself with its streams.

    Args:
        world: changed in place.
        wall: this moment in Unix seconds.

    """
    for job_id in list(world.audits):
        job = world.jobs.get(job_id)
        if job is None or (job.finished_at is not None and wall - job.finished_at > AUDIT_OPEN_S):
            del world.audits[job_id]
    for job in list(world.jobs.values()):
        if job.finished_at is not None and wall - job.finished_at > ENDED_JOB_KEPT_S:
            world.forget_job(job)


def _restate(world: World, ledger: Ledger, older_than: int) -> None:
    tokens = 0
    for sample in ledger.oldest(RESTATED_AT_ONCE):
        if sample.first_mark >= older_than or tokens > RESTATED_TOKENS_AT_ONCE:
            break
        if sample.finish == FINISH_NONE:
            tokens += sample.n_tokens
            world.record(ledger.restated(sample))
