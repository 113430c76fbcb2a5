"""Begins, advances and ends the seeding window of each step (paper, section 4.1 and algorithm 1)."""

from __future__ import annotations

import math
from statistics import median_low

from rlboost.services.rollout_manager.domain.effects import Deliver, Effect, Now, event
from rlboost.services.rollout_manager.domain.jobs import JobEntry, Jobs
from rlboost.services.rollout_manager.domain.measurements import Profile
from rlboost.services.rollout_manager.domain.queue import Queues
from rlboost.services.rollout_manager.domain.tokens import Ledger
from rlboost.services.rollout_manager.domain.windows import StepMeter, StepSnapshot, Window, WindowSource
from rlboost.services.rollout_manager.domain.workers import Fleet, Worker
from rlboost.services.rollout_manager.domain.world import PeriodicDecisions
from rlboost.shared.messages import EngineProfile, SeedingEnded, SeedingReopened, StepReport

# --- engine profiles --------------------------------------------------------------------------------------------------
#
# What the manager has learned of the kinds of workers that serve a job, for the trainer's `profile.json`.


def engine_profiles(fleet: Fleet, job_id: str) -> list[EngineProfile]:
    """Return a profile for each role and kind of the job's workers whose throughput is known."""
    members: dict[tuple[str, str], list[Worker]] = {}
    for worker in fleet.workers.values():
        if job_id in worker.jobs and worker.update_s and _is_known(worker.profile):
            members.setdefault((worker.joined.role, worker.joined.kind), []).append(worker)
    return [_profile(workers) for _, workers in sorted(members.items())]


def _profile(workers: list[Worker]) -> EngineProfile:
    joined, profile = workers[0].joined, workers[0].profile
    return EngineProfile(
        kind=joined.kind,
        role=joined.role,
        workers=len(workers),
        slots=min(worker.joined.slots for worker in workers),
        kv_tokens=min(worker.kv.capacity for worker in workers),
        price_per_hour=median_low(worker.price_per_hour for worker in workers),
        step_s=profile.fixed_s,
        per_sample_s=profile.each_s,
        per_kv_token_s=profile.token_s,
        update_s=median_low(worker.update_s for worker in workers),
        update_pause_s=median_low(worker.update_pause_s for worker in workers),
    )


def _is_known(profile: Profile) -> bool:
    # Workers are not trusted: what they report may overflow the fit, and such a message would not decode.
    return profile.known and math.isfinite(profile.step_s(1, 1))


# --- step windows -----------------------------------------------------------------------------------------------------


STRAGGLER_CHECK_EVERY_S = 1.0
"""How often the time that the remaining workers need for the rest of a step is estimated."""
MAX_CREDIT_S = 60.0
"""Generation that one heartbeat is credited with at most: a worker that was silent for longer was paused."""
TOO_SLOW = 2.0
"""The remaining workers are too slow if they need this many times the training time of a step."""


def begin_step(ledger: Ledger, periodic: PeriodicDecisions, job: JobEntry, now: Now) -> list[Effect]:
    """Open the window of the job's next step, once its weights are committed and its groups are requested.

    With staleness, groups of later steps are requested already: the step that begins is the one with committed weights.
    """
    progress = job.progress
    step = min(progress.requested_step, progress.committed_version)
    if job.served_for or step < 0 or (progress.window is not None and step <= progress.window.step):
        return []
    n_spot = progress.fleet.preemptible
    length_s, source = _length(job)
    window = progress.window = Window(step, length_s, fleet=n_spot)
    if periodic.decided_once:
        window.meter = StepMeter(now.mono, now.mono, tokens_before=job.audit.tokens_delivered)
    elif ledger.samples:
        window.on_placed(now.mono)
    shown = None if length_s is None else round(length_s, 3)
    return [event("seeding_started", now, job.id, step=step, window_s=shown, source=source, fleet=n_spot)]


def _length(job: JobEntry) -> tuple[float | None, WindowSource]:
    match job.record.spec.elastic.seeding:
        case "auto":
            fleet = job.progress.fleet
            return job.record.window_tuner.choose(fleet.preemptible, fleet.reserved)
        case "off":
            return 0.0, "off"
        case seconds:
            return seconds, "fixed"


def advance_window(jobs: Jobs, fleet: Fleet, ledger: Ledger, queues: Queues, job: JobEntry, now: Now) -> list[Effect]:
    """Measure the step, and close, end or reopen its window where that is due."""
    window = job.progress.window
    if window is None:
        return []
    snapshot = _snapshot(jobs, fleet, ledger, queues, job, window, now)
    if window.meter is not None:
        working = any(not requirement.is_serving for requirement in queues.in_flight.of_job(job.id))
        window.meter.update(now.mono, fleet=snapshot.preemptible, reserved=snapshot.reserved, working=working)
    effects = _follow_fleet(job, window, now)
    match window.advance(snapshot):
        case "close":
            effects.append(event("seeding_window_closing", now, job.id, step=window.step, reason=window.reason))
        case "end":
            step, length_s, reason = window.step, window.lasted_s, window.reason
            engines = engine_profiles(fleet, job.id)
            ended = SeedingEnded(step=step, window_s=length_s, reason=reason, engines=engines)
            effects.append(Deliver(job.id, ended))
            effects.append(event("seeding_ended", now, job.id, step=step, window_s=length_s, reason=reason))
        case "reopen":
            effects.append(Deliver(job.id, SeedingReopened(step=window.step)))
            effects.append(event("seeding_reopened", now, job.id, step=window.step))
    return effects


def _follow_fleet(job: JobEntry, window: Window, now: Now) -> list[Effect]:
    """Choose the length of an open window again when the number of preemptible workers has changed."""
    n_spot = job.progress.fleet.preemptible
    if n_spot == window.fleet or window.phase != "open" or window.reopened or window.length_s is None:
        return []
    window.fleet = n_spot
    length_s, source = _length(job)
    if length_s is None or length_s == window.length_s:
        return []
    window.length_s = length_s
    step, shown = window.step, round(length_s, 3)
    return [event("seeding_window_changed", now, job.id, step=step, window_s=shown, source=source, fleet=n_spot)]


def _snapshot(
    jobs: Jobs, fleet: Fleet, ledger: Ledger, queues: Queues, job: JobEntry, window: Window, now: Now
) -> StepSnapshot:
    counts = job.progress.fleet
    asked = [(one, queues.in_flight.in_step(one.id, window.step)) for one in jobs.models_of(job.id)]
    return StepSnapshot(
        now=now.mono,
        in_flight=queues.in_flight.in_step(job.id, window.step),
        of_models=sum(n for _, n in asked),
        unpaid=sum(n for one, n in asked if one.audit.cost.budget_reached),
        requested=queues.in_flight.requested.get((job.id, window.step), 0),
        reserved=counts.reserved,
        reserved_awake=counts.reserved_awake,
        preemptible=counts.preemptible,
        preemptible_ready=counts.preemptible_ready,
        too_slow=_check_stragglers(fleet, ledger, job, window, now),
    )


def _check_stragglers(fleet: Fleet, ledger: Ledger, job: JobEntry, window: Window, now: Now) -> bool:
    """Update whether the remaining preemptible workers are too slow, because others left since the step began.

    Reads all samples in flight, therefore at most every `STRAGGLER_CHECK_EVERY_S`; in between the last result holds.
    """
    present = job.progress.fleet.preemptible
    window.max_fleet = max(window.max_fleet, present)
    if present >= window.max_fleet or not job.record.window_tuner.train_s:
        window.too_slow = False
    elif now.mono - window.checked_at >= STRAGGLER_CHECK_EVERY_S:
        window.checked_at = now.mono
        window.too_slow = _remaining_s(fleet, ledger, job, window.step) > TOO_SLOW * job.record.window_tuner.train_s
    return window.too_slow


def _remaining_s(fleet: Fleet, ledger: Ledger, job: JobEntry, step: int) -> float:
    """Return the seconds that the preemptible workers need for the samples of a step in flight."""
    tokens = 0.0
    for sample in ledger.samples.values():
        if sample.request.job_id == job.id and sample.request.version == step:
            tokens += job.progress.lengths.remaining_tokens(sample)
    workers = [worker for worker in fleet.workers.values() if job.id in worker.jobs and not worker.reserved]
    tokens_per_s = sum(worker.expected_tokens_per_s() / len(worker.jobs) for worker in workers)
    return tokens / tokens_per_s if tokens_per_s else math.inf


def credit_generation(jobs: Jobs, worker: Worker, now: Now) -> None:
    """Credit the step with what a worker has generated since its last heartbeat; to be called at the next one."""
    for job in filter(None, map(jobs.get_active, worker.jobs)):
        if job.progress.window and job.progress.window.meter:
            elapsed_s = min(now.mono - worker.last_seen_at, MAX_CREDIT_S) / len(worker.jobs)
            tokens_per_s = worker.expected_tokens_per_s() if worker.trust.is_full else 0.0
            job.progress.window.meter.credit(worker.id, worker.batch_share(), elapsed_s, tokens_per_s)


def end_step(job: JobEntry, report: StepReport, now: Now) -> list[Effect]:
    """Measure a step whose weights are committed, and tune the length of the next window by it."""
    progress, window = job.progress, job.progress.window
    if window is None or window.meter is None or window.step != report.step:
        return []
    meter, window.meter = window.meter, None
    progress.step_without_spot_s = meter.without_spot_s(window.lasted_s, report.wait_s)
    if job.record.spec.elastic.seeding != "auto":
        return []
    # Where no preemptible worker could take over in time, the window lasted longer: that must not lengthen the next.
    window_s = window.lasted_s if window.length_s is None else min(window.lasted_s, window.length_s)
    tokens = job.audit.tokens_delivered
    measured = meter.measure(window_s, report.wait_s, report.train_s, tokens)
    if not (meter.max_fleet and meter.reserved):
        return []
    return [event("seeding_window_updated", now, job.id, step=report.step, **job.record.window_tuner.learn(measured))]
