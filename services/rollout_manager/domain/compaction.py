"""Bounds the token log and the manager's memory by the work in flight.

Samples that have been in flight for long are restated at the tail of the log, so that older entries can be trimmed.
"""

from __future__ import annotations

from rlboost.services.rollout_manager.domain.token_log.ledger import Ledger
from rlboost.services.rollout_manager.domain.world import World
from rlboost.shared.messages import ENDED_JOB_RETENTION_S, FINISH_NONE

MIN_LOG_TOKENS = 1 << 20
"""A log with fewer tokens is not compacted."""
MAX_LOG_RATIO = 4
"""The log is compacted when it holds this many times the tokens in flight."""
AUDIT_OPEN_S = 60.0
"""How long after a job's end late frames are audited: longer than a worker generates without contact."""
MAX_RESTATED = 1024
"""Maximum number of samples that one call restates."""
MAX_RESTATED_TOKENS = 1 << 20
"""Approximate maximum of tokens that one call restates: 8 MiB in the log, a few milliseconds of the manager."""


def compact(world: World, read_to: str) -> str:
    """Restate the oldest samples when the log is long; return the oldest entry that a replay needs.

    Amortized, each token is written a bounded number of times: a sample is restated only after the log has grown by
    `MAX_LOG_RATIO` times all tokens in flight.
    """
    ledger = world.ledger
    oldest = ledger.oldest(1)
    limit = max(MIN_LOG_TOKENS, MAX_LOG_RATIO * ledger.tokens_live)
    if oldest and ledger.tokens_in_log - oldest[0].log_tokens_before > limit:
        _restate(world, ledger, older_than=ledger.tokens_in_log - limit // 2)
    return oldest[0].first_id if oldest else read_to


def forget_ended(world: World, wall: float) -> None:
    """Drop the audits of ended jobs once no late frame can arrive (Redis has them), and later the jobs themselves.

    Args:
        world: changed in place.
        wall: this moment in Unix seconds.

    """
    for job_id in list(world.audits):
        finished_at = world.jobs[job_id].finished_at
        if finished_at is not None and wall - finished_at > AUDIT_OPEN_S:
            world.jobs.close_audit(job_id)
    for job in list(world.jobs.values()):
        if job.finished_at is not None and wall - job.finished_at > ENDED_JOB_RETENTION_S:
            world.forget_job(job)


def _restate(world: World, ledger: Ledger, older_than: int) -> None:
    tokens = 0
    for sample in ledger.oldest(MAX_RESTATED):
        if sample.log_tokens_before >= older_than or tokens > MAX_RESTATED_TOKENS:
            break
        if sample.finish == FINISH_NONE:
            tokens += sample.n_tokens
            world.outbox.record(ledger.restatement_of(sample))
