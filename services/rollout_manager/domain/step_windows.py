"""Begins, advances and ends the seeding window of each step (paper, section 4.1 and algorithm 1)."""

from __future__ import annotations

import math

from rlboost.services.rollout_manager.domain.engine_profiles import engine_profiles
from rlboost.services.rollout_manager.domain.jobs.progress import JobProgress
from rlboost.services.rollout_manager.domain.jobs.record import Job
from rlboost.services.rollout_manager.domain.seeding.tuner import StepMeter, WindowSource
from rlboost.services.rollout_manager.domain.seeding.window import StepSnapshot, Window
from rlboost.services.rollout_manager.domain.workers.worker import Worker
from rlboost.services.rollout_manager.domain.world import Now, World
from rlboost.shared.messages import SeedingEnded, SeedingReopened, StepReport

STRAGGLER_CHECK_EVERY_S = 1.0
"""How often the time that the remaining workers need for the rest of a step is estimated."""
MAX_CREDIT_S = 60.0
"""Generation that one heartbeat is credited with at most: a worker that was silent for longer was paused."""
TOO_SLOW = 2.0
"""The remaining workers are too slow if they need this many times the training time of a step."""


def begin_step(world: World, job: Job, now: Now) -> None:
    """Open the window of the job's next step, once its weights are committed and its groups are requested.

    With staleness, groups of later steps are requested already: the step that begins is the one with committed weights.
    """
    progress = world.progress[job.id]
    step = min(progress.requested_step, progress.committed_version)
    if step < 0 or (progress.window is not None and step <= progress.window.step):
        return
    fleet = progress.fleet.preemptible
    length_s, source = _length(job, progress)
    window = progress.window = Window(step, length_s, fleet=fleet)
    if world.periodic.decided_once:
        window.meter = StepMeter(now.mono, now.mono, tokens_before=world.audits[job.id].tokens_delivered)
    elif world.ledger.samples:
        window.on_placed(now.mono)
    shown = None if length_s is None else round(length_s, 3)
    world.emit_event("seeding_started", now, job.id, step=step, window_s=shown, source=source, fleet=fleet)


def _length(job: Job, progress: JobProgress) -> tuple[float | None, WindowSource]:
    match job.spec.elastic.seeding:
        case "auto":
            return job.window_tuner.choose(progress.fleet.preemptible, progress.fleet.reserved)
        case "off":
            return 0.0, "off"
        case seconds:
            return seconds, "fixed"


def advance_window(world: World, job: Job, now: Now) -> None:
    """Measure the step, and close, end or reopen its window where that is due."""
    progress = world.progress[job.id]
    window = progress.window
    if window is None:
        return
    snapshot = _snapshot(world, job, progress, window, now)
    if window.meter is not None:
        working = any(not requirement.is_serving for requirement in world.in_flight.of_job(job.id))
        window.meter.update(now.mono, fleet=snapshot.preemptible, reserved=snapshot.reserved, working=working)
    _follow_fleet(world, job, window, now)
    match window.advance(snapshot):
        case "close":
            world.emit_event("seeding_window_closing", now, job.id, step=window.step, reason=window.reason)
        case "end":
            length_s = window.lasted_s
            engines = engine_profiles(world, job.id)
            message = SeedingEnded(step=window.step, window_s=length_s, reason=window.reason, engines=engines)
            world.outbox.deliver(job.id, message)
            world.emit_event("seeding_ended", now, job.id, step=window.step, window_s=length_s, reason=window.reason)
        case "reopen":
            world.outbox.deliver(job.id, SeedingReopened(step=window.step))
            world.emit_event("seeding_reopened", now, job.id, step=window.step)


def _follow_fleet(world: World, job: Job, window: Window, now: Now) -> None:
    """Choose the length of an open window again when the number of preemptible workers has changed."""
    progress = world.progress[job.id]
    fleet = progress.fleet.preemptible
    if fleet == window.fleet or window.phase != "open" or window.reopened or window.length_s is None:
        return
    window.fleet = fleet
    length_s, source = _length(job, progress)
    if length_s is not None and length_s != window.length_s:
        window.length_s = length_s
        shown = round(length_s, 3)
        world.emit_event(
            "seeding_window_changed", now, job.id, step=window.step, window_s=shown, source=source, fleet=fleet
        )


def _snapshot(world: World, job: Job, progress: JobProgress, window: Window, now: Now) -> StepSnapshot:
    return StepSnapshot(
        now=now.mono,
        in_flight=world.in_flight.in_step(job.id, window.step),
        requested=world.in_flight.requested.get((job.id, window.step), 0),
        reserved=progress.fleet.reserved,
        reserved_awake=progress.fleet.reserved_awake,
        preemptible=progress.fleet.preemptible,
        preemptible_ready=progress.fleet.preemptible_ready,
        too_slow=_check_stragglers(world, job, progress, window, now),
    )


def _check_stragglers(world: World, job: Job, progress: JobProgress, window: Window, now: Now) -> bool:
    """Update whether the remaining preemptible workers are too slow, because others left since the step began.

    Reads all samples in flight, therefore at most every `STRAGGLER_CHECK_EVERY_S`; in between the last result holds.
    """
    present = progress.fleet.preemptible
    window.max_fleet = max(window.max_fleet, present)
    if present >= window.max_fleet or not job.window_tuner.train_s:
        window.too_slow = False
    elif now.mono - window.checked_at >= STRAGGLER_CHECK_EVERY_S:
        window.checked_at = now.mono
        window.too_slow = _remaining_s(world, job, progress, window.step) > TOO_SLOW * job.window_tuner.train_s
    return window.too_slow


def _remaining_s(world: World, job: Job, progress: JobProgress, step: int) -> float:
    """Return the seconds that the preemptible workers need for the samples of a step in flight."""
    tokens = 0.0
    for sample in world.ledger.samples.values():
        if sample.request.job_id == job.id and sample.request.version == step:
            tokens += progress.lengths.remaining_tokens(sample)
    workers = [worker for worker in world.fleet.workers.values() if worker.job == job.id and not worker.reserved]
    tokens_per_s = sum(worker.expected_tokens_per_s() for worker in workers)
    return tokens / tokens_per_s if tokens_per_s else math.inf


def credit_generation(world: World, worker: Worker, now: Now) -> None:
    """Credit the step with what a worker has generated since its last heartbeat; to be called at the next one."""
    progress = world.progress.get(worker.job)
    if progress and progress.window and progress.window.meter:
        elapsed_s = min(now.mono - worker.last_seen_at, MAX_CREDIT_S)
        progress.window.meter.credit(worker.id, worker.batch_share(), elapsed_s)


def end_step(world: World, job: Job, report: StepReport, now: Now) -> None:
    """Measure a step whose weights are committed, and tune the length of the next window by it."""
    progress = world.progress.get(job.id)
    window = progress.window if progress else None
    if progress is None or window is None or window.meter is None or window.step != report.step:
        return
    meter, window.meter = window.meter, None
    progress.step_without_spot_s = meter.without_spot_s(window.lasted_s, report.wait_s)
    if job.spec.elastic.seeding != "auto":
        return
    # Where no preemptible worker could take over in time, the window lasted longer: that must not lengthen the next.
    window_s = window.lasted_s if window.length_s is None else min(window.lasted_s, window.length_s)
    tokens = world.audits[job.id].tokens_delivered
    measured = meter.measure(window_s, report.wait_s, report.train_s, tokens)
    if meter.max_fleet and meter.reserved:
        fields = job.window_tuner.learn(measured)
        world.emit_event("seeding_window_updated", now, job.id, step=report.step, **fields)
