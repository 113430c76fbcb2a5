"""Takes the manager's decisions once all available messages are applied.

Called after every batch of messages and on every tick. A second call on an unchanged world decides nothing, unless the
first one left samples to deliver.
"""

from __future__ import annotations

from collections.abc import Iterable

from rlboost.services.rollout_manager.domain.allocation import activate_reserved, allocate
from rlboost.services.rollout_manager.domain.effects import FAILED, Effect, Now, Record, dead_letter, event, forget_job
from rlboost.services.rollout_manager.domain.jobs import Jobs
from rlboost.services.rollout_manager.domain.money import charge_jobs
from rlboost.services.rollout_manager.domain.placement import place_queued, rebalance
from rlboost.services.rollout_manager.domain.queue import Queues, unassign, unassign_all
from rlboost.services.rollout_manager.domain.stalls import (
    dismiss_incompatible,
    dismiss_mismatched,
    lose_worker,
    take_stalled,
)
from rlboost.services.rollout_manager.domain.step_windows import advance_window, begin_step
from rlboost.services.rollout_manager.domain.tokens import Ledger, Sample
from rlboost.services.rollout_manager.domain.workers import Fleet
from rlboost.services.rollout_manager.domain.world import (
    NO_CLIENTS,
    Clients,
    World,
    deliver_to_trainer,
    drop,
    drop_refused,
    end_served_samples,
)
from rlboost.shared.ids import SampleId, is_served
from rlboost.shared.messages import ENDED_JOB_RETENTION_S, FINISH_NONE
from rlboost.shared.streams import names

# --- compaction -------------------------------------------------------------------------------------------------------
#
# Bounds the token log and the manager's memory by the work in flight.
#
# Samples that have been in flight for long are restated at the tail of the log, so that older entries can be trimmed.


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


def compact(ledger: Ledger) -> list[Effect]:
    """Restate the oldest samples when the log is long.

    Amortized, each token is written a bounded number of times: a sample is restated only after the log has grown by
    `MAX_LOG_RATIO` times all tokens in flight.
    """
    oldest = ledger.oldest(1)
    limit = max(MIN_LOG_TOKENS, MAX_LOG_RATIO * ledger.tokens_live)
    if oldest and ledger.tokens_in_log - oldest[0].log_tokens_before > limit:
        return _restate(ledger, older_than=ledger.tokens_in_log - limit // 2)
    return []


def forget_ended(jobs: Jobs, wall: float) -> list[Effect]:
    """Drop the audits of ended jobs once no late frame can arrive (Redis has them), and later the jobs themselves.

    Args:
        jobs: changed in place.
        wall: this moment in Unix seconds.

    """
    effects: list[Effect] = []
    for job in list(jobs.values()):
        ended_s = 0.0 if job.record.finished_at is None else wall - job.record.finished_at
        if ended_s > AUDIT_OPEN_S:
            job.close_audit()
        if ended_s > ENDED_JOB_RETENTION_S:
            jobs.forget(job.id)
            effects.append(forget_job(job.id))
    return effects


def _restate(ledger: Ledger, older_than: int) -> list[Effect]:
    effects: list[Effect] = []
    tokens = 0
    for sample in ledger.oldest(MAX_RESTATED):
        if sample.log_tokens_before >= older_than or tokens > MAX_RESTATED_TOKENS:
            break
        if sample.finish == FINISH_NONE:
            tokens += sample.n_tokens
            effects.append(Record(ledger.restatement_of(sample)))
    return effects


# --- decisions --------------------------------------------------------------------------------------------------------


MAX_DELIVERED_BYTES = 16 << 20
"""About how much one turn delivers: the samples of a long outage need several transactions, each of which Redis
executes well within the client's timeout.
"""


def decide(
    world: World,
    now: Now,
    dead: Iterable[str] = (),
    clients: Clients = NO_CLIENTS,
    mismatched: Iterable[str] = (),
) -> list[Effect]:
    """Decide everything that is due; return the effects.

    Args:
        world: changed in place.
        now: this moment.
        dead: silent workers whose lease has run out.
        clients: the state of the clients of serving requests.
        mismatched: workers that have missed commands.

    """
    jobs, fleet, ledger, queues, periodic = world.jobs, world.fleet, world.ledger, world.queues, world.periodic
    effects: list[Effect] = []
    for worker_id in dead:
        if worker := fleet.workers.get(worker_id):
            effects += lose_worker(jobs, fleet, queues, worker, now)
    for worker_id in mismatched:
        if worker := fleet.workers.get(worker_id):
            effects += dismiss_mismatched(jobs, fleet, queues, worker, now)
    for worker in fleet.take_incompatible():
        if worker.id in fleet.workers:
            effects += dismiss_incompatible(jobs, fleet, queues, worker, now)
    effects += _deliver_finished(world)
    effects += _reject_workers(fleet, queues, now)
    effects += _retry_failed(world, now)
    effects += drop_refused(world)
    effects += end_served_samples(world, clients, now)
    effects += allocate(jobs, fleet, queues, periodic, now)
    for job in jobs.active():
        # May open a window, for which reserved workers are activated.
        effects += begin_step(ledger, periodic, job, now)
    effects += activate_reserved(jobs, fleet)
    periodic.decided_once = True
    for job in jobs.active():
        effects += advance_window(jobs, fleet, ledger, queues, job, now)
    effects += place_queued(world, now)
    effects += rebalance(world, now)
    effects += world.siblings.send(fleet, now)
    effects += take_stalled(jobs, fleet, queues, periodic, now)
    effects += charge_jobs(jobs, fleet, periodic, now)
    return effects


def _deliver_finished(world: World) -> list[Effect]:
    effects: list[Effect] = []
    n_bytes = 0
    for sample_id in list(world.ledger.finished):
        sample = world.ledger.samples[sample_id]
        if not is_served(sample_id):
            if n_bytes > MAX_DELIVERED_BYTES:
                continue
            n_bytes += len(sample.tokens) + len(sample.logprobs) + len(sample.routed_experts)
            effects += deliver_to_trainer(world, sample)
        elif sample.worker:
            unassign(world.fleet, world.queues, sample)  # the client reads the rest from the ledger
    return effects


def _reject_workers(fleet: Fleet, queues: Queues, now: Now) -> list[Effect]:
    """Take all samples from workers that send invalid tokens where others do not, and drain these workers."""
    effects: list[Effect] = []
    for worker in fleet.take_rejected():
        reason = f"it sent invalid tokens for {worker.n_invalid_confirmed} samples that other workers completed"
        for sample in worker.in_order():
            effects += fleet.revoke(sample)
        effects += unassign_all(fleet, queues, worker, worker.in_order(), now, "invalid")
        effects += fleet.reject(worker, now, reason)
    return effects


def _retry_failed(world: World, now: Now) -> list[Effect]:
    effects: list[Effect] = []
    for sample_id, reason in list(world.ledger.failed.items()):
        sample = world.ledger.samples[sample_id]
        if sample.is_over_limit():
            effects += _dead_letter(world, sample, f"failed {len(sample.failed_on)} times: {reason}", now)
        elif sample.worker:
            unassign(world.fleet, world.queues, sample)
    return effects


def _dead_letter(world: World, sample: Sample, reason: str, now: Now) -> list[Effect]:
    """Drop a sample that fails on every worker, and store it among the dead letters for inspection."""
    where = f"{reason} (on {', '.join(sample.failed_on)})"
    name, job_id = str(SampleId.unpack(sample.id)), sample.request.job_id
    return [
        dead_letter(names.TOKEN_LOG, sample.first_id, world.ledger.restatement_of(sample), where, now),
        event("sample_failed", now, job_id, sample=name, reason=reason, workers=list(sample.failed_on)),
        *drop(world, sample, FAILED, reason),
    ]
