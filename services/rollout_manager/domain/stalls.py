"""Takes samples from workers that generate too little, and removes workers that do not drain (invariant 8).

A worker's engine may hang with a watchdog that hangs too, its weight load may never end, or it may be a client that
only claims to be a worker. Heartbeats and leases prove nothing then, only tokens do. Each sample has some patience,
which runs out with time while others could generate it; each token restores it at the pace of the fleet, so a trickle
of tokens does not help. When it has run out, the sample resumes on another worker with its tokens, and the worker that
held it gets few samples, later ones, or none: see `Trust`.

The manager measures the time between tokens and to the first one. Of what workers report, only how long they take to
load weights counts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median_low
from typing import Literal

from rlboost.services.rollout_manager.domain.effects import Effect, Now, event, forget_worker
from rlboost.services.rollout_manager.domain.jobs import Jobs
from rlboost.services.rollout_manager.domain.measurements import MAX_OFFENSES, tokens_of
from rlboost.services.rollout_manager.domain.placement import KV_FILL, admits, has_capacity
from rlboost.services.rollout_manager.domain.queue import Queues, requirement_of, unassign_all
from rlboost.services.rollout_manager.domain.tokens import Sample
from rlboost.services.rollout_manager.domain.workers import LONGEST_SILENCE_S, Fleet, Worker
from rlboost.services.rollout_manager.domain.world import PeriodicDecisions
from rlboost.shared.messages.codec import PROTOCOL

# --- worker removal ---------------------------------------------------------------------------------------------------
#
# Removes workers that left, were lost or are dismissed: their samples are queued, and the jobs get an event.


Preempted = Literal["with_notice", "without_notice"]
"""How a worker's machine was taken; None in its place: the worker left or is dismissed for another reason."""


def on_worker_left(jobs: Jobs, fleet: Fleet, queues: Queues, worker: Worker, now: Now, reason: str) -> list[Effect]:
    """Remove a worker that has exited as planned, or after a preemption notice."""
    return _remove(jobs, fleet, queues, worker, now, "left", reason, "with_notice" if worker.noticed else None)


def lose_worker(jobs: Jobs, fleet: Fleet, queues: Queues, worker: Worker, now: Now) -> list[Effect]:
    """Declare a worker dead: its heartbeats stopped, and its lease ran out or was not written as workers write it."""
    is_long = now.mono - worker.last_seen_at > LONGEST_SILENCE_S
    reason = f"it sent no heartbeat for {LONGEST_SILENCE_S:.0f} s" if is_long else "its lease ran out"
    return _remove(
        jobs, fleet, queues, worker, now, "lost", reason, "with_notice" if worker.noticed else "without_notice"
    )


def remove_undrained(
    jobs: Jobs, fleet: Fleet, queues: Queues, worker: Worker, now: Now, limit_s: float
) -> list[Effect]:
    """Remove a worker that was to drain and has not left in time."""
    reason = f"it was to drain, and did not hand off its samples and leave within {limit_s:.3g} s"
    return _remove(jobs, fleet, queues, worker, now, "lost", reason, "with_notice" if worker.noticed else None)


def dismiss_mismatched(jobs: Jobs, fleet: Fleet, queues: Queues, worker: Worker, now: Now) -> list[Effect]:
    """Dismiss a worker that has missed commands: it joins again and is assigned everything anew."""
    reason = "it missed commands: what it holds differs from what it was assigned"
    return _remove(jobs, fleet, queues, worker, now, "lost", reason, None)


def dismiss_incompatible(jobs: Jobs, fleet: Fleet, queues: Queues, worker: Worker, now: Now) -> list[Effect]:
    """Dismiss a worker with another protocol, which an earlier manager had: it cannot join again."""
    reason = f"it has protocol {worker.joined.protocol} and the manager {PROTOCOL}: install the same version of rlboost"
    return _remove(jobs, fleet, queues, worker, now, "lost", reason, None)


def _remove(
    jobs: Jobs,
    fleet: Fleet,
    queues: Queues,
    worker: Worker,
    now: Now,
    state: Literal["lost", "left"],
    reason: str,
    preempted: Preempted | None,
) -> list[Effect]:
    if preempted:
        _count_preemption(jobs, fleet, worker, preempted)
    effects = unassign_all(fleet, queues, worker, worker.in_order(), now, state)
    fleet.remove(worker, state, reason)
    name, job, silent_s = worker.id, worker.job, round(now.mono - worker.last_seen_at, 3)
    return [
        *effects,
        forget_worker(worker.id, reason),
        event("worker_lost", now, worker=name, job_id=job, reason=reason, preempted=preempted, silent_s=silent_s)
        if state == "lost"
        else event("worker_left", now, worker=name, job_id=job, reason=reason, preempted=preempted),
    ]


def _count_preemption(jobs: Jobs, fleet: Fleet, worker: Worker, kind: Preempted) -> None:
    fleet.on_preempted(worker)
    for job in jobs.active():
        if job.record.state in {"running", "paused"} and job.id in (worker.jobs or (job.id,)):
            job.audit.preemptions[kind] += 1


# --- stalls -----------------------------------------------------------------------------------------------------------


CHECK_EVERY_S = 1.0
SLOWEST = 50.0
"""A worker may take this many times the fleet's median for a token."""
SLOWEST_FIRST = 10.0
"""And this many times the fleet's median for the first token of an assignment, or for a weight update."""
PREFILL_TOKENS_PER_S = 100.0
"""Lower bound of any engine's prefill speed, for one sample."""
PREFILLED_TOKENS_PER_S = 1000.0
"""The same for all samples that a worker holds: their prefills follow one another."""


@dataclass(frozen=True, slots=True)
class Limits:
    """How long a worker may send no token, from what the fleet shows."""

    next_s: float
    """For a sample that has a token from it."""
    first_s: float
    """For the first token of an assignment, without its prefill."""
    per_token_s: float
    """What each token adds, up to `next_s`; infinite while no pace is known."""
    update_s: float
    """For a weight update."""
    unproven_s: float
    """For the probe of a worker that has proven nothing, for the hand-off of one that drains, and until a probe."""

    @classmethod
    def of(cls, fleet: Fleet, stall_limit_s: float) -> Limits:
        """Return the limits of a fleet; `stall_limit_s` is the shortest for a worker that has sent tokens."""
        workers = fleet.workers.values()
        interval_s = _median(worker.trust.token_interval_s for worker in workers)
        first_s = _median(worker.trust.first_token_s for worker in workers)
        update_s = _median(worker.update_s for worker in workers)
        return cls(
            next_s=max(stall_limit_s, SLOWEST * interval_s),
            first_s=max(stall_limit_s, SLOWEST * interval_s, SLOWEST_FIRST * first_s),
            per_token_s=SLOWEST * interval_s or math.inf,
            update_s=max(2 * stall_limit_s, SLOWEST_FIRST * update_s),
            unproven_s=max(stall_limit_s / 3, SLOWEST * interval_s, SLOWEST_FIRST * first_s),
        )


def _median(values: Iterable[float]) -> float:
    known = [value for value in values if value > 0]
    return median_low(known) if known else 0.0


def take_stalled(jobs: Jobs, fleet: Fleet, queues: Queues, periodic: PeriodicDecisions, now: Now) -> list[Effect]:
    """Take the samples whose owners generate too little, and remove workers that do not drain in time."""
    elapsed_s = now.mono - periodic.stalls_checked_at
    if elapsed_s < CHECK_EVERY_S:
        return []
    # A manager that was stopped has not watched meanwhile.
    elapsed_s, periodic.stalls_checked_at = min(elapsed_s, 2 * CHECK_EVERY_S), now.mono
    limits = Limits.of(fleet, fleet.stall_limit_s)
    workers = list(fleet.workers.values())
    held = {worker.id: worker.generating() for worker in workers}
    for worker in workers:
        _measure(worker, held[worker.id], limits, now, elapsed_s)
        worker.trust.on_time(now.mono)
    healthy = [worker for worker in workers if _is_healthy(worker, held[worker.id], limits, now)]
    effects: list[Effect] = []
    for worker in workers:
        if _is_overdue_to_leave(worker, limits, now):
            effects += remove_undrained(jobs, fleet, queues, worker, now, limits.unproven_s)
        elif held[worker.id] and not _is_updating(worker, limits, now):
            effects += _take_overdue(fleet, queues, worker, held[worker.id], healthy, limits, now, elapsed_s)
    return effects


# --- measurement ------------------------------------------------------------------------------------------------------


def _measure(worker: Worker, samples: Sequence[Sample], limits: Limits, now: Now, elapsed_s: float) -> None:
    """Note the tokens that came since the last check, and restore patience for them."""
    trust, n_tokens, n_running = worker.trust, 0, 0
    was_updating = worker.updating_since is not None
    is_settled = worker.assigned_version in {None, (worker.job_id, worker.version)}
    worker.updating_since = None if is_settled else worker.updating_since or now.mono
    for sample in samples:
        attempt, before = sample.checked
        if attempt != sample.attempt:
            before, sample.patience_s = sample.offset, _first_limit_s(worker, sample, limits)
        elif was_updating and is_settled:  # its tokens are prefilled again
            sample.patience_s = _first_limit_s(worker, sample, limits)
        grown = sample.n_tokens - before
        sample.checked = sample.attempt, sample.n_tokens
        if grown > 0:
            n_tokens += grown
            if before == sample.offset and sample.placed_at:
                trust.on_first_token(now.mono - sample.placed_at)
            sample.patience_s = min(limits.next_s, sample.patience_s + grown * limits.per_token_s)
        n_running += sample.n_tokens > sample.offset
    trust.on_pace(n_running, n_tokens, elapsed_s)
    if n_tokens:
        trust.progressed_at = now.mono
    trust.silent_s = trust.silent_s + elapsed_s if samples and not n_tokens else 0.0


def _first_limit_s(worker: Worker, sample: Sample, limits: Limits) -> float:
    prefill_s = max(tokens_of(sample) / PREFILL_TOKENS_PER_S, worker.kv.held / PREFILLED_TOKENS_PER_S)
    return prefill_s + (limits.first_s if worker.trust.is_full else limits.unproven_s)


def _is_updating(worker: Worker, limits: Limits, now: Now) -> bool:
    return worker.updating_since is not None and now.mono - worker.updating_since < limits.update_s


def _is_healthy(worker: Worker, samples: Sequence[Sample], limits: Limits, now: Now) -> bool:
    """Return True if the worker gives tokens, or has nothing to generate and may get samples."""
    if not worker.generates or worker.trust.on_probation:
        return False
    # Much less than the patience of any sample: it must not run out when the whole fleet stalls.
    return not samples or now.mono - worker.trust.progressed_at <= limits.unproven_s / 2


# --- decisions --------------------------------------------------------------------------------------------------------


def _take_overdue(
    fleet: Fleet,
    queues: Queues,
    worker: Worker,
    samples: Sequence[Sample],
    healthy: Sequence[Worker],
    limits: Limits,
    now: Now,
    elapsed_s: float,
) -> list[Effect]:
    # While the whole fleet stalls, no worker is to blame, and no other would do better.
    others = [other for other in healthy if other is not worker]
    if not any(_can_generate(other, sample) for sample in samples for other in others):
        return []
    for sample in samples:
        sample.patience_s -= elapsed_s
    overdue = [sample for sample in samples if sample.patience_s <= 0]
    overdue = [sample for sample in overdue if any(_can_generate(other, sample) for other in others)]
    if not overdue:
        return []
    if len(overdue) <= _n_queued(worker):
        # They wait in its engine's queue, as they may: they migrate only if another worker can start them.
        free = [other for other in others if has_capacity(other)]
        waiting = [sample for sample in overdue if any(_can_generate(other, sample) for other in free)]
        return _take(fleet, queues, worker, waiting, now)
    effects = _take(fleet, queues, worker, overdue, now)
    trust = worker.trust
    trust.offend(now.mono, limits.unproven_s)
    suspected = event(
        "worker_suspected",
        now,
        worker=worker.id,
        job_id=worker.job,
        samples=len(overdue),
        silent_s=round(trust.silent_s),
        offenses=trust.offenses,
    )
    effects.append(suspected)
    if trust.offenses >= MAX_OFFENSES and not worker.reserved and worker.state != "draining":
        reason = f"it held samples {trust.offenses} times and generated too little while other workers generated"
        effects += fleet.reject(worker, now, reason)
    return effects


def _n_queued(worker: Worker) -> int:
    """Return how many of its samples may wait for a slot, or for room in the KV cache."""
    kv = worker.kv
    return len(worker.samples) if kv.capacity and kv.used > KV_FILL * kv.capacity else worker.pending


def _can_generate(worker: Worker, sample: Sample) -> bool:
    return requirement_of(sample).is_met_by(worker) and admits(worker, sample)


def _take(fleet: Fleet, queues: Queues, worker: Worker, samples: Sequence[Sample], now: Now) -> list[Effect]:
    """Revoke samples of a worker, and queue them with the tokens that they have."""
    for sample in samples:
        sample.taken_from = worker.id
    return [*fleet.revoke(*samples), *unassign_all(fleet, queues, worker, samples, now, "stalled")]


def _is_overdue_to_leave(worker: Worker, limits: Limits, now: Now) -> bool:
    """Return True if a worker has not drained in time; to be called at every check."""
    if worker.state != "draining":
        worker.draining_since = None
        return False
    worker.draining_since = now.mono if worker.draining_since is None else worker.draining_since
    return now.mono - worker.draining_since > limits.unproven_s
