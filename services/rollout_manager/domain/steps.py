"""A step's beginning, window and end, as the offload sees them (paper, section 4.1 and algorithm 1)."""

from __future__ import annotations

import math

from services.rollout_manager.domain.jobs import Job
from services.rollout_manager.domain.offload import Meter, Source
from services.rollout_manager.domain.seeding import View, Window
from services.rollout_manager.domain.world import Now, World
from shared.messages import SeedingEnded, SeedingReopened, StepReport

LOOK_EVERY_S = 1.0
"""How often it is asked how long the workers that are left would take."""
TOO_LONG = 2.0
"""They take too long when it is so many times what training a step takes."""


def begin_step(world: World, job: Job, now: Now) -> None:
    """Open the window of the job's next step, once its weights are committed and its groups are asked for.

    With staleness, groups of later steps are asked for already: the step that begins is the one whose version is there.
    """
    step = min(world.requested_step.get(job.id, -1), world.committed.get(job.id, -1))
    window = world.windows.get(job.id)
    if step < 0 or (window is not None and step <= window.step):
        return
    fleet = world.crews[job.id].preemptible
    length_s, source = _length(job, fleet)
    window = world.windows[job.id] = Window(step, length_s)
    if not world.resumed:
        window.meter = Meter(now.mono, now.mono)
    elif world.ledger.samples:
        window.placed(now.mono)
    shown = None if length_s is None else round(length_s, 3)
    world.tell("seeding_began", now, job.id, step=step, window_s=shown, source=source, fleet=fleet)


def _length(job: Job, fleet: int) -> tuple[float | None, Source]:
    match job.spec.elastic.seeding:
        case "auto":
            return job.offload.choose(fleet)
        case "off":
            return 0.0, "off"
        case seconds:
            return seconds, "fixed"


def advance_window(world: World, job: Job, now: Now) -> None:
    """Measure the step, and close, end or reopen its window where that is due."""
    window = world.windows.get(job.id)
    if window is None:
        return
    view = _view(world, job, window, now)
    if window.meter is not None:
        working = any(need.job_id == job.id and not need.serves for need in world.live)
        window.meter.update(now.mono, fleet=view.preemptible, reserved=view.reserved, working=working)
    match window.advance(view):
        case "close":
            world.restless = True
            world.tell("seeding_closing", now, job.id, step=window.step, reason=window.reason)
        case "end":
            length_s = window.lasted_s
            message = SeedingEnded(step=window.step, window_s=length_s, reason=window.reason)
            world.deliver_message(job.id, message)
            world.tell("seeding_ended", now, job.id, step=window.step, window_s=length_s, reason=window.reason)
        case "reopen":
            world.restless = True
            world.deliver_message(job.id, SeedingReopened(step=window.step))
            world.tell("seeding_reopened", now, job.id, step=window.step)


def _view(world: World, job: Job, window: Window, now: Now) -> View:
    crew = world.crews[job.id]
    return View(
        now=now.mono,
        live=sum(n for need, n in world.live.items() if need[:2] == (job.id, window.step)),
        asked=world.asked.get((job.id, window.step), 0),
        reserved=crew.reserved,
        reserved_awake=crew.reserved_awake,
        preemptible=crew.preemptible,
        preemptible_ready=crew.preemptible_ready,
        left_behind=_left_behind(world, job, window, now),
    )


def _left_behind(world: World, job: Job, window: Window, now: Now) -> bool:
    """Tell whether so many preemptible workers have gone since the step began that the rest takes too long."""
    there = world.crews[job.id].preemptible
    window.crew = max(window.crew, there)
    if there >= window.crew or not job.offload.train_s:
        window.left_behind = False
    elif now.mono - window.looked_at >= LOOK_EVERY_S:
        window.looked_at = now.mono
        window.left_behind = _rest_s(world, job, window.step) > TOO_LONG * job.offload.train_s
    return window.left_behind


def _rest_s(world: World, job: Job, step: int) -> float:
    """Return how long the preemptible workers would take for what is left of a step, in seconds."""
    rest, lengths = 0.0, world.lengths[job.id]
    for sample in world.ledger.samples.values():
        if sample.request.job_id == job.id and sample.request.version == step:
            rest += lengths.rest(sample)
    workers = [worker for worker in world.fleet.workers.values() if worker.job == job.id and not worker.reserved]
    tokens_per_s = sum(worker.could_make_per_s() for worker in workers)
    return rest / tokens_per_s if tokens_per_s else math.inf


def end_step(world: World, job: Job, report: StepReport, now: Now) -> None:
    """Learn from a step whose weights are committed how long the next window should be."""
    window = world.windows.get(job.id)
    if window is None or window.meter is None or window.step != report.step or job.spec.elastic.seeding != "auto":
        return
    meter, window.meter = window.meter, None
    # Where nobody could take over when the time was up it lasted longer, which says nothing of the next one.
    window_s = window.lasted_s if window.length_s is None else min(window.lasted_s, window.length_s)
    seen = meter.seen(window_s, report.wait_s, report.train_s)
    if meter.most and meter.reserved:
        world.tell("seeding_learnt", now, job.id, step=report.step, **job.offload.learn(seen))
